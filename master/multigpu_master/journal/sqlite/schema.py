"""The journal's file: its schema, who may open it, and what is checked before anything in it is changed.

The directory holds `journal.sqlite3` with its write-ahead log, and `LOCK`, which one master holds as long as it
lives; the kernel lets go of it when the process ends, however it ends. A new file is built aside and moved into
place, so that a file of that name always has the whole schema, an application id and a version in its header. Both
are read as plain bytes before SQLite sees the file, because SQLite would already write to a file that has a log
beside it.
"""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from multigpu_master import ids
from multigpu_master.journal.protocol import JournalDamagedError, JournalError, JournalFullError
from multigpu_master.journal.sqlite import migrations as journal_migrations
from multigpu_master.journal.sqlite import segments as journal_segments
from multigpu_master.journal.sqlite import specs as journal_specs
from multigpu_master.journal.sqlite import wal as journal_log
from multigpu_master.journal.sqlite.disk_reserve import NO_DESCRIPTOR

DATABASE_NAME = "journal.sqlite3"
PART_NAME = f"{DATABASE_NAME}.part"  # of a backup that is being made, or was broken off
LOCK_NAME = "LOCK"
APPLICATION_ID = int.from_bytes(b"mgpu", "big")
SCHEMA_VERSION = 2
FLAGGED_SINCE_VERSION = 2  # with SETTING_OPEN, if a master of this release or a later one has opened the journal
PAGE_BYTES = 8192
QUICK_CHECK_BYTES_MAX = 256 << 20  # larger files are not walked as a whole before every start
WAL_PAGES = (8 << 20) // PAGE_BYTES  # how much log is gathered before it is copied into the database
WAL_KEEP_BYTES = 64 << 20
BUSY_TIMEOUT_S = 30.0  # somebody's sqlite3 shell may hold the file for a moment

SETTING_EPOCH = "journal.epoch"  # the last that was begun
SETTING_PROBE = "journal.probe"
SETTING_LEASE_KEY = "journal.lease_key"  # of ids.LeaseProofs
# The incarnation that has the journal open, or ended without closing it: its log must be there. Older releases leave
# it as it is, so it counts only if that incarnation is the newest one.
SETTING_OPEN = "journal.open"
_PRIVATE_SETTINGS = (SETTING_EPOCH, SETTING_PROBE, SETTING_LEASE_KEY, SETTING_OPEN)
_LEFT_OPEN = f"""
SELECT EXISTS (SELECT 1 FROM setting WHERE key = '{SETTING_OPEN}'
  AND value = (SELECT name FROM incarnation ORDER BY first_id DESC LIMIT 1))"""

TASK_COLUMNS = "task_id, request_id, spec, payload, partition_key, units, submit_time_s"
_TASK_TABLE = """(
  task_id INTEGER PRIMARY KEY, request_id TEXT NOT NULL, partition_key TEXT NOT NULL, units INTEGER NOT NULL,
  submit_time_s REAL NOT NULL, spec BLOB NOT NULL, payload BLOB NOT NULL)"""
_SCHEMA = f"""
CREATE TABLE setting (key TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE task {_TASK_TABLE};
CREATE TABLE dead_letter {_TASK_TABLE};
CREATE TABLE outcome (
  cursor INTEGER PRIMARY KEY, task_id INTEGER NOT NULL, request_id TEXT NOT NULL, state INTEGER NOT NULL,
  queue TEXT NOT NULL, kind TEXT NOT NULL, model TEXT NOT NULL, worker_id TEXT NOT NULL,
  submit_time_s REAL NOT NULL, settle_time_s REAL NOT NULL, expire_time_s REAL NOT NULL, body BLOB, \
fingerprint INTEGER);
CREATE INDEX outcome_task ON outcome (task_id);
CREATE INDEX outcome_request ON outcome (request_id) WHERE request_id <> '';
{";".join(journal_specs.SCHEMA)};
CREATE TABLE incarnation (first_id INTEGER PRIMARY KEY, name TEXT NOT NULL, first_cursor INTEGER NOT NULL);
{journal_segments.INDEXES}
INSERT INTO setting VALUES ('{SETTING_EPOCH}', 0);
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {SCHEMA_VERSION};
"""

_NO_DATABASE = "it is not an SQLite database"
# The file system, not the file: SQLite says these when there is no room for the log's index either.
_FULL_CODES = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE})


def explain(error: Exception, path: Path) -> JournalError:
    """What a failure of SQLite or of the file system means for this journal, with the remedy."""
    if isinstance(error, JournalError):
        return error
    code = getattr(error, "sqlite_errorcode", None)
    if code in _FULL_CODES or getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return full(path)
    if getattr(error, "errno", None) in NO_DESCRIPTOR:
        return JournalFullError(
            f"The journal {path} can't be written now: no file descriptor is left ({error}). End connections to the "
            "master, or raise its limit (LimitNOFILE of its unit, or ulimit -n)."
        )
    if isinstance(error, OSError) and error.errno != errno.EIO:
        return JournalError(
            f"The journal's directory {path.parent} can't be used: {error.strerror}. Give a directory that this "
            "user may write to."
        )
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return _damaged(path, _NO_DATABASE if code == sqlite3.SQLITE_NOTADB else str(error))
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return JournalError(
            f"The journal {path} stayed locked by another program for {BUSY_TIMEOUT_S:.0f} s ({error}). End that "
            "program (fuser says which it is) and start the master again."
        )
    return JournalError(
        f"The journal {path} can't be read or written any more: {error} "
        f"({getattr(error, 'sqlite_errorname', type(error).__name__)}). Look at the disk (dmesg, df); what was "
        "acknowledged is safe, and starting the master again recovers it."
    )


def full(path: Path) -> JournalFullError:
    return JournalFullError(
        f"The journal {path} is full: the disk has no room left, or the journal's size limit (journal_bytes_max) is "
        "reached. Free space on the disk (never delete files in data_dir), raise the limit, or remove tasks: `mgpuctl "
        "dead-letters delete`, `mgpuctl tasks cancel`."
    )


def _damaged(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"The journal {path} is damaged ({what}); nothing in it was changed. Restore its directory from a backup, or "
        f"save what can be read with `sqlite3 {path} .recover`, or move the whole directory away to begin with an "
        "empty journal."
    )


def damaged_log(path: Path, what: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"The journal {path} is damaged: {what}. Nothing in it was changed. Restore its directory from a backup, or "
        f"run `mgpu-master --data-dir {path.parent} salvage`, which keeps what can be read and says what is gone."
    )


def log_missing(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether the log was deleted although the last master did not close the journal. The connection must be one that
    makes no log.
    """
    if path.with_name(path.name + "-wal").exists():
        return False
    ((version,),) = connection.execute("PRAGMA user_version").fetchall()
    if version < FLAGGED_SINCE_VERSION:
        return False
    ((left_open,),) = connection.execute(_LEFT_OPEN).fetchall()
    return bool(left_open)


def _missing_log(path: Path) -> JournalDamagedError:
    return JournalDamagedError(
        f"The log {path.name}-wal is missing in {path.parent}, and the last master did not close the journal: "
        "acknowledged transactions are lost, unless another program (such as sqlite3) has copied them into the "
        "database. Nothing was changed. Bring the file back, or restore the directory from a backup, or run "
        f"`mgpu-master --data-dir {path.parent} salvage` to go on with what the database holds."
    )


class DirectoryLock:
    """Keeps a second master off a data directory. Held from construction to `release`."""

    def __init__(self, data_dir: Path, address: str) -> None:
        path = data_dir / LOCK_NAME
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 4096, 0)
            os.close(self._fd)
            raise JournalError(_held_by(data_dir, holder)) from None
        started = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="seconds")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "started": started, "address": address}
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(me).encode() + b"\n", 0)
        except OSError:
            os.close(self._fd)
            raise

    def release(self) -> None:
        os.close(self._fd)  # the file stays: removing it would race with the next holder


def _held_by(data_dir: Path, holder: bytes) -> str:
    try:
        who = json.loads(holder)
        told = f"pid {who['pid']} on {who['host']}, since {who['started']}"
        if who["address"]:
            told += f", serving {who['address']}"
    except (ValueError, KeyError, TypeError):
        told = "which has not said yet who it is"
    return (
        f"The data directory {data_dir} is held by another master ({told}). Stop that one first, or give this one a "
        "directory of its own (--data-dir)."
    )


def prepare(data_dir: Path, address: str) -> DirectoryLock:
    """Makes the directory if need be, takes the lock and makes sure that there is a whole file of our schema."""
    path = data_dir / DATABASE_NAME
    try:
        make_directory(data_dir)
        lock = DirectoryLock(data_dir, address)
    except OSError as error:
        raise explain(error, path) from error
    try:
        if path.exists():
            check_header(path)
            _check_contents(path)
        else:
            _check_remains(path)
            _create(path)
    except (OSError, sqlite3.Error) as error:
        lock.release()
        raise explain(error, path) from error
    except JournalError:
        lock.release()
        raise
    return lock


def make_directory(data_dir: Path) -> None:
    """Makes it if need be, so that it is there after a loss of power, too: a new name is its parent's to remember."""
    parents = [data_dir.parent, *(p.parent for p in data_dir.parents if not p.exists())]
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    for parent in parents:  # also if it was there: whoever made it may have been killed before this
        with contextlib.suppress(PermissionError):  # then it isn't new either
            journal_segments.sync_directory(parent)


def _has_log(path: Path) -> bool:
    """With a log the file by itself means nothing: what was being copied from the log into it may be torn."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def check_header(path: Path) -> None:
    with path.open("rb") as file:
        header = file.read(100)
    logged = _has_log(path)
    if len(header) < 100 or not (logged or header.startswith(b"SQLite format 3\x00")):
        raise _damaged(path, _NO_DATABASE)
    if logged:
        return
    _check_identity(path, int.from_bytes(header[68:72], "big"), int.from_bytes(header[60:64], "big"))


def _check_identity(path: Path, application_id: int, version: int) -> None:
    if application_id != APPLICATION_ID:
        raise JournalError(f"{path} is an SQLite database, but not a journal of multigpu. Give another --data-dir.")
    if version > SCHEMA_VERSION:
        raise JournalError(
            f"The journal {path} has schema version {version}; this multigpu knows versions up to {SCHEMA_VERSION}. "
            "Start the newer multigpu that wrote it, or give another --data-dir. Nothing was changed."
        )
    if version < journal_migrations.OLDEST_VERSION:
        raise _damaged(path, f"it has schema version {version}")


def _check_contents(path: Path) -> None:
    """Looks for damage through a connection that can't write, and leaves no trace: a file is as it was if rejected."""
    beside = [path.with_name(DATABASE_NAME + suffix) for suffix in ("-wal", "-shm")]
    absent = [file for file in beside if not file.exists()]
    # Without a log the file can be read as it lies; with one, SQLite needs the log's index, which it may have to build.
    mode = "mode=ro" if _has_log(path) else "mode=ro&immutable=1"
    with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as connection:
        whole = path.stat().st_size <= QUICK_CHECK_BYTES_MAX
        scopes = ("1",) if whole else ("'task'", "'setting'", "'dead_letter'")
        try:
            # Again: a newer multigpu that was killed may have said it in the log only.
            told = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
            _check_identity(path, *told)
            if log_missing(path, connection):
                raise _missing_log(path)
            if beside[0].exists() and (what := journal_log.damage(beside[0], beside[1], PAGE_BYTES)):
                raise damaged_log(path, what)
            verdicts = [connection.execute(f"PRAGMA quick_check({scope})").fetchone()[0] for scope in scopes]
            connection.execute(f"SELECT {TASK_COLUMNS} FROM task LIMIT 1").fetchall()
        finally:
            connection.close()
            for file in absent:
                file.unlink(missing_ok=True)
    for verdict in verdicts:
        if verdict != "ok":
            raise _damaged(path, verdict.replace("\n", " "))


def _check_remains(path: Path) -> None:
    """What belongs to a database that is gone would be read as the new one's, or deleted."""
    if path.with_name(PART_NAME).exists():
        raise JournalError(
            f"{path.parent} is no journal, but a backup that was broken off ({PART_NAME}). Restore another one."
        )
    segments = path.parent / journal_segments.DIRECTORY_NAME
    remains = [path.name + "-wal"] if _has_log(path) else []
    remains += [f"{segments.name}/"] if segments.is_dir() and any(segments.iterdir()) else []
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
        connection.executescript(f"BEGIN; {_SCHEMA} COMMIT;")
        _keep_log(connection)
    aside.rename(path)
    journal_segments.sync_directory(path.parent)


def secure_log(path: Path) -> None:
    """Writes the log again as it reads, down to the disk. To be done before a connection is opened that writes.

    What is read may be in the kernel's memory only: after an fsync that failed, the kernel takes for written what was
    not, and no later fsync writes it. The last master ended for that, perhaps; behind such a gap nothing that we add
    would be found after a loss of power, and what is copied from there into the database would be half a transaction.
    """
    if not _has_log(path):
        return
    fd = os.open(path.with_name(path.name + "-wal"), os.O_RDWR | os.O_CLOEXEC)
    try:
        at = 0
        while data := os.pread(fd, 1 << 20, at):
            at += os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def _keep_log(connection: sqlite3.Connection) -> None:
    """Commits go to a write-ahead log. SQLite says in its answer if they won't: an error of the disk is not raised."""
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log could be begun; the mode stayed {mode!r}")


def connect_writer(path: Path) -> sqlite3.Connection:
    """The one connection that writes. Autocommit: transactions are begun and ended in so many words."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=128, timeout=BUSY_TIMEOUT_S
    )
    _keep_log(connection)
    for pragma in (
        "synchronous = FULL",
        "secure_delete = OFF",  # some builds overwrite what is deleted by default
        "temp_store = MEMORY",
        "cache_size = -32768",
        f"wal_autocheckpoint = {WAL_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def close_writer(path: Path, writer: sqlite3.Connection) -> None:
    """Closes the journal: the log is copied into the database and deleted. On a full disk both stay as they are."""
    try:
        clear_open_flag(writer)
    except sqlite3.OperationalError:
        close_keeping_log(path, writer)
    else:
        writer.close()


def clear_open_flag(writer: sqlite3.Connection) -> None:
    """From now on the log may be missing once its content is in the database."""
    writer.execute("DELETE FROM setting WHERE key = ?", (SETTING_OPEN,))


def close_keeping_log(path: Path, writer: sqlite3.Connection) -> None:
    """Closes the writer but not the journal: a last connection that may write would copy the log into the database and
    delete it. If no other connection can be opened, the writer stays open until the process ends.
    """
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect_reader(path)) as reader:
        reader.execute("SELECT count(*) FROM sqlite_master").fetchall()  # holds the file from now on
        writer.close()


def migrate(writer: sqlite3.Connection) -> None:
    """Brings the database to the current schema, in one transaction. An error of SQLite changes nothing."""
    ((version,),) = writer.execute("PRAGMA user_version").fetchall()
    if version == SCHEMA_VERSION:
        return
    writer.execute("BEGIN IMMEDIATE")
    try:
        for statement in journal_migrations.statements(version, SCHEMA_VERSION):
            writer.execute(statement)
        writer.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        writer.execute("COMMIT")
    except sqlite3.Error:
        writer.execute("ROLLBACK")
        raise


def empty_log(writer: sqlite3.Connection) -> None:
    """Copies the log into the database and gives its room back, as far as nobody reads it just now."""
    writer.execute("PRAGMA busy_timeout = 100").fetchall()
    try:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        writer.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}").fetchall()


PAGES_MAX = 0xFFFFFFFE  # of SQLite


def limit_size(writer: sqlite3.Connection, size_max_bytes: int, log_bytes: int, log_keep_bytes: int) -> None:
    """Lets the database grow to that, and not further: commits fail then for lack of room. A log of more than
    `log_bytes` is copied into the database at once, and its file is cut to `log_keep_bytes` then.
    """
    writer.execute(f"PRAGMA journal_size_limit = {min(log_keep_bytes, WAL_KEEP_BYTES)}").fetchall()
    writer.execute(f"PRAGMA wal_autocheckpoint = {max(min(log_bytes // PAGE_BYTES, WAL_PAGES), 1)}").fetchall()
    writer.execute(f"PRAGMA max_page_count = {min(max(size_max_bytes // PAGE_BYTES, 1), PAGES_MAX)}").fetchall()


def used_bytes(writer: sqlite3.Connection) -> int:
    """What the database holds, less its empty pages, which are used before it grows."""
    ((pages,),) = writer.execute("PRAGMA page_count").fetchall()
    ((empty_pages,),) = writer.execute("PRAGMA freelist_count").fetchall()
    return int((pages - empty_pages) * PAGE_BYTES)


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads, for any one thread at a time."""
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=BUSY_TIMEOUT_S,
    )
    connection.execute("PRAGMA query_only = ON")
    return connection


def begin_incarnation(
    writer: sqlite3.Connection, now_s: float, last_cursor: int
) -> tuple[int, list[ids.Incarnation], bytes]:
    """Begins the life of a master, durably. Returns its epoch, the incarnations (itself is the last of them), and the
    key of its leases' proofs.
    """
    ((last,),) = writer.execute("SELECT value FROM setting WHERE key = ?", (SETTING_EPOCH,)).fetchall()
    epoch = ids.next_epoch(int(last), now_s)
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("UPDATE setting SET value = ? WHERE key = ?", (epoch, SETTING_EPOCH))
    begun = ids.Incarnation(ids.new_name(), ids.first_id(epoch, now_s), last_cursor + 1)
    writer.execute("INSERT INTO incarnation VALUES (?, ?, ?)", (begun.first_id, begun.name, begun.first_cursor))
    kept = "SELECT first_id FROM incarnation ORDER BY first_id DESC LIMIT ?"
    writer.execute(f"DELETE FROM incarnation WHERE first_id NOT IN ({kept})", (ids.INCARNATIONS_MAX,))
    rows = writer.execute("SELECT name, first_id, first_cursor FROM incarnation ORDER BY first_id").fetchall()
    key = secrets.token_bytes(ids.LEASE_KEY_BYTES)
    writer.execute("INSERT OR IGNORE INTO setting VALUES (?, ?)", (SETTING_LEASE_KEY, key))
    writer.execute("INSERT OR REPLACE INTO setting VALUES (?, ?)", (SETTING_OPEN, begun.name))
    ((key,),) = writer.execute("SELECT value FROM setting WHERE key = ?", (SETTING_LEASE_KEY,)).fetchall()
    writer.execute("COMMIT")
    return epoch, [ids.Incarnation(*row) for row in rows], key


def read_settings(connection: sqlite3.Connection) -> dict[str, bytes]:
    rows: Iterator[tuple[str, bytes]] = connection.execute("SELECT key, value FROM setting")
    return {key: value for key, value in rows if key not in _PRIVATE_SETTINGS}
