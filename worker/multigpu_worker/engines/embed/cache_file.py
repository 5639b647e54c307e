"""The embedding cache's file: vectors that outlive the engine, one SQLite table that the workers of a host share.

Writing is nobody's wait: a thread takes whatever piled up while it wrote last. What an engine that is killed had not
written yet is computed again. The file may lie, and is never believed blindly: each row has a checksum. A file that is
damaged is moved aside, with a warning, and a new one begun, and so is one that was moved or deleted; a database that
another program made is rejected. A disk that is full or fails costs a warning and what could have been remembered, and
no task: whatever can't be opened or written now is tried again with what is written next.

Rows leave in the order in which they came. WAL mode needs a local disk.
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
# Ten vectors of 384 fill such a page; of SQLite's usual ones each would leave a quarter empty.
PAGE_BYTES = 16_384
# Another worker writes for milliseconds.
BUSY_S = 5.0
LOCK_POLL_S = 0.01
KEYS_IN_A_QUERY = 500
# Rows that wait to be written; what comes past them is not.
BACKLOG_MAX = 65_536
# Of rows whose time is over, so many go with each write.
EXPIRED_AT_ONCE = 2_000
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

log = structlog.get_logger(__name__)


class CacheFileError(ValueError):
    """The file can't be used. The message says why, and what to change."""


class Row(NamedTuple):
    key: bytes
    # When it was computed, in seconds since 1970.
    stored_s: float
    vector: bytes


class _DamagedError(Exception):
    """What the file says is not what was written."""


class _FormatError(Exception):
    """Another version of this program made the file."""


# What may go wrong with a file, and is no reason to fail. sqlite3 raises MemoryError too.
TROUBLE = (sqlite3.Error, OSError, MemoryError, CacheFileError, _DamagedError, _FormatError)


class CacheFile:
    def __init__(self, path: Path, *, entries: int, bytes_max: int, ttl_s: float) -> None:
        """Open the file, or begin one. Where it can't be had, that is told and tried again."""
        self._path = path
        self._entries = entries
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # Which file of this name it is: one more each time that it is opened anew.
        self._life = 0
        self._inode = 0
        # What is wrong with the file and not yet put aside.
        self._damage: Exception | None = None
        self._reader: sqlite3.Connection | None = None
        self._writer: sqlite3.Connection | None = None
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        # Why vectors are not kept; empty: they are.
        self.trouble = ""
        self._queue: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._written = threading.Condition()
        try:
            self._connect()
        except _FormatError as error:
            # Put aside now and never later: two versions that share a file would do it in turn.
            self._failed(_DamagedError(str(error)), 0)
        except TROUBLE as error:
            self._failed(error, 0)
        self._thread = threading.Thread(target=self._write_on, name="embedding cache", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes]) -> list[Row]:
        """The rows of those keys that are there. In no order, and perhaps too old."""
        found: list[Row] = []
        life = self._life
        try:
            with self._read_lock:
                if self._reader is not None:
                    for at in range(0, len(keys), KEYS_IN_A_QUERY):
                        found += _select(self._reader, keys[at : at + KEYS_IN_A_QUERY])
        except TROUBLE as error:
            self._failed(error, life)
            return []
        return found

    def put(self, rows: list[Row]) -> None:
        """Have rows written soon."""
        with self._written:
            if self._waiting + len(rows) > BACKLOG_MAX:
                return
            self._waiting += len(rows)
        self._queue.put(rows)

    def flush(self, timeout_s: float = 30.0) -> bool:
        """Wait until what was put is written, or has failed to be. False: it took too long."""
        with self._written:
            return self._written.wait_for(lambda: self._waiting == 0, timeout_s)

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        self._queue.put(None)
        self._thread.join()
        with self._read_lock, self._write_lock:
            self._disconnect()

    def _write_on(self) -> None:
        while (first := self._queue.get()) is not None:
            rows = [*first]
            with contextlib.suppress(queue.Empty):
                while (more := self._queue.get_nowait()) is not None:
                    rows += more
                self._queue.put(None)  # to be seen after this write
            self._keep(rows)
            with self._written:
                self._waiting -= len(rows)
                self._written.notify_all()

    def _keep(self, rows: list[Row]) -> None:
        life = self._life
        try:
            if self._writer is None or self._is_gone():
                self._renew(life, self._damage)
                life = self._life
            with self._write_lock:
                if self._writer is None:
                    return  # the thread that reads could not open it anew, and has said so
                self._write(self._writer, rows)
        except TROUBLE as error:
            self._failed(error, life)
        else:
            self._recovered()

    def _write(self, db: sqlite3.Connection, rows: list[Row]) -> None:
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
        """Keep to the limits. Rows are numbered as they come, so the first are the oldest. They are not counted, which
        would take as long as there are many: a number that is missing, since its key came again, counts as a row.
        """
        if self._ttl_s:
            # Either way: the clock may have been set back.
            now_s = time.time()
            oldest = "SELECT rowid FROM vectors ORDER BY rowid LIMIT ?"
            query = f"DELETE FROM vectors WHERE rowid IN ({oldest}) AND stored_s NOT BETWEEN ? AND ?"  # noqa: S608  no input
            db.execute(query, (EXPIRED_AT_ONCE, now_s - self._ttl_s, now_s + self._ttl_s))
        first, last = (_number(db, f"SELECT ifnull({which}(rowid), 0) FROM vectors") for which in ("min", "max"))  # noqa: S608
        rows = keep = last - first + 1
        used_bytes = PAGE_BYTES * (_number(db, "PRAGMA page_count") - _number(db, "PRAGMA freelist_count"))
        if used_bytes > self._bytes_max:
            # Rows of one model are alike: as large a share of them goes as has to.
            keep = rows * self._bytes_max // used_bytes
        if rows > min(keep, self._entries):
            db.execute("DELETE FROM vectors WHERE rowid <= ?", (last - min(keep, self._entries),))

    def _connect(self) -> None:
        with _locked(self._path):
            _begin_file(self._path)
            self._inode = self._path.stat().st_ino
            with contextlib.ExitStack() as opened:
                writer = opened.enter_context(contextlib.closing(_open(self._path)))
                _begin(writer)
                reader = opened.enter_context(contextlib.closing(_open(self._path)))
                opened.pop_all()
        self._writer, self._reader = writer, reader

    def _disconnect(self) -> None:
        for db in (self._reader, self._writer):
            if db is not None:
                db.close()
        self._reader = self._writer = None

    def _is_gone(self) -> bool:
        """Another file has its name, or none has."""
        try:
            return self._path.stat().st_ino != self._inode
        except FileNotFoundError:
            return True

    def _failed(self, error: Exception, life: int) -> None:
        if not _is_damage(error):
            self._complain(error)
            return
        try:
            self._renew(life, error)
        except TROUBLE as another:
            self._complain(another)

    def _renew(self, life: int, damage: Exception | None) -> None:
        """Open the file of this name, or begin one, after a damaged one was put aside; unless somebody has done so."""
        aside = self._path.with_name(self._path.name + ".damaged")
        with self._read_lock, self._write_lock:
            if life != self._life:
                return
            self._disconnect()
            self._damage = damage
            if damage is not None:
                self._put_aside(aside)
                self._damage = None
            self._connect()
            self._life += 1
        if damage is not None:
            log.warning(
                "the embedding cache's file was damaged: a new one is begun",
                file=str(self._path),
                moved_to=str(aside),
                problem=str(damage),
            )

    def _put_aside(self, aside: Path) -> None:
        """Unless another process has, and this is another file."""
        with _locked(self._path), contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_ino == self._inode:
                self._path.replace(aside)
                for suffix in ("-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)

    def _complain(self, error: Exception) -> None:
        problem = str(error) or type(error).__name__
        if problem != self.trouble:
            self.trouble = problem
            log.warning("the embedding cache's file fails: vectors are not kept", file=str(self._path), problem=problem)

    def _recovered(self) -> None:
        if self.trouble:
            self.trouble = ""
            log.info("the embedding cache's file works again", file=str(self._path))


def check_cache_file(path: Path) -> None:
    """Raises CacheFileError where a cache's file can't be had: before there is anything to write."""
    if not path.parent.is_dir():
        raise CacheFileError(f"embedding_cache_file is {path}, and {path.parent} is no folder: make it, or correct it")
    file = CacheFile(path, entries=1 << 62, bytes_max=1 << 62, ttl_s=0)
    file.close()
    if file.trouble:
        raise CacheFileError(
            f"embedding_cache_file is {path}, which can't be opened ({file.trouble}): name a file that can be written"
        )


def _begin_file(path: Path) -> None:
    # Others on the host need not know which texts were embedded here. A file that is there is left closed: to close it
    # would take away the locks that this process has on it.
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    if not os.access(path, os.R_OK | os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def _open(path: Path) -> sqlite3.Connection:
    # Each connection is used under a lock of its own.
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        db.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        # After a loss of power the newest rows may be gone.
        db.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        db.close()
        raise
    return db


def _begin(db: sqlite3.Connection) -> None:
    """Look whose database this is, and make the table if it is nobody's."""
    tables = _number(db, "SELECT count(*) FROM sqlite_master")
    owner, version = _number(db, "PRAGMA application_id"), _number(db, "PRAGMA user_version")
    if tables and owner != APPLICATION_ID:
        raise CacheFileError("it is another program's database")
    if tables and version != FORMAT:
        raise _FormatError(f"its format is {version}, this version's is {FORMAT}")
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
    query = f"SELECT key, stored_s, checksum, vector FROM vectors WHERE key IN ({marks})"  # noqa: S608  marks alone
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
    # The last eight bits are the class of the code.
    return isinstance(error, _DamagedError) or (getattr(error, "sqlite_errorcode", 0) & 0xFF) in DAMAGED


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time begins the file or puts it aside."""
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end_s = time.monotonic() + BUSY_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # It takes milliseconds, unless that process was stopped.
                if time.monotonic() >= end_s:
                    raise TimeoutError(f"another process has held {path}.lock for {BUSY_S:g} s") from None
                time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(fd)
