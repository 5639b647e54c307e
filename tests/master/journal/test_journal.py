"""The journal on real files: acknowledged entries are kept in order, and outcomes expire."""

import itertools
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from multigpu_master.errors import JournalError
from multigpu_master.journal.protocol import Entry, OutcomeFilter, Recovered, StoredOutcome, SubmitRecord
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import LARGE_BYTES

from tests.master.journal import journals
from tests.master.journal.journals import DEAD_LETTERED, FAILED, SUCCEEDED, settle, submit
from tests.waiting import until


class Opened:
    """An open journal that records the arguments of its callback."""

    def __init__(self, data_dir: Path, clock_s: float = 3000.0, **options: Any) -> None:
        self.clock_s = clock_s
        self.commits: list[tuple[Sequence[Entry], int, JournalError | None]] = []
        self._committed = threading.Condition()
        self._count = 0
        self.journal = SqliteJournal(data_dir, now=lambda: self.clock_s, **({"size_max_bytes": 1 << 30} | options))
        self.recovered: Recovered = self.journal.open(self._on_commit)
        self.tasks = list(self.recovered.tasks)

    def _on_commit(self, entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
        with self._committed:
            self.commits.append((entries, first_cursor, error))
            self._count += len(entries)
            self._committed.notify_all()

    def write(self, *entries: Entry) -> None:
        """Appends and waits until each was committed or rejected."""
        target = self._count + len(entries)
        for entry in entries:
            self.journal.append(entry)
        with self._committed:
            assert self._committed.wait_for(lambda: self._count >= target, timeout=120)


@contextmanager
def opened(data_dir: Path, **options: Any) -> Iterator[Opened]:
    it = Opened(data_dir, **options)
    try:
        yield it
    finally:
        it.journal.close(20)


def reached(journal: SqliteJournal, cursor: int) -> bool:
    return journal.oldest_cursor() == cursor


@pytest.mark.parametrize("size", [0, 100, LARGE_BYTES - 1, LARGE_BYTES, 3 << 20])
def test_round_trip(tmp_path: Path, size: int) -> None:
    payload, body = bytes([7]) * size, bytes([9]) * size
    dead = submit(3, payload)
    with opened(tmp_path / "data") as it:
        assert (it.tasks, it.recovered.settings, it.recovered.last_cursor) == ([], {}, 0)
        assert it.journal.oldest_cursor() == 1
        it.write(Entry(submits=[submit(1, payload), submit(2, payload)], settings={"strategy": b"auto", "gone": b"x"}))
        it.write(Entry(submits=[dead]))
        it.write(
            Entry(settles=[settle(2, body), settle(3, body, state=DEAD_LETTERED, dead=dead)], settings={"gone": None})
        )
        assert [(len(entries), error) for entries, _, error in it.commits] == [(1, None)] * 3
        assert it.commits[-1][1] == 1
    with opened(tmp_path / "data") as it:
        assert it.tasks == [submit(1, payload)]
        assert (it.recovered.settings, it.recovered.last_cursor) == ({"strategy": b"auto"}, 2)
        found = StoredOutcome(1, 2, "request-2", SUCCEEDED, "default", "embed", "minilm", 1002.0, None, body)
        assert it.journal.get_outcome(2) == found
        assert it.journal.get_outcome(1) is None
        known = it.journal.find_requests(["request-2", "request-1", "", "unknown"])
        assert list(known) == ["request-2"]
        assert it.journal.read_outcomes_of([known["request-2"]], 0) == [found]
        assert it.journal.get_dead_letters([9, 3, 2]) == [dead]
        assert [o.body for o in it.journal.list_dead_letters(queue="", before_task_id=0, limit=10)] == [body]
        assert it.journal.oldest_cursor() == 1
        assert it.journal.size_bytes() > 2 * size


def test_what_the_database_does_not_take_as_text(tmp_path: Path) -> None:
    request_id = "\1\n '\"%_ é \U0001f600"  # without NUL, which no call may have in a request_id
    odd = SubmitRecord(2**53 - 1, request_id, b"\0\xff", b"\xff\0" * 5, "k\0", 2**32 - 1, 0.1 + 0.2)
    outcome = settle(odd.task_id, b"\0", request_id=odd.request_id, queue="q\0'", submit_time_s=odd.submit_time_s)
    with opened(tmp_path / "data") as it:
        it.write(Entry(submits=[odd]))
    with opened(tmp_path / "data") as it:
        assert it.tasks == [odd]
        it.write(Entry(settles=[outcome]))
        assert it.journal.find_requests([odd.request_id])[odd.request_id].queue == "q\0'"
        assert it.journal.count_outcomes(OutcomeFilter(queue="q\0'")) == {SUCCEEDED: 1}


@pytest.mark.parametrize("count", [1, 2, 5, 7, 511, 512, 513, 1500, 5000])
def test_every_number_of_rows(tmp_path: Path, count: int) -> None:
    with opened(tmp_path / "data") as it:
        it.write(Entry(submits=[submit(i) for i in range(1, count + 1)]))
        it.write(Entry(settles=[settle(i) for i in range(1, count + 1, 2)]))
        assert it.commits[-1][1] == 1
        assert [o.task_id for o in it.journal.read_outcomes(0, 10**6, 10**9)] == list(range(1, count + 1, 2))
        ids = [f"request-{i}" for i in range(1, count + 2)]
        assert sorted(it.journal.find_requests(ids)) == sorted(ids[0:count:2])
    with opened(tmp_path / "data") as it:
        assert [task.task_id for task in it.tasks] == list(range(2, count + 1, 2))


@pytest.mark.usefixtures("sweeping")
def test_a_large_spec_is_written_once_and_deleted_with_its_last_task(tmp_path: Path) -> None:
    spec, other = b"s" * (64 << 10), b"o" * (64 << 10)
    tasks = [submit(i, spec=spec) for i in range(1, 1001)]

    def specs() -> list[Any]:
        with closing(sqlite3.connect(tmp_path / "data" / journal_schema.DATABASE_NAME)) as connection:
            return connection.execute("SELECT length(body) FROM spec").fetchall()

    with opened(tmp_path / "data") as it:
        it.write(Entry(submits=tasks[:500]), Entry(submits=[submit(2000, spec=other)]), Entry(submits=tasks[500:]))
        assert it.journal.size_bytes() < 16 * len(spec)
    with opened(tmp_path / "data") as it:
        assert it.tasks == [*tasks, submit(2000, spec=other)]
        assert len({id(task.spec) for task in it.tasks}) == 2
        dead = settle(1000, state=DEAD_LETTERED, dead=tasks[-1])
        it.write(Entry(settles=[*[settle(i) for i in range(1, 1000)], settle(2000), dead]))
        until(lambda: specs() == [(len(spec),)])
        assert it.journal.get_dead_letters([1000]) == [tasks[-1]]
        it.write(Entry(deleted_dead_letters=[1000]))
        until(lambda: specs() == [])


def test_entries_are_committed_in_order_and_in_groups(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        entries = [Entry(settles=[settle(i), settle(i + 1)]) for i in range(1, 4001, 2)]
        it.write(*entries)
        assert [entry for group, _, _ in it.commits for entry in group] == entries
        cursor = 1
        for group, first_cursor, error in it.commits:
            assert (first_cursor, error) == (cursor, None)
            cursor += sum(len(entry.settles) for entry in group)
        assert len(it.commits) < len(entries) / 10, "one transaction should take what waited for the last"
        outcomes = it.journal.read_outcomes(0, 10**6, 10**9)
        assert [(o.cursor, o.task_id) for o in outcomes] == [(i, i) for i in range(1, 4001)]


def test_a_task_that_comes_and_goes_in_one_transaction_is_its_outcome_only(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        gate = threading.Event()
        blocked = Entry(settings={"gate": b""})
        tell = it.journal._on_commit
        # The journal's thread waits in the callback, so that the next two entries share a transaction.

        def tell_later(entries: Sequence[Entry], first_cursor: int, error: JournalError | None) -> None:
            assert gate.wait(10)
            tell(entries, first_cursor, error)

        it.journal._on_commit = tell_later
        it.journal.append(blocked)
        until(it.journal._queue.empty)
        time.sleep(0.05)
        it.journal.append(Entry(submits=[submit(1, b"x" * LARGE_BYTES), submit(2)]))
        it.journal.append(Entry(settles=[settle(1)]))
        gate.set()
        until(lambda: len(it.commits) == 2)
        assert len(it.commits[1][0]) == 2
        assert not list((tmp_path / "data" / "segments").iterdir()), "the payload was not to be written"
        assert it.journal.get_outcome(1) is not None
    with opened(tmp_path / "data") as it:
        assert it.tasks == [submit(2)]


def test_close_commits_queued_entries(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        for i in range(1, 20_001):
            it.journal.append(Entry(submits=[submit(i)]))
    assert sum(len(entries) for entries, _, _ in it.commits) == 20_000
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "LOCK", "journal.sqlite3", "payloads", "reserve", "segments"
    ]  # fmt: skip
    with opened(tmp_path / "data") as it:
        assert len(it.tasks) == 20_000


def test_a_closed_journal_drops_nothing_silently(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        pass
    with pytest.raises(JournalError, match="is closed"):
        it.journal.append(Entry(submits=[submit(1)]))


def test_read_outcomes_keeps_to_its_limits(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        it.write(Entry(settles=[settle(i, b"x" * 100) for i in range(1, 51)]))
        read = it.journal.read_outcomes
        assert [o.cursor for o in read(0, 7, 10**9)] == list(range(1, 8))
        assert [o.cursor for o in read(45, 100, 10**9)] == list(range(46, 51))
        assert [o.cursor for o in read(10, 100, 250)] == [11, 12], "at most 250 bytes"
        assert [o.cursor for o in read(10, 100, 0)] == [11], "always progress"
        assert read(50, 100, 10**9) == []


def test_filters_and_pages(tmp_path: Path) -> None:
    choices = list(itertools.product([SUCCEEDED, FAILED], ["a", "b"], ["embed", "echo"], ["", "m"], ["w0", "w1"]))
    records = [
        settle(i, state=state, queue=queue, kind=kind, model=model, worker_id=worker)
        for i, (state, queue, kind, model, worker) in enumerate(choices * 4, 1)
    ]
    with opened(tmp_path / "data") as it:
        names = ("queue", "kind", "model", "worker_id")
        it.write(Entry(settles=records[::2] + records[1::2]))  # not in the order of task_ids
        changes: tuple[dict[str, Any], ...] = (
            {}, {"states": [FAILED]}, {"states": {FAILED, SUCCEEDED}}, {"queue": "a"}, {"kind": "echo"}, {"model": "m"},
            {"worker_id": "w1"}, {"submitted_after_s": 1010.0}, {"submitted_before_s": 1090.0},
            {"submitted_after_s": 1010.0, "submitted_before_s": 1050.0, "queue": "b", "states": [FAILED]},
        )  # fmt: skip
        assert it.journal.count_outcomes(OutcomeFilter(submitted_before_s=0.0)) == {}
        for change in changes:
            wanted = OutcomeFilter(**change)
            expected = [
                r for r in records
                if (not wanted.states or r.state in wanted.states)
                and all(getattr(wanted, name) in ("", getattr(r, name)) for name in names)
                and r.submit_time_s >= wanted.submitted_after_s
                and r.submit_time_s < wanted.submitted_before_s
            ]  # fmt: skip
            assert 0 < len(expected) <= len(records)
            counts = {s: n for s in (SUCCEEDED, FAILED) if (n := sum(r.state == s for r in expected))}
            assert it.journal.count_outcomes(wanted) == counts
            listed, before = [], 0
            while page := it.journal.list_outcomes(wanted, before, 7):
                assert len(page) <= 7
                listed += [o.task_id for o in page]
                before = page[-1].task_id
            assert listed == [r.task_id for r in reversed(expected)]


def test_dead_letters_are_listed_by_queue_and_deleted(tmp_path: Path) -> None:
    letters = [settle(i, queue="ab"[i % 2], state=DEAD_LETTERED, dead=submit(i)) for i in range(1, 11)]
    with opened(tmp_path / "data") as it:
        it.write(Entry(submits=[submit(i) for i in range(1, 11)]))
        it.write(Entry(settles=letters))

        def listed(queue: str, before: int = 0) -> list[int]:
            return [o.task_id for o in it.journal.list_dead_letters(queue=queue, before_task_id=before, limit=3)]

        assert listed("") == [10, 9, 8]
        assert listed("", 8) == [7, 6, 5]
        assert listed("a") == [10, 8, 6]
        # Queued again, as new tasks: in the same step.
        it.write(Entry(submits=[submit(11), submit(12)], deleted_dead_letters=[10, 8, 77]))
        assert listed("a") == [6, 4, 2]
        assert it.journal.get_dead_letters([10, 9]) == [submit(9)]
        assert it.journal.get_outcome(10) is not None
        # As dead letters they are neither counted nor listed besides.
        letters_only = OutcomeFilter(states=[DEAD_LETTERED])
        assert it.journal.count_outcomes(letters_only) == {DEAD_LETTERED: 8}
        found = it.journal.list_outcomes(letters_only, 0, 20)
        assert [o.task_id for o in found] == [9, *range(7, 0, -1)]
        assert sorted(it.journal.dead_letter_queues()) == ["a", "b"]
        it.write(Entry(deleted_dead_letters=range(1, 10)))
        assert it.journal.dead_letter_queues() == []
    with opened(tmp_path / "data") as it:
        assert [task.task_id for task in it.tasks] == [11, 12]


@pytest.mark.slow
def test_reads_go_on_beside_the_writer_in_many_threads(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as it:
        it.write(Entry(settles=[settle(1)]))
        stop = threading.Event()

        def read() -> None:
            while not stop.is_set():
                outcomes = it.journal.read_outcomes(0, 100, 10**9)
                assert [o.cursor for o in outcomes] == list(range(1, len(outcomes) + 1))
                assert it.journal.find_requests(["request-1"])

        with ThreadPoolExecutor() as pool:
            reading = [pool.submit(read) for _ in range(4)]
            for i in range(2, 200):
                it.write(Entry(settles=[settle(i)]))
            stop.set()
        for each in reading:
            each.result()
        # No reader holds on to the past: the log can be emptied.
        with sqlite3.connect(tmp_path / "data" / "journal.sqlite3") as other:
            assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
        other.close()


def test_the_oldest_cursor_is_not_behind_outcomes_that_are_committed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with journals.opened(tmp_path) as (journal, commits):
        rows = journal._rows

        def commit_after(sql: str, parameters: Any) -> Any:
            found = rows(sql, parameters)
            monkeypatch.undo()
            journals.commit(journal, commits, Entry(settles=[settle(1)]))
            return found

        monkeypatch.setattr(journal, "_rows", commit_after)
        assert journal.oldest_cursor() == 1
