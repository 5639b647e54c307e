"""The embedding cache's file: one SQLite table of vectors that the workers of a host share and that survives restarts.

A thread writes what was queued during its last write; vectors that were not written when the engine is killed are
computed again. Each row has a checksum. A damaged file is moved aside with a warning and a new one begun, also if the
file was moved or deleted; a database of another program or format is rejected. A full disk, or a file that cannot be
opened, costs a warning and no task, and is tried again at the next write.

Rows are evicted in the order in which they were written. WAL mode needs a local disk.
"""

import contextlib
import errno
import fcntl
import os
import queue
import sqlite3
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import structlog

APPLICATION_ID = 0x6D677665  # "mgve"
FORMAT = 1
# Holds ten vectors of 384. Default pages would be a quarter empty.
PAGE_BYTES = 16_384
# Other workers write for milliseconds.
BUSY_S = 5.0
LOCK_POLL_S = 0.01
KEYS_PER_QUERY = 500
# Queued rows; further rows are dropped.
BACKLOG_MAX = 65_536
# Expired rows that are deleted with each write.
EXPIRED_PER_WRITE = 2_000
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = structlog.get_logger(__name__)


class CacheFileError(ValueError):
    """The file cannot be used. The message says why, and what to change."""


class Row(NamedTuple):
    key: bytes
    # Time of computation, in seconds since 1970.
    stored_s: float
    vector: bytes


class _DamagedError(Exception):
    """The file does not hold what was written."""


# Errors of the file that do not fail a task. sqlite3 raises MemoryError too.
TROUBLE = (sqlite3.Error, OSError, MemoryError, CacheFileError, _DamagedError)


class CacheFile:
    """Any thread may call it. One thread, started here, opens, writes and replaces the file."""

    def __init__(self, path: Path, *, entries: int, bytes_max: int, ttl_s: float) -> None:
        """Open or create the file. If that fails, `trouble` says why, and the next write tries again."""
        self._path = path
        self._entries = entries
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        self._inode = 0
        # Why the file has to be moved aside before it is opened again.
        self._damage: Exception | None = None
        # Guards the reading connection, the damage and the number of queued rows.
        self._lock = threading.Lock()
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        # Why vectors are not kept. Empty: they are.
        self.trouble = ""
        self._queue: queue.SimpleQueue[list[Row] | threading.Event | None] = queue.SimpleQueue()
        self._queued = 0
        try:
            self._open()
        except TROUBLE as error:
            self._fail(error)
        self._thread = threading.Thread(target=self._run, name="embedding cache", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes]) -> list[Row]:
        """The rows of these keys, in no order, perhaps expired."""
        with self._lock:
            if self._reader is None:
                return []
            try:
                starts = range(0, len(keys), KEYS_PER_QUERY)
                return [row for at in starts for row in _select(self._reader, keys[at : at + KEYS_PER_QUERY])]
            except TROUBLE as error:
                if not _is_damage(error):
                    self._warn(error)
                    return []
                self._damage = error
                self._reader.close()
                self._reader = None
        # Wakes the thread that replaces the file.
        self._queue.put([])
        return []

    def put(self, rows: list[Row]) -> None:
        """Queue rows to be written."""
        with self._lock:
            if self._queued + len(rows) > BACKLOG_MAX:
                return
            self._queued += len(rows)
        self._queue.put(rows)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until all queued rows are written or have failed to be. False: timed out."""
        reached = threading.Event()
        self._queue.put(reached)
        return reached.wait(timeout_s)

    def close(self) -> None:
        """Write the queued rows and close the file."""
        self._queue.put(None)
        self._thread.join()
        self._disconnect()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            rows = [*item]
            with contextlib.suppress(queue.Empty):
                while isinstance(more := self._queue.get_nowait(), list):
                    rows += more
                self._queue.put(more)  # an event, or the end: after this write
            self._write(rows)
            with self._lock:
                self._queued -= len(rows)

    def _write(self, rows: list[Row]) -> None:
        try:
            if self._writer is None or self._damage is not None or self._is_gone():
                self._reopen()
            if rows and self._writer is not None:
                self._insert(self._writer, rows)
        except TROUBLE as error:
            self._fail(error)
        else:
            if self.trouble:
                self.trouble = ""
                log.info("the embedding cache's file works again", file=str(self._path))

    def _insert(self, db: sqlite3.Connection, rows: list[Row]) -> None:
        db.execute("BEGIN IMMEDIATE")
        try:
            db.executemany(
                "INSERT OR REPLACE INTO vectors (key, stored_s, checksum, vector) VALUES (?, ?, ?, ?)",
                [(row.key, row.stored_s, _checksum(row), row.vector) for row in rows],
            )
            self._prune(db)
            db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                db.execute("ROLLBACK")
            raise

    def _prune(self, db: sqlite3.Connection) -> None:
        """Delete the oldest rows past the limits.

        Row ids increase, so the lowest are the oldest. Counting rows would take time in proportion to their number, so
        the range of ids counts, including those of rows that were replaced.
        """
        if self._ttl_s:
            # In either direction: the clock may have been set back.
            now_s = time.time()
            oldest = "SELECT rowid FROM vectors ORDER BY rowid LIMIT ?"
            query = f"DELETE FROM vectors WHERE rowid IN ({oldest}) AND stored_s NOT BETWEEN ? AND ?"  # noqa: S608  no input
            db.execute(query, (EXPIRED_PER_WRITE, now_s - self._ttl_s, now_s + self._ttl_s))
        first, last = (_number(db, f"SELECT ifnull({which}(rowid), 0) FROM vectors") for which in ("min", "max"))  # noqa: S608
        rows = keep = last - first + 1
        used_bytes = PAGE_BYTES * (_number(db, "PRAGMA page_count") - _number(db, "PRAGMA freelist_count"))
        if used_bytes > self._bytes_max:
            # Rows of one model have one size, so the share of rows is the share of bytes.
            keep = rows * self._bytes_max // used_bytes
        if rows > min(keep, self._entries):
            db.execute("DELETE FROM vectors WHERE rowid <= ?", (last - min(keep, self._entries),))

    def _open(self) -> None:
        with _locked(self._path):
            _create(self._path)
            self._inode = self._path.stat().st_ino
            with contextlib.ExitStack() as opened:
                writer = opened.enter_context(contextlib.closing(_connect(self._path)))
                _initialise(writer)
                reader = opened.enter_context(contextlib.closing(_connect(self._path)))
                opened.pop_all()
        self._writer = writer
        with self._lock:
            self._reader = reader

    def _disconnect(self) -> None:
        with self._lock:
            for db in (self._reader, self._writer):
                if db is not None:
                    db.close()
            self._reader = self._writer = None

    def _is_gone(self) -> bool:
        """Whether the file was deleted or replaced by another one."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _fail(self, error: Exception) -> None:
        if _is_damage(error):
            self._damage = error
            try:
                self._reopen()
            except TROUBLE as another:
                error = another
            else:
                return
        self._warn(error)

    def _reopen(self) -> None:
        """Open the file of this name or create one, after moving a damaged one aside."""
        self._disconnect()
        damage, aside = self._damage, self._path.with_name(self._path.name + ".damaged")
        if damage is not None:
            self._move_aside(aside)
            self._damage = None
        self._open()
        if damage is not None:
            log.warning(
                "the embedding cache's file was damaged: a new one is begun",
                file=str(self._path),
                moved_to=str(aside),
                problem=str(damage),
            )

    def _move_aside(self, aside: Path) -> None:
        """Unless another process has done so and this is a new file."""
        with _locked(self._path), contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.replace(aside)
                for suffix in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _warn(self, error: Exception) -> None:
        problem = str(error) or type(error).__name__
        if problem != self.trouble:
            self.trouble = problem
            log.warning("the embedding cache's file fails: vectors are not kept", file=str(self._path), problem=problem)


def check_cache_file(path: Path) -> None:
    """Raises CacheFileError if the file cannot be used, before there is anything to write."""
    if not path.parent.is_dir():
        raise CacheFileError(f"embedding_cache_file is {path}, and {path.parent} is no folder: make it, or correct it")
    file = CacheFile(path, entries=1 << 62, bytes_max=1 << 62, ttl_s=0)
    file.close()
    if file.trouble:
        raise CacheFileError(
            f"embedding_cache_file is {path}, which can't be opened ({file.trouble}): name a file that can be written"
        )


def _create(path: Path) -> None:
    # Readable by its user only: keys tell which texts were embedded. An existing file must not be opened here: closing
    # it would release this process's SQLite locks on it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if not os.access(path, os.R_OK | os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # A power loss may cost the newest rows.
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db


def _initialise(db: sqlite3.Connection) -> None:
    """Check whose database it is, and create the table in a new one."""
    tables = _number(db, "SELECT count(*) FROM sqlite_master")
    owner, version = _number(db, "PRAGMA application_id"), _number(db, "PRAGMA user_version")
    if tables and owner != APPLICATION_ID:
        raise CacheFileError("it is another program's database")
    if tables and version != FORMAT:
        raise CacheFileError(f"another version made it, in format {version}, and this one's is {FORMAT}: delete it")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA journal_size_limit = 4194304")
    if not tables:
        db.executescript(
            "BEGIN IMMEDIATE;"
            "CREATE TABLE vectors (key BLOB NOT NULL UNIQUE, stored_s REAL NOT NULL, checksum INTEGER NOT NULL, "
            "vector BLOB NOT NULL);"
            f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
            "COMMIT"
        )


def _select(db: sqlite3.Connection, keys: Sequence[bytes]) -> Iterator[Row]:
    marks = ",".join("?" * len(keys))
    query = f"SELECT key, stored_s, checksum, vector FROM vectors WHERE key IN ({marks})"  # noqa: S608  marks only
    for key, stored_s, checksum, vector in db.execute(query, keys):
        row = Row(key, stored_s, vector)
        if not (type(stored_s) is float and type(vector) is bytes) or _checksum(row) != checksum:
            raise _DamagedError("a row's checksum is wrong")
        yield row


def _checksum(row: Row) -> int:
    return zlib.crc32(row.vector, zlib.crc32(row.key + struct.pack("<d", row.stored_s)))


def _number(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _is_damage(error: Exception) -> bool:
    # The low eight bits are the primary result code.
    return isinstance(error, _DamagedError) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGED


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time create the file or move it aside."""
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end_s = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Milliseconds, unless that process is stopped.
                if time.monotonic() >= end_s:
                    raise TimeoutError(f"another process has held {path}.lock for {BUSY_S:g} s") from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
