"""Unacknowledged tasks wait in memory for a write; an acknowledgement follows the write of all earlier entries."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from multigpu.v1 import task_pb2
from multigpu_master.core import events as ev
from multigpu_master.core.model import Outcome, OutcomeState, Task
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.wire import outcomes as wire_outcomes
from multigpu_master.wire import specs as wire_specs
from multigpu_master.wire.tasks import settle_record
from multigpu_master.write_buffer import DEFER_S, WriteBuffer

SPEC = wire_specs.SpecReader().read(task_pb2.TaskSpec(kind="echo"))


class Stage:
    """WriteBuffer on a real journal, without a core."""

    def __init__(self, data_dir: Path, size_max_bytes: int = 1 << 30) -> None:
        self.data_dir = data_dir
        self.journal = SqliteJournal(data_dir, size_max_bytes=size_max_bytes)
        self.events: list[ev.Event] = []
        self.write_buffer = WriteBuffer(self.journal, self.events.append, lambda: None, self._die)
        loop, handle_commit = asyncio.get_running_loop(), self.write_buffer.handle_commit
        list(self.journal.open(lambda *commit: loop.call_soon_threadsafe(handle_commit, *commit)).tasks)
        self.outcomes = wire_outcomes.OutcomeWriter()

    @staticmethod
    def _die(reason: str) -> None:
        raise AssertionError(reason)

    def settle(self, task: Task) -> None:
        task.outcome = Outcome(OutcomeState.SUCCEEDED, task.submit_s + 1, b"result")
        self.write_buffer.append_settles([(task, self.outcomes.write(task))], 100.0)

    def close(self) -> list[int]:
        """Ends it, and returns the tasks that the next master would find."""
        self.journal.close(10)
        journal = SqliteJournal(self.data_dir, size_max_bytes=1 << 30)
        found = [record.task_id for record in journal.open(lambda *_: None).tasks]
        journal.close(10)
        return found


def tasks(*ids: int) -> list[Task]:
    return [Task(SPEC, f"request-{i}", b"payload", submit_s=1000.0, task_id=i) for i in ids]


def test_an_outcome_is_kept_for_its_time_after_the_report_though_the_task_ended_long_before() -> None:
    """A result that waited in its worker for an hour, while no master ran, was deleted at once."""
    (task,) = tasks(1)
    task.outcome = Outcome(OutcomeState.SUCCEEDED, 2000.0, b"result")
    assert settle_record(task, b"", 5600.0).expire_time_s == 5600.0 + SPEC.result_ttl_s


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def ignore(_error: JournalError | None) -> None:
    pass


async def test_a_task_that_settles_soon_is_written_as_its_outcome_only(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    one, two = tasks(1, 2)
    stage.write_buffer.defer([one, two])
    stage.settle(one)
    await until(lambda: stage.journal.get_outcome(1) is not None)
    assert stage.close() == []


async def test_an_unsettled_task_is_written_after_the_delay(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    one, two = tasks(1, 2)
    stage.write_buffer.defer([one])
    await asyncio.sleep(1.5 * DEFER_S)
    stage.write_buffer.defer([two])
    assert stage.close() == [1]


async def test_a_submit_that_has_joined_a_task_is_answered_after_that_is_rejected(tmp_path: Path) -> None:
    """Else the client would never get the outcome (the simulator's seed 30083234)."""
    stage = Stage(tmp_path, size_max_bytes=256 << 10)
    large = Task(SPEC, "request-1", bytes(200_000), submit_s=1000.0, task_id=1)
    acknowledged: list[int] = []
    stage.write_buffer.append_submits([large], ignore, (), urgent=False)
    stage.write_buffer.append_submits(tasks(2), lambda _error: acknowledged.append(len(stage.events)), (), urgent=True)
    await until(lambda: bool(acknowledged))
    assert acknowledged == [2], "the core has heard of both rejections before"
    stage.close()


async def test_a_task_that_settled_is_not_forgotten_if_the_others_of_its_batch_are_rejected(tmp_path: Path) -> None:
    """Get did not find a task that had succeeded, until its outcome was committed."""
    stage = Stage(tmp_path, size_max_bytes=256 << 10)
    small, large = tasks(1, 2)
    large.payload = bytes(200_000)
    stage.write_buffer.append_submits([small, large], ignore, (), urgent=False)
    stage.settle(small)
    await until(lambda: len(stage.events) > 1)
    assert stage.events == [ev.SubmitFailed([large]), ev.SettlesDone([small])]
    assert stage.journal.get_outcome(1) is not None
    stage.close()


async def test_a_dead_letter_goes_with_the_outcome_that_replaces_it_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a full disk deletes it, and a crash loses the outcome (the simulator's seed 1100305)."""
    stage = Stage(tmp_path)
    handed_over: list[Entry] = []
    monkeypatch.setattr(SqliteJournal, "append", lambda _journal, *entries: handed_over.extend(entries))
    two, four = tasks(2, 4)
    stage.write_buffer.append_submits([two, four], ignore, [(2, 1), (4, 3)], urgent=False)
    stage.settle(two)
    await until(lambda: bool(handed_over))
    submitted, settled = handed_over
    assert ([r.task_id for r in submitted.submits], list(submitted.deleted_dead_letters)) == ([4], [3])
    assert ([r.task_id for r in settled.settles], list(settled.deleted_dead_letters)) == ([2], [1])
    monkeypatch.undo()
    stage.close()


async def test_outcomes_that_do_not_fit_as_one_are_written_as_far_as_there_is_room(tmp_path: Path) -> None:
    stage = Stage(tmp_path, size_max_bytes=8 << 20)
    ended = tasks(*range(1, 17))
    for task in ended:
        task.outcome = Outcome(OutcomeState.SUCCEEDED, task.submit_s + 1, bytes(1 << 20))
    stage.write_buffer.append_settles([(task, stage.outcomes.write(task)) for task in ended], 100.0)
    await until(lambda: stage.journal.get_outcome(1) is not None)
    stage.close()


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
async def test_outcomes_in_two_entries_are_durable_once_both_are(order: tuple[int, int], tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    written: list[Entry] = []
    stage.journal.append = lambda *entries: written.extend(entries)  # type: ignore[method-assign]  # the disk is full
    ended = tasks(1, 2)
    for task in ended:
        task.outcome = Outcome(OutcomeState.CANCELLED, task.submit_s + 1)
    told: list[JournalError | None] = []
    stage.write_buffer.append_settles([(task, bytes(200 << 10)) for task in ended], 100.0, told.append)
    await until(lambda: len(written) == 2)
    for nth in order:
        assert not told, "the other one waits for room"
        stage.write_buffer.handle_commit([written[nth]], 1, None)
        await asyncio.sleep(0.01)
    assert told == [None]
    del stage.journal.append
    stage.close()


async def test_a_task_waits_although_older_ones_have_settled(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    one, two = tasks(1, 2)
    stage.write_buffer.defer([one])
    stage.settle(one)
    stage.write_buffer._write_older()
    stage.write_buffer.defer([two])
    stage.write_buffer._write_older()
    assert stage.close() == []


async def test_an_acknowledged_submit_follows_all_earlier_entries_to_the_disk(tmp_path: Path) -> None:
    """A Submit that joins a task which waits patiently is answered when that task is durable."""
    stage = Stage(tmp_path)
    stage.write_buffer.defer(tasks(1))
    acknowledged: list[JournalError | None] = []
    stage.write_buffer.append_submits([], acknowledged.append, (), urgent=True)
    await until(lambda: bool(acknowledged))
    assert acknowledged == [None]
    assert stage.close() == [1]


async def test_a_stream_that_ends_leaves_nothing_to_memory(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.write_buffer.defer(tasks(1, 2))
    stage.write_buffer.flush()
    assert stage.close() == [1, 2]


async def test_a_task_without_a_payload_is_not_written_after_its_outcome(tmp_path: Path) -> None:
    """It would run again in the next master."""
    stage = Stage(tmp_path)
    empty = Task(SPEC, "request-1", b"", submit_s=1000.0, task_id=1)
    stage.write_buffer.defer([empty])
    stage.settle(empty)
    await until(lambda: stage.journal.get_outcome(1) is not None)
    await stage.write_buffer.flush_and_wait()
    assert stage.close() == []
