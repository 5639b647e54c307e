"""The journal's directory: its lock, and the checks before anything in it is changed.

It contains `journal.sqlite3` with its write-ahead log, and `LOCK`, which a master or salvage keeps locked while it uses
the directory; the kernel unlocks the file if the process dies. A new database is created under another name and
renamed, so it always has the whole schema, an application id and a version.
Without a log, the id and the version are read from the file's header before SQLite opens the file. With a log, they are
read through a connection that can't write, because the log may have newer values.
"""

import contextlib
import fcntl
import itertools
import os
import socket
import sqlite3
from pathlib import Path

from multigpu._transport.payloads import NAME

from multigpu_master.errors import JournalError
from multigpu_master.journal.payload_files import DIRECTORY_NAME as PAYLOADS
from multigpu_master.journal.sqlite import wal
from multigpu_master.journal.sqlite.connections import enable_wal, has_log
from multigpu_master.journal.sqlite.failures import (
    NO_DATABASE,
    damaged_error,
    explain,
    gone_error,
    missing_log_error,
    salvageable_error,
)
from multigpu_master.journal.sqlite.files import sync
from multigpu_master.journal.sqlite.schema import (
    APPLICATION_ID,
    DATABASE_NAME,
    PAGE_BYTES,
    PART_NAME,
    SCHEMA,
    SCHEMA_VERSION,
    TASK_COLUMNS,
    left_open,
)
from multigpu_master.journal.sqlite.segments import DIRECTORY_NAME as SEGMENTS

LOCK_NAME = "LOCK"
QUICK_CHECK_BYTES_MAX = 256 << 20  # of a larger database only some tables are checked at a start


class DirectoryLock:
    """Keeps a second master off a data directory. Held from construction to `release`."""

    def __init__(self, data_dir: Path) -> None:
        self._fd = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 4096, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise JournalError(
                f"The data directory {data_dir} is held by another master or by salvage ({holder}). Stop that "
                "process first, or give this one another directory (--data-dir)."
            ) from None
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        os.close(self._fd)  # the file stays: removing it would race with the next holder


class FileIdentities:
    """The device and inode numbers that the database and its log had when they were opened."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened = self._identity()

    def _identity(self) -> list[tuple[int, int]]:
        found = [self._path.stat(), self._path.with_name(f"{self._path.name}-wal").stat()]
        return [(each.st_dev, each.st_ino) for each in found]

    def check(self) -> None:
        """Raises JournalError if the files were deleted or replaced: what is written to the open files is lost."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            if self._identity() == self._opened:
                return
        raise gone_error(self._path)


def prepare(data_dir: Path) -> DirectoryLock:
    """Makes the directory if it does not exist, takes the lock, and checks or creates the database. Returns the lock.
    Raises JournalError if any of these fails.
    """
    path = data_dir / DATABASE_NAME
    lock: DirectoryLock | None = None
    try:
        make_directory(data_dir)
        lock = DirectoryLock(data_dir)
        if path.exists():
            check_header(path)
            _check_contents(path)
        else:
            check_remains(path)
            _create(path)
    except (OSError, sqlite3.Error, JournalError) as error:
        if lock is not None:
            lock.release()
        raise explain(error, path) from error
    return lock


def make_directory(data_dir: Path) -> None:
    """Makes the directory and its parents durably: syncs the name of each before it makes the next. So if a process is
    killed here, only the directory that it made last may have a name that is not synced; the next process syncs that
    name first.
    """
    path = data_dir.absolute()
    missing = list(itertools.takewhile(lambda each: not each.exists(), (path, *path.parents)))
    if missing:
        _sync_name(missing[-1].parent)
    for parent in reversed(missing[1:]):
        parent.mkdir(exist_ok=True)
        _sync_name(parent)
    path.mkdir(mode=0o700, exist_ok=True)
    _sync_name(path)


def _sync_name(path: Path) -> None:
    """Makes the name of a directory durable. The parent of a mount point may be unable to sync, and needs no sync."""
    if not path.is_mount():
        # A user who may not read the parent can't sync it, and usually has made no directory in it.
        with contextlib.suppress(PermissionError):
            sync(path.parent)


def check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(100)
    log_exists = has_log(path)
    if len(header) < 100 or not (log_exists or header.startswith(b"SQLite format 3\x00")):
        raise damaged_error(path, NO_DATABASE)
    if log_exists:
        return
    _check_identity(path, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))


def _check_identity(path: Path, application_id: int, version: int) -> None:
    if application_id != APPLICATION_ID:
        raise JournalError(f"{path} is an SQLite database, but not a journal of multigpu. Give another --data-dir.")
    if version != SCHEMA_VERSION:
        raise JournalError(
            f"The journal {path} has schema version {version}; this multigpu knows version {SCHEMA_VERSION}. Start the "
            "multigpu that wrote it, or give another --data-dir. Nothing was changed."
        )


def _check_contents(path: Path) -> None:
    """Raises JournalError if a database is damaged or of another version. Changes nothing, except that SQLite
    may build the log's index if it is missing.
    """
    log = path.with_name(f"{DATABASE_NAME}-wal")
    index = path.with_name(f"{DATABASE_NAME}-shm")
    log_is_absent = not log.exists()
    if what := wal.describe_cut(log, index, PAGE_BYTES):
        raise salvageable_error(path, what)
    # Without a log, or with an empty one (has_log is False), the file alone can be read. With a log, SQLite needs the
    # log's index, which it may have to build.
    mode = "mode=ro" if has_log(path) else "mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as connection:
        whole = path.stat().st_size <= QUICK_CHECK_BYTES_MAX
        scopes = ("1",) if whole else ("'task'", "'setting'", "'dead_letter'")
        # check_header can't read the log, which alone may have the version of a newer multigpu that was killed.
        identity = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
        _check_identity(path, *identity)
        if log_is_absent and left_open(connection):
            raise missing_log_error(path)
        if not log_is_absent and (what := wal.describe_damage(log, index, PAGE_BYTES)):
            raise salvageable_error(path, what)
        verdicts = [connection.execute(f"PRAGMA quick_check({scope})").fetchone()[0] for scope in scopes]
        connection.execute(f"SELECT {TASK_COLUMNS} FROM task LIMIT 1").fetchall()  # noqa: S608  # constants
    for verdict in verdicts:
        if verdict != "ok":
            raise damaged_error(path, verdict.replace("\n", " "))


def check_remains(path: Path) -> None:
    """Called if there is no database. Raises JournalError if there are other files of a journal or of a backup, which a
    new database would adopt or delete.
    """
    if path.with_name(PART_NAME).exists():
        raise JournalError(
            f"{path.parent} is an incomplete backup: it was interrupted ({PART_NAME} exists). Use another backup."
        )
    remains = [path.name + "-wal"] if has_log(path) else []
    segments, payloads = path.parent / SEGMENTS, path.parent / PAYLOADS
    remains += [f"{segments.name}/"] if segments.is_dir() and any(segments.iterdir()) else []
    shared = payloads.iterdir() if payloads.is_dir() else ()
    remains += [f"{payloads.name}/"] if any(NAME.fullmatch(each.name) for each in shared) else []
    if remains:
        raise JournalError(
            f"{path} is gone, but {' and '.join(remains)} of that journal are still in {path.parent}. Move the whole "
            "directory away to begin with an empty journal, or bring the database back."
        )


def _create(path: Path) -> None:
    aside = path.with_name(DATABASE_NAME + ".new")
    aside.unlink(missing_ok=True)
    os.close(os.open(aside, os.O_CREAT | os.O_EXCL, 0o600))
    with contextlib.closing(sqlite3.connect(aside, isolation_level=None)) as connection:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.executescript(f"BEGIN; {SCHEMA} COMMIT;")
        enable_wal(connection)
    aside.rename(path)
    sync(path.parent)
