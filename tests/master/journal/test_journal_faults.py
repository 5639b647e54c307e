"""The journal when things go wrong: a damaged file, a broken disk, deleted files. tests/disk kills it at any moment."""

import contextlib
import errno
import hashlib
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from multigpu_master.errors import JournalDamagedError, JournalError, JournalFullError
from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite import connections, failures
from multigpu_master.journal.sqlite import directory as journal_directory
from multigpu_master.journal.sqlite import schema as journal_schema
from multigpu_master.journal.sqlite import segments as journal_segments
from multigpu_master.journal.sqlite.directory import LOCK_NAME
from multigpu_master.journal.sqlite.journal import SqliteJournal
from multigpu_master.journal.sqlite.segments import DIRECTORY_NAME, LARGE_BYTES

from tests.master.journal.journals import CHECKS, answered, commit, opened, reject, settle, submit
from tests.waiting import until


def snapshot(data_dir: Path) -> dict[str, str]:
    return {
        str(path.relative_to(data_dir)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(data_dir.rglob("*"))
        if path.is_file() and path.name != LOCK_NAME and path.suffix != ".sqlite3-shm"  # SQLite may build that one
    }


def test_only_its_user_may_read_it(tmp_path: Path) -> None:
    os.umask(os.umask(0))  # whatever it is
    with opened(tmp_path / "deep" / "data") as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1, bytes(LARGE_BYTES))]))
        for path in [tmp_path / "deep" / "data", *(tmp_path / "deep" / "data").rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path


@pytest.mark.parametrize("syncs", range(4))
def test_the_names_of_new_directories_are_synced_also_after_a_start_that_was_killed(
    syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start is killed when it has synced this many directories."""
    data_dir = tmp_path / "a" / "b" / "data"
    synced, left = set[Path](), [syncs]

    def sync(parent: Path) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        synced.update(parent.iterdir())

    monkeypatch.setattr(journal_directory, "sync", sync)
    with contextlib.suppress(KeyboardInterrupt):
        journal_directory.make_directory(data_dir)
    left[0] = 100
    journal_directory.make_directory(data_dir)
    assert {tmp_path / "a", tmp_path / "a" / "b", data_dir} <= synced


def test_the_name_of_a_segment_is_synced_before_its_references_also_after_a_lack_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, failed = set[Path](), list[Path]()

    def sync(directory: Path) -> None:
        if directory.name == DIRECTORY_NAME and not failed:
            failed.append(directory)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        synced.update(directory.iterdir())

    monkeypatch.setattr(journal_segments, "sync", sync)
    with opened(tmp_path) as (journal, commits):
        reject(journal, commits, Entry(submits=[submit(1, bytes(LARGE_BYTES))]))
        until(lambda: journal.writable)
        commit(journal, commits, Entry(submits=[submit(2, bytes(LARGE_BYTES))]))
        ((reference,),) = journal._rows("SELECT payload FROM task", ())
    assert tmp_path / DIRECTORY_NAME / reference.partition(":")[0] in synced


def filled(data_dir: Path) -> None:
    with opened(data_dir) as (journal, commits):
        last = Entry(settles=[settle(i) for i in range(1, 2000)])
        journal.append(Entry(submits=[submit(i, os.urandom(300)) for i in range(1, 4000)]))
        commit(journal, commits, last)


def overwritten(at: int, data: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        whole = path.read_bytes()
        place = at or len(whole) // 2
        path.write_bytes(whole[:place] + data + whole[place + len(data) :])

    return damage


def halved(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 8192 * 8192)


@pytest.mark.parametrize("logged", [False, True], ids=["closed", "with a log"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            overwritten(60, (7).to_bytes(4, "big")),
            "schema version 7; this multigpu knows version 4.*Start the multigpu that wrote it",
        ),
        (
            lambda path: os.truncate(path, path.stat().st_size // 2 // 8192 * 8192),
            "is damaged.*nothing in it was changed.*Restore",
        ),
        (lambda path: os.truncate(path, 0), "is damaged.*not an SQLite database.*Restore"),
        (overwritten(0, random.Random(5).randbytes(20_000)), "is damaged.*nothing in it was changed.*Restore"),
        (overwritten(68, bytes(4)), "not a journal of multigpu.*another --data-dir"),
    ],
)
def test_foreign_or_damaged_files_are_rejected_and_not_changed(
    tmp_path: Path, damage: Callable[[Path], None], message: str, *, logged: bool
) -> None:
    data_dir = tmp_path / "data"
    filled(data_dir)
    path = data_dir / journal_schema.DATABASE_NAME
    if logged:  # as after a kill -9: copied while a master has it open
        with opened(data_dir) as (journal, commits):
            commit(journal, commits, Entry(submits=[submit(100_000)]))
            shutil.copytree(data_dir, tmp_path / "copy")
        data_dir, path = tmp_path / "copy", tmp_path / "copy" / journal_schema.DATABASE_NAME
        (data_dir / (journal_schema.DATABASE_NAME + "-shm")).unlink()
        assert path.with_name(path.name + "-wal").stat().st_size > 0
    damage(path)
    before = snapshot(data_dir)
    with pytest.raises(JournalError, match=message) as caught:
        SqliteJournal(data_dir, size_max_bytes=1 << 30).open(lambda *_: None)
    assert str(path) in str(caught.value)
    assert snapshot(data_dir) == before


def test_a_directory_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file can't be used.*needs a directory"):
        SqliteJournal(tmp_path / "file", size_max_bytes=1 << 30).open(lambda *_: None)
    with pytest.raises(JournalError, match=r"/proc/1/data can't be used.*needs a directory"):
        SqliteJournal(Path("/proc/1/data"), size_max_bytes=1 << 30).open(lambda *_: None)


BROKEN_DISK = """
import resource, sys, time
from pathlib import Path
from multigpu_master.journal.protocol import (Entry, SubmitRecord)
from multigpu_master.errors import (JournalError, JournalFullError)
from multigpu_master.journal.sqlite.journal import SqliteJournal
commits = []
journal = SqliteJournal(Path(sys.argv[1]), size_max_bytes=1 << 30)
list(journal.open(lambda *commit: commits.append(commit)).tasks)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # writes fail from here on, though the disk has space
entry = Entry(submits=[SubmitRecord(1, "", b"", bytes(50_000), "", 1, 0.0) for _ in range(1)])
journal.append(entry)
journal.append(Entry(submits=[SubmitRecord(2, "", b"", bytes(90_000), "", 1, 0.0)]))
fatal = []
while not fatal:  # until the timeout of the test
    fatal = [error for _, _, error in commits if error is not None]
    time.sleep(0.01)
time.sleep(0.1)
fatal = [error for _, _, error in commits if error is not None]
assert len(fatal) == 1 and type(fatal[0]) is JournalError, commits
try:
    journal.append(entry)
except JournalError as error:
    assert error is fatal[0]
    print(error)
journal.close(5)
"""


def test_another_disk_failure_is_reported_once_and_ends_the_journal(tmp_path: Path) -> None:
    filled(tmp_path / "data")
    ran = subprocess.run(
        [sys.executable, "-c", BROKEN_DISK, tmp_path / "data"], capture_output=True, text=True, timeout=400, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert "can't be read or written any more" in ran.stdout
    assert "starting the master again recovers" in ran.stdout
    with opened(tmp_path / "data") as (journal, _):
        assert len(list(journal.recover_tasks())) >= 2000


def test_commits_wait_for_the_disk(tmp_path: Path) -> None:
    # A process that is killed leaves its writes with the kernel; only these settings outlive a loss of power.
    with opened(tmp_path / "data"):
        writer = connections.connect_writer(tmp_path / "data" / journal_schema.DATABASE_NAME)
        assert writer.execute("PRAGMA journal_mode").fetchall() == [("wal",)]
        assert writer.execute("PRAGMA synchronous").fetchall() == [(2,)]
        writer.close()


def test_extended_error_codes_of_sqlite_are_explained(tmp_path: Path) -> None:
    """A damaged index was reported as a failure of the disk, with the advice to start the master again."""
    for code, name, text in (
        (sqlite3.SQLITE_CORRUPT_INDEX, "SQLITE_CORRUPT_INDEX", "is damaged"),
        (sqlite3.SQLITE_BUSY_SNAPSHOT, "SQLITE_BUSY_SNAPSHOT", "locked by another program"),
    ):
        error = sqlite3.OperationalError("of SQLite")
        error.sqlite_errorcode, error.sqlite_errorname = code, name
        assert text in str(failures.explain(error, tmp_path / "journal.sqlite3"))


def test_a_time_that_is_no_number_is_damage(tmp_path: Path) -> None:
    with opened(tmp_path) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1)]))
    with contextlib.closing(sqlite3.connect(tmp_path / journal_schema.DATABASE_NAME, isolation_level=None)) as writer:
        writer.execute("UPDATE task SET submit_time_s = 'yesterday'")
    with pytest.raises(JournalDamagedError, match=r"newest time is 'yesterday'.* salvage"), opened(tmp_path):
        pass


def test_close_gives_up_in_time(tmp_path: Path) -> None:
    gate = threading.Event()
    journal = SqliteJournal(tmp_path / "data", size_max_bytes=1 << 30)
    list(journal.open(lambda *_: gate.wait(20)).tasks)  # the callback keeps the thread
    journal.append(Entry(submits=[submit(1)]))
    started = time.monotonic()
    with pytest.raises(JournalError, match=r"could not be closed within 0\.2 s"):
        journal.close(0.2)
    assert time.monotonic() - started < 2
    gate.set()


@pytest.mark.parametrize("lost", ["directory", "database", "log"])
def test_a_master_whose_journal_was_deleted_acknowledges_nothing_and_stops(tmp_path: Path, lost: str) -> None:
    """The files can be written as before, but no later master would find them."""
    data_dir = tmp_path / "data"
    with opened(data_dir) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1)]))
        if lost == "directory":
            data_dir.rename(tmp_path / "elsewhere")
        else:
            (data_dir / ("journal.sqlite3" if lost == "database" else "journal.sqlite3-wal")).unlink()
        journal.append(second := Entry(submits=[submit(2)]))
        error = answered(commits, second)
        assert isinstance(error, JournalError)
        assert "was deleted, moved or replaced" in str(error)


@pytest.mark.usefixtures("sweeping")
def test_an_idle_master_notices_that_its_journal_was_deleted(tmp_path: Path) -> None:
    with opened(tmp_path / "data") as (_, commits):
        shutil.rmtree(tmp_path / "data")
        until(lambda: bool(commits))
        assert "was deleted" in str(commits[0][2])


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_failed_start_closes_the_journal_and_keeps_its_log(tmp_path: Path) -> None:
    """It deleted the log when the process ended, and the next start then missed it."""
    with opened(tmp_path) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1)]))
    with contextlib.closing(sqlite3.connect(tmp_path / journal_schema.DATABASE_NAME, isolation_level=None)) as writer:
        writer.execute("UPDATE task SET submit_time_s = 'yesterday'")
    before = descriptors()
    journal = SqliteJournal(tmp_path, size_max_bytes=1 << 30)
    with pytest.raises(JournalDamagedError, match="newest time"):
        journal.open(lambda *_: None)
    assert descriptors() == before
    assert (tmp_path / f"{journal_schema.DATABASE_NAME}-wal").stat().st_size > 0
    with pytest.raises(JournalDamagedError, match="newest time"), opened(tmp_path):  # nothing else
        pass


def test_a_start_on_a_full_disk_is_tried_again_without_a_leak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, calls = journal_schema.begin_incarnation, list[int]()

    def full_once(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise JournalFullError("no room")
        return begin(*arguments)

    counts = []
    for fails in (False, True):
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(journal_schema, "begin_incarnation", full_once)
            with opened(tmp_path) as (journal, commits):
                commit(journal, commits, Entry(submits=[submit(1 + fails)]))
                counts.append(descriptors())
    assert (len(calls), counts[1]) == (2, counts[0])


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EACCES])
def test_a_row_that_cannot_be_read_now_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """For lack of memory, or because a restored file belongs to another user: salvage deleted the task."""
    with opened(tmp_path) as (journal, commits):
        commit(journal, commits, Entry(submits=[submit(1, bytes(LARGE_BYTES))]))

        def fail(*_: object) -> bytes:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(journal_segments.LargeObjects, "read", fail)
        with pytest.raises(JournalError, match=os.strerror(number)):
            list(journal.lost_rows(CHECKS))


def test_a_file_that_is_too_short_is_damage(tmp_path: Path) -> None:
    """It was "can't be used: None", with advice on permissions."""
    error = failures.explain(OSError("the segment ends before 5 + 3"), tmp_path)
    assert isinstance(error, JournalDamagedError)
    assert "the segment ends before 5 + 3" in str(error)


def test_a_mistake_of_the_program_is_not_damage(tmp_path: Path) -> None:
    """It was said to be a damaged setting, with advice to salvage a sound journal."""
    error = OverflowError("Python int too large to convert to SQLite INTEGER")
    assert not isinstance(failures.explain(error, tmp_path), JournalDamagedError)
    assert isinstance(failures.explain_open(error, tmp_path), JournalDamagedError)


@pytest.mark.parametrize("used_up", [True, False])
def test_a_quota_that_is_used_up_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, used_up: bool
) -> None:
    """SQLite reports it as a failed write, which ended the master."""

    def allocate(*_: object) -> None:
        if used_up:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
    assert isinstance(failures.explain(error, tmp_path / "journal.sqlite3"), JournalFullError) is used_up
