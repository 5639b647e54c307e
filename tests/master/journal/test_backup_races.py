"""Backups of a journal whose segments are deleted, and shared ones written anew, while it is copied."""

import hashlib
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from multigpu._transport.payloads import SEGMENT_BYTES, Reference, Writer
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, LargeBody
from multigpu_master.journal.sqlite import backup as journal_backup
from multigpu_master.journal.sqlite import journal as journal_sqlite
from multigpu_master.journal.sqlite import sweep as journal_sweep
from multigpu_master.journal.sqlite.backup import backup
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

from tests.master.journal.journals import CHECKS, commit, dead, opened, settle, submit
from tests.master.journal.test_shared_payloads import MIB
from tests.master.journal.test_shared_payloads import opened as opened_shared
from tests.master.journal.test_shared_payloads import settle as settle_shared
from tests.master.journal.test_shared_payloads import submit as submit_shared
from tests.waiting import until


@pytest.fixture(autouse=True)
def quick_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small segments of the journal's own, deleted at once."""
    monkeypatch.setattr(journal_sqlite, "SEGMENTS_IN_RESERVE", (16 << 20) // (2 * LARGE_BYTES))
    monkeypatch.setattr(journal_sqlite, "SWEEP_AFTER_S", 0.0)
    monkeypatch.setattr(journal_sqlite, "TICK_S", 0.005)
    monkeypatch.setattr(journal_sweep, "_PERIOD_S", 0.05)


def data_of(task_id: int, size_bytes: int) -> bytes:
    """What this task has for its payload or body: as long as may be, and no other task's."""
    return hashlib.shake_128(b"%d" % task_id).digest(size_bytes)


def before_each(monkeypatch: pytest.MonkeyPatch, step: str, act: Callable[[], None]) -> None:
    """Has something happen before each time that a backup does this, as it would if the backup took long."""
    original = getattr(journal_backup, step)

    def late(*arguments: Any) -> Any:
        act()
        return original(*arguments)

    monkeypatch.setattr(journal_backup, step, late)


class Turnover:
    """Each turn ends all tasks and waits until their segments are deleted, but for those still open. Then come others
    with as much.
    """

    def __init__(self, data_dir: Path, journal: SqliteJournal, commits: list[Any]) -> None:
        self._segments = data_dir / "segments"
        self._journal = journal
        self._commits = commits
        self._last_task_id = 0
        self._tasks: list[int] = []
        self.turns = 0
        self._submit()

    def _submit(self) -> None:
        self._tasks = list(range(self._last_task_id + 1, self._last_task_id + 8))
        self._last_task_id += 7
        commit(self._journal, self._commits, Entry(submits=[submit(i, data_of(i, LARGE_BYTES)) for i in self._tasks]))

    def turn(self) -> None:
        self.turns += 1
        closed = sorted(self._segments.iterdir())[:-1]
        self._journal.append(Entry(settles=[settle(i) for i in self._tasks]))
        until(lambda: not any(path.exists() for path in closed))
        self._submit()


def payloads_of(data_dir: Path) -> dict[int, bytes]:
    """A new master's unsettled tasks."""
    journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
    try:
        tasks = list(journal.open(lambda *_: None).tasks)
        read = [t.payload.read() if isinstance(t.payload, Reference) else t.payload for t in tasks]
        return {task.task_id: bytes(data) for task, data in zip(tasks, read, strict=True)}
    finally:
        journal.close(20)


def test_segments_that_are_deleted_while_they_are_copied_are_in_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as (journal, commits):
        turnover = Turnover(tmp_path / "data", journal, commits)
        before_each(monkeypatch, "copy_file", turnover.turn)
        lost = backup(tmp_path / "data", tmp_path / "copy", CHECKS)
    assert turnover.turns >= 4
    assert lost == []
    found = payloads_of(tmp_path / "copy")
    assert len(found) == 7
    assert found == {i: data_of(i, LARGE_BYTES) for i in found}


def test_segments_that_are_deleted_before_they_are_opened_are_looked_for_in_a_later_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "data") as (journal, commits):
        turnover = Turnover(tmp_path / "data", journal, commits)
        before_each(monkeypatch, "_open_segment", lambda: turnover.turn() if turnover.turns < 3 else None)
        assert backup(tmp_path / "data", tmp_path / "copy", CHECKS) == []
        assert turnover.turns == 3
        found = payloads_of(tmp_path / "copy")
        assert sorted(found) == list(range(22, 29))
        assert found == {i: data_of(i, LARGE_BYTES) for i in found}
        before_each(monkeypatch, "_open_segment", turnover.turn)
        with pytest.raises(JournalError, match="deleted faster than they could be opened"):
            backup(tmp_path / "data", tmp_path / "no copy", CHECKS)
    assert not list((tmp_path / "no copy").iterdir())


def test_a_shared_segment_that_is_written_anew_is_copied_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_shared(tmp_path / "data") as it:
        it.payloads.close()  # it looks for what may go when it is told to
        it.payloads.open()
        writer: Writer | None = Writer(it.payloads.path)
        assert writer is not None
        assert it.write(submit_shared(1, it.take(writer, b"1" * (SEGMENT_BYTES - MIB)))) is None
        (name,) = it.names()
        del writer
        renamed = list[bool]()

        def end() -> None:
            if not renamed:
                assert it.write(settle_shared(1, b"")) is None
                renamed.append(it.payloads._delete_unused(name))
                Writer(it.payloads.path).put(b"2" * MIB)

        before_each(monkeypatch, "copy_file", end)
        assert backup(tmp_path / "data", tmp_path / "copy", CHECKS) == []
        assert renamed == [False]
        assert payloads_of(tmp_path / "copy") == {1: b"1" * (SEGMENT_BYTES - MIB)}
        assert it.payloads._delete_unused(name), "the backup has let go of it"


class Busy:
    """A journal whose tasks are submitted, settled, buried and deleted at random, until it is stopped."""

    def __init__(self, data_dir: Path, seed: int) -> None:
        self._dice = random.Random(seed)
        self.journal = SqliteJournal(data_dir, size_max_bytes=1 << 30)
        list(self.journal.open(self._on_commit).tasks)
        self.journal.payloads.start_deleting()
        self._writer = Writer(self.journal.payloads.path)
        self._last: Reference | None = None  # so that what is written to has a holder all the time
        self._room = threading.Semaphore(4)  # entries that are not committed yet
        self.commits = 0
        self.durable: set[int] = set()
        self.settled: set[int] = set()  # or will be
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _on_commit(self, entries: Sequence[Entry], _cursor: int, error: JournalError | None) -> None:
        assert error is None
        self.commits += 1
        self.durable.update(record.task_id for entry in entries for record in entry.submits)
        for _ in entries:
            self._room.release()

    def _append(self, entry: Entry) -> None:
        self._room.acquire()
        self.journal.append(entry)

    def _data(self, task_id: int) -> Any:
        """Small, large, or shared."""
        sort = self._dice.randrange(5)
        data = data_of(task_id, self._dice.randrange(2000) if sort < 2 else LARGE_BYTES + self._dice.randrange(90_000))
        if sort < 4:
            return data
        if self._dice.randrange(8) == 0:
            self._writer = Writer(self._writer.path)
        written = self._writer.put(data)
        self._last = self.journal.payloads.resolve(written.pin.name, written.offset, written.size_bytes)
        return self._last

    def _run(self) -> None:
        alive: list[int] = []
        letters: list[int] = []
        task_id = 0
        while not self._end.is_set():
            action = self._dice.randrange(10)
            if len(alive) < 20:
                task_id += 1
                alive.append(task_id)
                self._append(Entry(submits=[submit(task_id, self._data(task_id))]))
            elif action < 8 or len(letters) < 4:
                ended = alive.pop(self._dice.randrange(len(alive) // 2))
                if ended % 50 == 0:
                    continue  # it stays
                self.settled.add(ended)
                self._append(Entry(settles=[self._settle(ended, letters)]))
            else:
                self._append(Entry(deleted_dead_letters=[letters.pop(0)]))

    def _settle(self, task_id: int, letters: list[int]) -> Any:
        if self._dice.randrange(6) == 0:
            letters.append(task_id)
            return dead(task_id, self._data(task_id))
        body = self._data(task_id)
        if isinstance(body, Reference):
            body = LargeBody(b"", body)
        return replace(settle(task_id, body), expire_time_s=self._dice.choice([5000.0] * 7 + [1e10]))

    def stop(self) -> None:
        self._end.set()
        self._thread.join(20)
        self.journal.close(20)


@pytest.mark.parametrize("seed", range(3))
def test_each_backup_of_a_busy_journal_is_whole(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(tmp_path / "data", seed)

    def some_commits() -> None:
        enough = busy.commits + 1
        until(lambda: busy.commits >= enough)

    before_each(monkeypatch, "copy_file", some_commits)
    copies = []
    try:
        for number in range(4):
            until(lambda number=number: len(busy.durable) > 60 * (number + 1))  # type: ignore[misc]
            durable = set(busy.durable)
            lost = backup(tmp_path / "data", tmp_path / f"copy {number}", CHECKS)
            assert lost == []
            copies.append((tmp_path / f"copy {number}", durable - busy.settled))
    finally:
        busy.stop()
    kinds = set[str]()
    for copy, unsettled in copies:
        journal = SqliteJournal(copy, size_max_bytes=1 << 30)
        outcomes = [each for each in journal.read_outcomes(0, 1 << 30, 1 << 40) if each.body is not None]
        letters = journal.get_dead_letters(sorted(busy.settled))
        kinds |= {"letter"} if letters else set()
        kinds |= {"outcome"} if outcomes else set()
        found = payloads_of(copy)
        assert unsettled <= found.keys()
        assert found == {i: data_of(i, len(data)) for i, data in found.items()}
        for letter in letters:
            assert letter.payload == data_of(letter.task_id, len(letter.payload))
        for outcome in outcomes:
            assert not outcome.lost
            assert outcome.body in (b"out", data_of(outcome.task_id, len(outcome.body or b"")))
    assert kinds == {"letter", "outcome"}
