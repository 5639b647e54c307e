"""The journal without room: submits are refused, outcomes are kept until they can be written, and all else goes on."""

import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from multigpu_master import journal_sqlite
from multigpu_master.journal import Entry, JournalError, JournalFullError, SettleRecord, SubmitRecord
from multigpu_master.journal_segments import LARGE_BYTES
from multigpu_master.journal_sqlite import SqliteJournal


def submit(task_id: int, payload: bytes = b"in") -> SubmitRecord:
    return SubmitRecord(task_id, f"request-{task_id}", b"spec", payload, "", 1, 1000.0)


def settle(task_id: int, body: bytes = b"out", expire_time_s: float = 5000.0) -> SettleRecord:
    return SettleRecord(
        task_id, f"request-{task_id}", 1, "default", "echo", "", "w0", 1000.0, 2000.0, expire_time_s, body, None
    )


Commit = tuple[Sequence[Entry], int, JournalError | None]


@contextmanager
def opened(
    data_dir: Path, size_max_bytes: int = 1 << 30, **options: Any
) -> Iterator[tuple[SqliteJournal, list[Commit]]]:
    commits: list[Commit] = []
    journal = SqliteJournal(data_dir, size_max_bytes=size_max_bytes, **options)
    list(journal.open(lambda *commit: commits.append(commit)).tasks)
    try:
        yield journal, commits
    finally:
        journal.close(20)


def until(true: Callable[[], bool], timeout_s: float = 15.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.01)


def answered(commits: list[Commit], entry: Entry) -> JournalError | str:
    """What became of an entry: "committed" or its error."""
    until(lambda: any(known is entry for group, _, _ in commits for known in group))
    return next(error or "committed" for group, _, error in commits if any(known is entry for known in group))


def test_over_its_limit_it_refuses_submits_and_keeps_outcomes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_sqlite, "TICK_S", 0.02)
    monkeypatch.setattr(journal_sqlite, "SWEEP_AFTER_S", 0.0)
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.05)
    monkeypatch.setattr(journal_sqlite, "TRANSACTION_RECORDS", 1)  # so that the order of what is kept could be lost
    clock_s = [3000.0]
    with opened(tmp_path / "data", 2 << 20, now=lambda: clock_s[0], dedupe_window_s=10.0) as (journal, commits):
        first = Entry(settles=[settle(i, bytes(10_000)) for i in range(1, 136)])
        tasks = Entry(submits=[submit(500), submit(501)])
        journal.append(first)
        journal.append(tasks)
        assert answered(commits, first) == answered(commits, tasks) == "committed"
        refused = Entry(submits=[submit(i, bytes(10_000)) for i in range(600, 680)])
        journal.append(refused)
        error = answered(commits, refused)
        assert isinstance(error, JournalFullError)
        assert "Free space" in str(error)
        assert not journal.writable
        kept = [
            Entry(settles=[settle(500, bytes(900_000))]),
            Entry(settles=[settle(501), settle(600), settle(502)]),  # 600 was refused: nobody may hear of it
            Entry(settings={"strategy": b"x" * 500_000}),
        ]
        for entry in kept:
            journal.append(entry)
        also_refused = Entry(submits=[submit(700, bytes(100_000))])
        journal.append(also_refused)
        answered(commits, also_refused)
        time.sleep(0.3)
        assert journal.get_outcome(500) is None
        assert journal.get_outcome(501) is None, "there is room for this one, but not before the first"
        assert journal.get_outcome(1) is not None, "it goes on reading"
        clock_s[0] = 9000.0  # the first outcomes expire, and make room
        until(lambda: journal.get_outcome(502) is not None)
        until(lambda: journal.writable)
        assert journal.get_outcome(600) is None
        done = [entry for group, _, error in commits if error is None for entry in group]
        assert all(entry is known for entry, known in zip(done[2:], kept, strict=False)), "the same objects, in order"
        assert [record.task_id for record in done[3].settles] == [501, 502]
        assert [o.task_id for o in journal.read_outcomes(135, 10, 10**9)] == [500, 501, 502]
        later = Entry(submits=[submit(701)])
        journal.append(later)
        assert answered(commits, later) == "committed"
    with opened(tmp_path / "data") as (journal, _):
        assert [task.task_id for task in journal.recover_tasks()] == [701]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", mounted], check=False).returncode
    ):
        pytest.skip("only root may mount a small file system")
    yield mounted
    subprocess.run(["umount", mounted], check=True)


@pytest.mark.parametrize("payload_bytes", [2000, LARGE_BYTES])
def test_a_full_disk_refuses_submits_until_there_is_room(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, payload_bytes: int
) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.05)
    with opened(small_disk / "data") as (journal, commits):
        ballast = small_disk / "ballast"
        first = Entry(submits=[submit(1)])
        journal.append(first)
        assert answered(commits, first) == "committed"
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(os.urandom(8 << 20))
        refused = Entry(submits=[submit(i, os.urandom(payload_bytes)) for i in range(2, 40)])
        journal.append(refused)
        assert isinstance(answered(commits, refused), JournalFullError)
        kept = Entry(settles=[settle(1, os.urandom(payload_bytes))])
        journal.append(kept)
        time.sleep(0.3)
        assert not journal.writable
        assert not any(kept in group for group, _, _ in commits)
        assert journal.get_outcome(1) is None
        ballast.unlink()
        assert answered(commits, kept) == "committed"
        assert journal.writable
        journal.append(again := Entry(submits=[submit(i, os.urandom(payload_bytes)) for i in range(2, 10)]))
        assert answered(commits, again) == "committed"
    with opened(small_disk / "data") as (journal, _):
        assert list(journal.recover_tasks()) == again.submits
        assert journal.get_outcome(1) is not None


def test_on_a_full_disk_it_looks_for_room_by_itself_and_can_be_closed(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.05)
    ballast = small_disk / "ballast"
    with opened(small_disk / "data") as (journal, commits):
        for after in ("room", "close"):
            with pytest.raises(OSError, match="No space"):
                ballast.write_bytes(os.urandom(8 << 20))
            refused = Entry(submits=[submit(i, os.urandom(3000)) for i in range(40)])
            journal.append(refused)
            assert isinstance(answered(commits, refused), JournalFullError)
            time.sleep(0.2)
            assert not journal.writable, "the next look was for room that is not there"
            if after == "room":
                ballast.unlink()
                until(lambda: journal.writable)
                until(lambda: commits[-1] == ([], 1, None))  # the driver is told
        journal.append(kept := Entry(settles=[settle(100, os.urandom(100_000))]))
    assert isinstance(answered(commits, kept), JournalFullError)


def test_half_a_payload_is_not_left_behind(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_sqlite, "RETRY_S", 0.05)
    ballast = small_disk / "ballast"
    with opened(small_disk / "data") as (journal, commits):
        with pytest.raises(OSError, match="No space"):
            ballast.write_bytes(bytes(8 << 20))
        os.truncate(ballast, ballast.stat().st_size - LARGE_BYTES)  # room for one, and not for two
        journal.append(refused := Entry(submits=[submit(i, os.urandom(LARGE_BYTES)) for i in (1, 2)]))
        assert isinstance(answered(commits, refused), JournalFullError)
        ballast.unlink()
        until(lambda: journal.writable)
        journal.append(again := Entry(submits=[submit(i, os.urandom(LARGE_BYTES)) for i in (3, 4)]))
        assert answered(commits, again) == "committed"
    with opened(small_disk / "data") as (journal, _):
        assert list(journal.recover_tasks()) == again.submits


def test_segments_count_for_the_limit(tmp_path: Path) -> None:
    with opened(tmp_path / "data", 4 * LARGE_BYTES) as (journal, commits):
        entries = [Entry(submits=[submit(i, bytes(LARGE_BYTES))]) for i in range(1, 6)]
        for entry in entries:
            journal.append(entry)
            answered(commits, entry)
        assert [answered(commits, entry) == "committed" for entry in entries[:2]] == [True, True]
        assert isinstance(answered(commits, entries[-1]), JournalFullError)
        assert journal.size_bytes() < 6 * LARGE_BYTES  # the log is not counted, it is bounded by itself
