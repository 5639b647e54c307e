"""The core's commands are carried out as one: what ended is journaled whatever becomes of its peers, and after an event
that failed half way the master does nothing more but end.
"""

import asyncio
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from multigpu._transport.payloads import LARGE_BYTES, Reference, Writer
from multigpu.v1 import admin_service_pb2, task_pb2, task_service_pb2, worker_service_pb2
from multigpu_master.core import events as ev
from multigpu_master.core.model import Task, TaskError
from multigpu_master.core.workers.info import HEALTHY, Capability, Telemetry, WorkerInfo
from multigpu_master.driver import CANCEL_TASKS, BrokenError, RunOutbox
from multigpu_master.errors import (
    CallError,
    ExhaustedError,
    JournalError,
    JournalFullError,
    NotFoundError,
)
from multigpu_master.ids import first_id
from multigpu_master.journal.protocol import Entry, OutcomeFilter
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import LARGE_BYTES as SEGMENT_BYTES
from multigpu_master.outbox import FRAME_BYTES
from multigpu_master.rpc import queries, worker_service
from multigpu_master.rpc.admin import models
from multigpu_master.rpc.admin.dead_letters import DeadLetterCalls
from multigpu_master.rpc.admin.service import AdminService
from multigpu_master.rpc.intake import Intake
from multigpu_master.rpc.run_stream import RunStream
from multigpu_master.settings import worker_setting
from multigpu_master.wire import times as wire_times

from tests.compiled import replaces_a_method
from tests.master.stage import STREAM_BYTES_MAX, Stage, leases_of


async def outcomes(outbox: RunOutbox) -> dict[str, task_pb2.Outcome]:
    message = await outbox.next()
    assert message is not None
    frame = task_service_pb2.RunResponse.FromString(message.serialize())
    return {outcome.request_id: outcome for outcome in frame.outcomes}


async def test_a_result_that_can_not_be_read_is_lost_alone(stage: Stage) -> None:
    """The client gets ResultLost; other outcomes of the same event are delivered and journaled."""
    tasks = stage.submit("before", "lost", "after")
    written = Writer(stage.journal.payloads.path).put(os.urandom(LARGE_BYTES))
    result = stage.journal.payloads.resolve(written.pin.name, written.offset, written.size_bytes)
    assert isinstance(result, Reference)
    os.truncate(stage.journal.payloads.path / written.pin.name, 10)
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of(tasks)], [b"one", result, b"two"]))
    received = await outcomes(stage.outbox)
    assert [received["before"].result, received["after"].result] == [b"one", b"two"]
    assert (received["lost"].result, received["lost"].error.type) == (b"", "ResultLost")
    assert "the segment ends before" in received["lost"].error.message
    await stage.durable()
    assert set(stage.journal.find_requests(["before", "after"])) == {"before", "after"}
    assert not stage.fatal


async def test_a_worker_is_forgotten_in_the_journal_before_the_call_is_answered(stage: Stage) -> None:
    driver = stage.driver
    setting = worker_setting(driver.core.fleet.workers["w"])
    await driver.write_buffer.save(setting)
    driver.workers.close(1)
    await AdminService(driver, "", None).ForgetWorker(admin_service_pb2.ForgetWorkerRequest(worker_id="w"), None)
    assert not setting.keys() & stage.journal.settings().keys()


async def test_a_submit_of_many_specs_waits_for_one_commit(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queries, "SLICE_S", 60.0)  # however slow the machine is
    batches = [
        task_pb2.TaskBatch(spec=task_pb2.TaskSpec(kind="echo", queue=f"q{n}"), payloads=[b""], request_ids=[f"r{n}"])
        for n in range(50)
    ]
    batches.append(batches[0])
    answer = await stage.service.Submit(task_service_pb2.SubmitRequest(batches=batches), None)
    assert [len(entries) for entries in stage.commits] == [51]
    ids = [result.task_id for result in answer.results]
    assert ids[50] == ids[0] == min(ids) > 0
    assert len(set(ids)) == 50


async def test_partial_outputs_that_nobody_reads_end_their_stream(stage: Stage) -> None:
    tasks = stage.submit(*[f"r{n}" for n in range(6)])
    for lease in leases_of(tasks):
        stage.driver.handle(ev.Partials(1, [ev.PartialOutput(lease.lease_id, 0, bytes(15 << 20))]))
        assert stage.outbox.waiting_bytes <= STREAM_BYTES_MAX
    assert stage.outbox.aborted.result().code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_many_cancellations_are_many_short_events(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    replaces_a_method()
    tasks = stage.submit(*[f"r{n}" for n in range(1000)])
    counts: list[int] = []
    handle = stage.driver.core.handle

    def count(event: ev.Event, now: float) -> list[ev.Command]:
        counts.extend([len(event.tasks)] if isinstance(event, ev.Cancel) else [])
        return handle(event, now)

    monkeypatch.setattr(stage.driver.core, "handle", count)
    ids = [task.task_id for task in tasks]
    answer = await stage.service.Cancel(task_service_pb2.CancelRequest(task_ids=ids), None)
    assert sorted(answer.cancelled_task_ids) == ids
    assert not answer.settled_task_ids
    assert (sum(counts), max(counts)) == (1000, CANCEL_TASKS)


async def test_a_cancellation_is_sent_once_it_is_durable(stage: Stage) -> None:
    (task,) = stage.submit("withdrawn")
    stage.driver.handle(ev.Cancel([task]))
    assert stage.outbox.waiting_bytes == 0, "nothing is told before that"
    received = await outcomes(stage.outbox)
    assert received["withdrawn"].state == task_pb2.OUTCOME_STATE_CANCELLED
    assert stage.journal.get_outcome(task.task_id) is not None


async def test_an_outcome_without_space_on_the_disk_is_not_sent(stage: Stage, monkeypatch: Any) -> None:
    """Else it could be another one after a restart, any time later."""
    (task,) = stage.submit("ended")
    await stage.durable()
    monkeypatch.setattr(stage.driver.write_buffer, "writable", False)
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of([task])], [b"done"]))
    assert stage.outbox.waiting_bytes == 0
    assert (await outcomes(stage.outbox))["ended"].result == b"done"
    assert stage.journal.get_outcome(task.task_id) is not None


async def test_get_list_and_count_tell_an_outcome_once_it_is_on_the_disk(stage: Stage) -> None:
    (task,) = stage.submit("ended")
    await stage.durable()
    waiting = asyncio.create_task(
        stage.service.Get(task_service_pb2.GetRequest(task_id=task.task_id, wait=wire_times.duration(20)), None)
    )
    await asyncio.sleep(0.05)
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of([task])], [b"done"]))
    listed = await stage.service.List(task_service_pb2.ListRequest(), None)
    counted = await stage.service.Count(task_service_pb2.CountRequest(), None)
    if stage.journal.get_outcome(task.task_id) is None:  # the disk is slower than these calls, almost always
        assert [(t.state, t.worker_id) for t in listed.tasks] == [(task_pb2.TASK_STATE_LEASED, "w")]
        assert (counted.leased, counted.succeeded) == (1, 0)
    early = await stage.service.Get(task_service_pb2.GetRequest(task_id=task.task_id), None)
    assert (await waiting).task.outcome == early.task.outcome
    assert early.task.outcome.result == b"done"
    assert stage.journal.get_outcome(task.task_id) is not None, "what was told is on the disk"
    counted = await stage.service.Count(task_service_pb2.CountRequest(), None)
    assert (counted.leased, counted.succeeded) == (0, 1)


async def test_a_get_of_a_young_task_answers_when_the_task_ends_while_it_is_written(stage: Stage) -> None:
    (task,) = stage.submit("young")
    request = task_service_pb2.GetRequest(task_id=task.task_id, wait=wire_times.duration(60))
    getting = asyncio.create_task(stage.service.Get(request, None))
    await asyncio.sleep(0)
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of([task])], [b"done"]))
    async with asyncio.timeout(30):
        assert (await getting).task.outcome.result == b"done"


async def test_get_answers_for_the_task_that_it_found_though_its_request_id_is_anothers_by_then(
    stage: Stage, monkeypatch: Any
) -> None:
    replaces_a_method()
    (first,) = stage.submit("taken")
    await stage.durable()

    async def withdrawn_and_submitted_anew(_task_id: int, _timeout_s: float) -> None:
        stage.driver.handle(ev.Cancel([first], withdrawn=True))
        await stage.durable()
        stage.submit("taken")
        await stage.durable()

    monkeypatch.setattr(stage.driver, "wait_settled", withdrawn_and_submitted_anew)
    request = task_service_pb2.GetRequest(request_id="taken", wait=wire_times.duration(20))
    answer = await stage.service.Get(request, None)
    assert (answer.task.task_id, answer.task.outcome.state) == (first.task_id, task_pb2.OUTCOME_STATE_CANCELLED)


async def test_a_device_is_checked_once_its_worker_has_told_which_checks_it_has_passed(stage: Stage) -> None:
    service, request = AdminService(stage.driver, "", None), admin_service_pb2.CheckWorkerRequest(worker_id="w")
    with pytest.raises(CallError, match="try again"):
        await service.CheckWorker(request, None)
    stage.driver.handle(ev.Heartbeat(1, [], 1 << 30, Telemetry(), health=replace(HEALTHY, checks_passed=5)))
    assert (await service.CheckWorker(request, None)).check == 6


async def test_a_dead_letter_is_requeued_or_deleted_by_one_call(stage: Stage) -> None:
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    tasks = stage.submit(*[f"r{n}" for n in range(40)])
    failures = [ev.Failure(x.lease_id, TaskError("ValueError", "no")) for x in leases_of(tasks)]
    while failures:
        stage.driver.handle(ev.Reports(1, failures=failures))
        failures = [ev.Failure(x.lease_id, TaskError("ValueError", "no")) for x in leases_of(tasks)]
    await stage.durable()
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    ids = [task.task_id for task in tasks]
    requeued, deleted, again = await asyncio.gather(
        calls.RequeueDeadLetters(admin_service_pb2.RequeueDeadLettersRequest(task_ids=ids), None),
        calls.DeleteDeadLetters(admin_service_pb2.DeleteDeadLettersRequest(task_ids=ids), None),
        calls.DeleteDeadLetters(admin_service_pb2.DeleteDeadLettersRequest(task_ids=ids[::-1]), None),
    )
    assert len(requeued.task_ids) + deleted.deleted + again.deleted == len(ids)
    assert not calls._busy_dead_letters


async def test_dead_letters_that_can_not_be_requeued_keep_no_others_from_it(stage: Stage) -> None:
    """A queue's newest dead letters had a deadline that had passed: no call got further."""
    message = task_pb2.TaskSpec(kind="echo", attempts_max=1)
    stage.spec = stage.driver.specs.read(message)
    good = stage.submit(*[f"good{n}" for n in range(5)])
    wire_times.set_time(message.deadline, stage.driver.now() + 0.5)
    stage.spec = stage.driver.specs.read(message)
    tasks = good + stage.submit(*[f"late{n}" for n in range(20)])
    while failures := [ev.Failure(t.lease.lease_id, TaskError("ValueError", "no")) for t in tasks if t.lease]:
        stage.driver.handle(ev.Reports(1, failures=failures))
    await stage.durable()
    await asyncio.sleep(0.6)
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    with pytest.raises(CallError, match=r"requeued 5 of 25 dead letters; 20 were rejected.*deadline"):
        await calls.RequeueDeadLetters(admin_service_pb2.RequeueDeadLettersRequest(queue="default"), None)
    assert {task.task_id for task in good} <= {task.task_id for task in stage.driver.core.ledger.tasks.values()}


async def test_a_dead_letter_is_requeued_though_a_withdrawn_task_has_its_request_id(stage: Stage) -> None:
    """The withdrawn task made its request_id free, but was taken for a task that replaces the dead letter."""
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    (task,) = stage.submit("same")
    stage.driver.handle(ev.Reports(1, failures=[ev.Failure(leases_of([task])[0].lease_id, TaskError("E", "no"))]))
    await stage.durable()
    stage.spec = stage.driver.specs.read(
        task_pb2.TaskSpec(kind="echo", durability=task_pb2.DURABILITY_EPHEMERAL, retry_failed=True)
    )
    (again,) = stage.submit("same")
    await stage.driver.cancel([again], withdrawn=True)
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    request = admin_service_pb2.RequeueDeadLettersRequest(task_ids=[task.task_id])
    assert list((await calls.RequeueDeadLetters(request, None)).task_ids) == [task.task_id]


async def test_a_dead_letter_whose_payload_is_lost_can_be_deleted(stage: Stage) -> None:
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", attempts_max=1))
    (task,) = stage.submit("lost")
    task.payload = bytes(SEGMENT_BYTES)
    failure = ev.Failure(leases_of([task])[0].lease_id, TaskError("ValueError", "no"))
    stage.driver.handle(ev.Reports(1, failures=[failure]))
    await stage.durable()
    shutil.rmtree(stage.journal.payloads.path.parent / "segments")
    found = (await stage.service.Get(task_service_pb2.GetRequest(task_id=task.task_id), None)).task
    assert (found.dead_letter, found.outcome.error.type, found.payload_bytes) == (True, "ValueError", 0)
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    with pytest.raises(CallError, match=r"requeued 0 of 1 .*payload of task \d+ is missing"):
        await calls.RequeueDeadLetters(admin_service_pb2.RequeueDeadLettersRequest(task_ids=[task.task_id]), None)
    request = admin_service_pb2.DeleteDeadLettersRequest(task_ids=[task.task_id, 7])
    answer = await calls.DeleteDeadLetters(request, None)
    assert (answer.deleted, list(answer.unknown_task_ids)) == (1, [7])
    assert not stage.journal.existing_dead_letters([task.task_id])


async def test_usage_that_was_just_passed_to_the_journal_is_in_the_next_answer(stage: Stage) -> None:
    (task,) = stage.submit("used")
    stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases_of([task])], [b"1"], device_s=2.0))
    stage.driver.usage._run()  # the timer's call
    stage.driver.usage.stop()
    await stage.driver.usage.flush()
    assert [used.device_s for _, used in stage.journal.usage(0, 1e12)] == [2.0]


async def test_a_task_that_the_journal_rejects_while_it_is_listed_is_not_in_the_list(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces_a_method()
    kept, rejected = stage.submit("kept", "rejected")

    async def meanwhile(*_: Any, **__: Any) -> list[Any]:
        stage.driver.handle(ev.SubmitFailed([rejected]))
        return []

    monkeypatch.setattr(queries.asyncio, "to_thread", meanwhile)  # type: ignore[attr-defined]  # it reads the journal
    listed = await stage.service.List(task_service_pb2.ListRequest(), None)
    assert [task.task_id for task in listed.tasks] == [kept.task_id]


async def test_get_does_not_wait_on_for_a_task_that_the_journal_rejects(stage: Stage) -> None:
    (rejected,) = stage.submit("rejected")
    request = task_service_pb2.GetRequest(request_id="rejected", wait=wire_times.duration(60))
    waiting = asyncio.ensure_future(stage.service.Get(request, None))
    await asyncio.sleep(0)
    stage.driver.handle(ev.SubmitFailed([rejected]))
    async with asyncio.timeout(120):
        with pytest.raises(NotFoundError, match="no task 'rejected'"):
            await waiting


async def test_cancel_names_a_task_that_the_journal_rejects_meanwhile_as_unknown(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces_a_method()
    (rejected,) = stage.submit("rejected")

    async def meanwhile(*_: Any, **__: Any) -> list[Task]:
        stage.driver.handle(ev.SubmitFailed([rejected]))
        return []

    monkeypatch.setattr(stage.driver, "cancel", meanwhile)
    answer = await stage.service.Cancel(task_service_pb2.CancelRequest(request_ids=["rejected"]), None)
    assert (list(answer.unknown), len(answer.cancelled_task_ids), len(answer.settled_task_ids)) == (["rejected"], 0, 0)


async def test_a_stream_that_joins_a_withdrawn_task_gets_the_durable_cancellation(stage: Stage) -> None:
    (task,) = stage.submit("withdrawn")
    stage.driver.handle(ev.Cancel([task]))
    stream, outbox = stage.driver.open_stream()
    assert stage.driver.join_held_outcome(task, stream)
    assert (outbox.waiting_bytes, outbox.pending_outcomes) == (0, 1)
    received = await outcomes(outbox)
    assert (received["withdrawn"].state, outbox.pending_outcomes) == (task_pb2.OUTCOME_STATE_CANCELLED, 0)
    assert stage.journal.get_outcome(task.task_id) is not None
    assert not stage.driver.join_held_outcome(task, stream), "the next is told at once"


async def test_after_an_event_that_failed_half_way_the_master_handles_nothing_more(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces_a_method()
    tasks = stage.submit("one", "two")
    await stage.durable()

    def fail(_sessions: object) -> None:
        raise OSError("a fault of ours")

    monkeypatch.setattr(stage.outbox, "frame_for", fail)
    reports = ev.Reports(1, [x.lease_id for x in leases_of(tasks)], [b"1", b"2"])
    with pytest.raises(BrokenError, match="ends after an internal error"):
        stage.driver.handle(reports)
    (reason,) = stage.fatal
    assert "Reports" in reason
    assert "a fault of ours" in reason
    counters = stage.driver.core.ledger.counters
    assert stage.driver.handle(ev.Tick()) == []
    with pytest.raises(BrokenError):
        stage.submit("three")
    assert (counters.submitted, len(stage.fatal)) == (2, 1)
    await stage.durable()
    assert set(stage.journal.find_requests(["one", "two"])) == {"one", "two"}, "outcomes are journaled all the same"


async def test_a_running_master_goes_on_with_ids_that_its_journal_has_begun(stage: Stage, tmp_path: Path) -> None:
    core = stage.driver.core
    core.ids.begin(core.ids.end - 4)
    before = core.ids.end
    tasks = stage.submit("a", "b", "c")
    async with asyncio.timeout(120):
        while core.ids.end == before:
            await asyncio.sleep(0.001)
    assert all(task.task_id for task in tasks)
    (later,) = stage.submit("d")
    assert before <= later.task_id < core.ids.end
    await stage.durable()
    stage.journal.close(20)
    again = SqliteJournal(tmp_path / "data", size_max_bytes=1 << 30)
    assert first_id(again.open(stage._on_commit).epoch) >= core.ids.end
    again.close(20)


async def test_count_counts_each_task_once_while_tasks_settle(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose outcome is committed between the look at the core and the look at the journal."""
    monkeypatch.setattr(queries, "SLICE_S", 0.0)  # the event loop goes on between any two blocks
    count = stage.journal.count_outcomes

    def count_later(wanted: OutcomeFilter) -> dict[int, int]:
        asyncio.run_coroutine_threadsafe(stage.durable(), loop).result(120)
        return count(wanted)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(stage.journal, "count_outcomes", count_later)
    total = 3 * 1024
    tasks = stage.submit(*(f"task-{n}" for n in range(total)))
    await stage.durable()
    filters = itertools.cycle([task_service_pb2.TaskFilter(), task_service_pb2.TaskFilter(kind="echo")])
    settled = 0
    while leases := leases_of(tasks):
        waiting = [asyncio.create_task(stage.service.Count(task_service_pb2.CountRequest(filter=next(filters)), None))]
        for wait_s in (0, 0.001):
            stage.driver.handle(ev.Reports(1, [x.lease_id for x in leases], [b"done"] * len(leases)))
            settled += len(leases)
            await asyncio.sleep(wait_s)
            leases = leases_of(tasks)
            waiting.append(
                asyncio.create_task(stage.service.Count(task_service_pb2.CountRequest(filter=next(filters)), None))
            )
        for c in await asyncio.gather(*waiting):
            assert c.queued + c.leased + c.succeeded == total
    assert settled == total


async def test_a_cancellation_without_room_changes_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = stage.submit("one", "two")
    await stage.durable()
    monkeypatch.setattr(stage.driver.write_buffer, "writable", False)
    monkeypatch.setattr(stage.journal, "free_bytes", lambda: 0)
    request = task_service_pb2.CancelRequest(task_ids=[task.task_id for task in tasks])
    with pytest.raises(ExhaustedError, match="0 tasks were cancelled, 2 were not"):
        await stage.service.Cancel(request, None)
    stage.spec = stage.driver.specs.read(task_pb2.TaskSpec(kind="echo", durability=task_pb2.DURABILITY_EPHEMERAL))
    others = stage.submit("three")
    assert [await stage.driver.cancel(others) for _ in range(2)] == [others, []], "it is not written"
    assert [task.outcome for task in tasks] == [None, None]
    assert len(leases_of(tasks)) == 2


async def test_a_cancellation_that_a_full_disk_ends_says_what_remains(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaces_a_method()
    tasks = stage.submit("a", "b", "c", "d")
    room = [1, 1, 0]  # cancellations

    async def not_durable(_tasks: Sequence[Task], _timeout_s: float) -> bool:
        return False

    with monkeypatch.context() as full:
        full.setattr(stage.driver.write_buffer, "writable", False)
        full.setattr(stage.driver.write_buffer, "cancellations_max", lambda: room.pop(0))
        full.setattr(stage.driver, "wait_cancellations", not_durable)
        with pytest.raises(JournalFullError, match=r"^1 tasks were cancelled, but .* and 3 were not cancelled"):
            await stage.driver.cancel(tasks)
        with pytest.raises(JournalFullError, match=r"^cancelled, but a restart of the master may bring the tasks back"):
            await stage.driver.cancel(tasks[1:2])
        with pytest.raises(JournalFullError, match=r"^0 tasks were cancelled, 2 were not"):  # of four, two have ended
            await stage.driver.cancel(tasks)
    await stage.durable()


class _Unread:
    """The stream of a worker that sends heartbeats and reads nothing."""

    def __init__(self, hello: bytes, heartbeat: bytes) -> None:
        self.read_count = 0
        self._hello, self._heartbeat = hello, heartbeat

    async def read(self) -> bytes:
        self.read_count += 1
        await asyncio.sleep(0)
        return self._hello if self.read_count == 1 else self._heartbeat

    async def write(self, _data: bytes) -> None:
        await asyncio.Event().wait()


async def test_a_worker_that_does_not_read_is_not_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_service, "UNSENT_BYTES", 20_000)
    hello, heartbeat = worker_service_pb2.SessionRequest(), worker_service_pb2.SessionRequest()
    hello.hello.protocol_version, hello.hello.worker_id = worker_service.PROTOCOL_VERSION, "silent"
    hello.hello.window_bytes = hello.hello.slots = hello.hello.window_tasks = 1
    hello.hello.capabilities.add(kind="echo")
    for lease_id in range(1, 101):  # each is answered with a revocation, because the master does not know it
        heartbeat.heartbeat.leases.add(lease_id=lease_id, task_id=lease_id, running=True)
    stream = _Unread(hello.SerializeToString(), heartbeat.SerializeToString())
    call = asyncio.create_task(worker_service.WorkerService(stage.driver, "", 1.0, 5.0, ()).Session(stream))
    await asyncio.sleep(0.3)
    read_count = stream.read_count
    call.cancel()
    await asyncio.wait([call])
    assert 3 < read_count < 10


async def test_every_stream_that_follows_a_task_hears_that_it_could_not_be_written(stage: Stage) -> None:
    (task,) = stage.submit("unwritten")
    stream, outbox = stage.driver.open_stream()
    run = RunStream(stage.driver, Intake(stage.driver, 1 << 20), stream, outbox, STREAM_BYTES_MAX)
    frame = task_service_pb2.RunRequest(follow_request_ids=["unwritten"])
    await run.on_message(frame.SerializeToString())
    assert outbox.pending_outcomes == stage.outbox.pending_outcomes == 1
    stage.driver.handle(ev.SubmitFailed([task]))
    for each in (outbox, stage.outbox):
        message = await each.next()
        assert message is not None
        (rejected,) = task_service_pb2.RunResponse.FromString(message.serialize()).rejected
        assert (rejected.request_id, rejected.code) == ("unwritten", grpc.StatusCode.RESOURCE_EXHAUSTED.value[0])
        assert each.pending_outcomes == 0


async def test_a_dead_letter_stays_claimed_until_its_requeue_has_ended(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the requeue of another one fails at once."""
    calls = DeadLetterCalls()
    calls._driver, calls._busy_dead_letters = stage.driver, set()
    ends = asyncio.Event()

    async def requeue(task_id: int) -> Task:
        if task_id == 1:
            raise JournalError("the disk fails")
        await ends.wait()
        return Task(stage.spec, f"r{task_id}", b"")

    monkeypatch.setattr(calls, "_requeue", requeue)
    call = asyncio.ensure_future(
        calls.RequeueDeadLetters(admin_service_pb2.RequeueDeadLettersRequest(task_ids=[1, 2]), None)
    )
    for _ in range(20):
        await asyncio.sleep(0)
    assert calls._busy_dead_letters == {1, 2}
    ends.set()
    with pytest.raises(JournalError, match="the disk fails"):
        await call
    assert not calls._busy_dead_letters


async def test_checkpoints_count_in_the_frames_of_leases(stage: Stage) -> None:
    """Those of the tasks of a lost worker made a frame that no stream could carry."""
    tasks = [Task(stage.spec, f"r{n}", b"payload", submit_s=stage.driver.now()) for n in range(80)]
    for task in tasks:
        task.ensure_extra().checkpoint = bytes(1 << 20)
    stage.driver.workers.close(1)
    outbox = stage.driver.workers.open(2, "q")
    worker = WorkerInfo(worker_id="v", capabilities=(Capability(kind="echo"),), slots=100)
    stage.driver.handle(ev.Hello(2, worker))
    stage.driver.submit(stage.spec, tasks, stage.stream, lambda _error: None)
    outbox.finish()
    sizes = []
    while (frame := await outbox.next()) is not None:
        sizes.append(len(frame.serialize()))
    assert sum(sizes) > 64 << 20
    assert max(sizes) <= FRAME_BYTES + (1 << 16)


async def test_leases_whose_payloads_can_not_be_read_leave_no_bytes_to_send(stage: Stage) -> None:
    """Their bytes counted as waiting for ever: the master stopped reading the worker's frames."""
    written = Writer(stage.journal.payloads.path).put(os.urandom(LARGE_BYTES))
    payload = stage.journal.payloads.resolve(written.pin.name, written.offset, written.size_bytes)
    assert isinstance(payload, Reference)
    os.truncate(stage.journal.payloads.path / written.pin.name, 10)
    stage.driver.workers.close(1)
    outbox = stage.driver.workers.open(2, "q")
    stage.driver.handle(ev.Hello(2, WorkerInfo(worker_id="v", capabilities=(Capability(kind="echo"),))))
    await outbox.next()  # the welcome
    task = Task(stage.spec, "r", payload, submit_s=stage.driver.now())
    stage.driver.submit(stage.spec, [task], stage.stream, lambda _error: None)
    outbox.finish()
    frame = await outbox.next()
    assert frame is not None
    assert (frame.message.frame, outbox.waiting_bytes) == (1, 0)


async def test_a_call_for_models_writes_no_older_settings_of_workers(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It kept settings while other calls ran, and undid their cordons on the disk."""
    driver = stage.driver
    driver._executors[ev.WorkerChanged] = lambda change: driver.write_buffer.append(
        Entry(settings=worker_setting(change.worker))
    )

    async def with_a_cordon(events: Sequence[ev.Event]) -> AsyncIterator[ev.Event]:
        for event in events:
            yield event
            driver.handle(ev.Cordon("w", "its fan is broken"))

    monkeypatch.setattr(models, "pausing", with_a_cordon)
    await AdminService(driver, "", None)._handle([ev.UnloadModel("w", "m")])
    assert json.loads(stage.journal.settings()["worker/w"])["cordoned"]


async def test_following_tasks_waits_for_a_client_that_does_not_read(stage: Stage) -> None:
    """All their partial outputs were copied into the stream at once, whatever its limit."""
    driver, names = stage.driver, [f"r{n}" for n in range(6)]
    tasks = [Task(stage.spec, name, b"payload", submit_s=driver.now()) for name in names]
    driver.submit(stage.spec, tasks, 0, lambda _error: None)
    for lease in leases_of(tasks):
        driver.handle(ev.Partials(1, [ev.PartialOutput(lease.lease_id, 0, bytes(15 << 20))]))
    stream, outbox = driver.open_stream()
    run = RunStream(driver, Intake(driver, 1 << 20), stream, outbox, STREAM_BYTES_MAX)
    following = asyncio.create_task(run._follow(names))
    for _ in range(100):
        await asyncio.sleep(0)
    assert not following.done()
    assert outbox.waiting_bytes <= STREAM_BYTES_MAX
    received: set[str] = set()
    while len(received) < len(names):
        frame = await outbox.next()
        assert frame is not None
        received |= {partial.request_id for partial in frame.message.partials}
    await following
