"""The embedding cache's file: vectors that outlive the engine, one SQLite table that the workers of a host share.

Writing is nobody's wait: a thread takes whatever piled up while it wrote last. What an engine that is killed had not
written yet is computed again. The file may lie, and is never believed blindly: each row has a checksum. A file that is
damaged is moved aside, with a warning, and a new one begun; a database that another program made is refused. A disk
that is full or fails costs a warning and what could have been remembered, and no task.

Rows leave in the order in which they came. WAL mode needs a local disk.
"""

import contextlib
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


class CacheFile:
    def __init__(self, path: Path, *, entries: int, bytes_max: int, ttl_s: float) -> None:
        """Open the file, or begin one. CacheFileError: it can't be had."""
        self._path = path
        self._entries = entries
        self._bytes_max = bytes_max
        self._ttl_s = ttl_s
        # Which file of this name it is: counts from 0, and one more after each damage.
        self._life = 0
        self._read_lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._trouble = ""
        self._queue: queue.SimpleQueue[list[Row] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._written = threading.Condition()
        try:
            self._connect()
        except (_DamagedError, sqlite3.DatabaseError) as error:
            if not _is_damage(error):
                raise CacheFileError(_cant(path, error)) from error
            self._begin_anew(error, 0)
        except OSError as error:
            raise CacheFileError(_cant(path, error)) from error
        self._thread = threading.Thread(target=self._write_on, name="embedding cache", daemon=True)
        self._thread.start()

    def find(self, keys: Sequence[bytes]) -> list[Row]:
        """The rows of those keys that are there. In no order, and perhaps too old."""
        found: list[Row] = []
        life = self._life
        try:
            with self._read_lock:
                for at in range(0, len(keys), KEYS_IN_A_QUERY):
                    found += _select(self._reader, keys[at : at + KEYS_IN_A_QUERY])
        except (_DamagedError, sqlite3.Error) as error:
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
            self._reader.close()
            self._writer.close()

    def _write_on(self) -> None:
        while (first := self._queue.get()) is not None:
            rows = [*first]
            with contextlib.suppress(queue.Empty):
                while (more := self._queue.get_nowait()) is not None:
                    rows += more
                self._queue.put(None)  # to be seen after this write
            life = self._life
            try:
                with self._write_lock:
                    self._write(rows)
                self._recovered()
            except sqlite3.Error as error:
                self._failed(error, life)
            with self._written:
                self._waiting -= len(rows)
                self._written.notify_all()

    def _write(self, rows: list[Row]) -> None:
        db = self._writer
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
        """Keep to the limits. Rows are numbered as they come, so the first are the oldest."""
        oldest = "SELECT rowid FROM vectors ORDER BY rowid LIMIT ?"
        if self._ttl_s:
            before_s = time.time() - self._ttl_s
            query = f"DELETE FROM vectors WHERE rowid IN ({oldest}) AND stored_s < ?"  # noqa: S608  nothing from outside
            db.execute(query, (EXPIRED_AT_ONCE, before_s))
        rows = _number(db, "SELECT count(*) FROM vectors")
        used_bytes = PAGE_BYTES * (_number(db, "PRAGMA page_count") - _number(db, "PRAGMA freelist_count"))
        too_many = rows - self._entries
        if used_bytes > self._bytes_max:
            # Rows of one model are alike: as large a share of them goes as has to.
            too_many = max(too_many, -(-rows * (used_bytes - self._bytes_max) // used_bytes))
        if too_many > 0:
            db.execute(f"DELETE FROM vectors WHERE rowid IN ({oldest})", (too_many,))  # noqa: S608  as above

    def _connect(self) -> None:
        with _locked(self._path):
            # Others on the host need not know which texts were embedded here.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._inode = self._path.stat().st_ino
            self._writer = _open(self._path)
            try:
                _begin(self._writer, self._path)
                self._reader = _open(self._path)
            except BaseException:
                self._writer.close()
                raise

    def _failed(self, error: Exception, life: int) -> None:
        if _is_damage(error):
            try:
                self._begin_anew(error, life)
            except (CacheFileError, OSError, sqlite3.Error) as another:
                self._complain(another)
        else:
            self._complain(error)

    def _complain(self, error: Exception) -> None:
        if str(error) != self._trouble:
            self._trouble = str(error)
            log.warning(
                "the embedding cache's file fails: vectors are not kept", file=str(self._path), problem=str(error)
            )

    def _recovered(self) -> None:
        if self._trouble:
            self._trouble = ""
            log.info("the embedding cache's file works again", file=str(self._path))

    def _begin_anew(self, error: Exception, life: int) -> None:
        """Move a damaged file aside and begin another, unless somebody has done so already."""
        with self._read_lock, self._write_lock:
            if life != self._life:
                return
            self._life += 1
            aside = self._path.with_name(self._path.name + ".damaged")
            for name in ("_reader", "_writer"):
                if hasattr(self, name):
                    getattr(self, name).close()
            with _locked(self._path), contextlib.suppress(FileNotFoundError):
                if self._path.stat().st_ino == self._inode:
                    self._path.replace(aside)
                    for suffix in ("-wal", "-shm"):
                        self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            self._connect()
        log.warning(
            "the embedding cache's file was damaged: a new one is begun",
            file=str(self._path),
            moved_to=str(aside),
            problem=str(error),
        )


def check_cache_file(path: Path) -> None:
    """Raises CacheFileError where a cache's file can't be had: before there is anything to write."""
    if not path.parent.is_dir():
        raise CacheFileError(f"embedding_cache_file is {path}, and {path.parent} is no folder: make it, or correct it")
    CacheFile(path, entries=1 << 62, bytes_max=1 << 62, ttl_s=0).close()


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


def _begin(db: sqlite3.Connection, path: Path) -> None:
    """Look whose database this is, and make the table if it is nobody's."""
    tables = _number(db, "SELECT count(*) FROM sqlite_master")
    owner, version = _number(db, "PRAGMA application_id"), _number(db, "PRAGMA user_version")
    if tables and owner != APPLICATION_ID:
        raise CacheFileError(f"embedding_cache_file is {path}, which is another program's database: name another file")
    if tables and version != FORMAT:
        raise _DamagedError(f"its format is {version}, this version's is {FORMAT}")
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


def _cant(path: Path, error: Exception) -> str:
    return f"embedding_cache_file is {path}, which can't be opened ({error}): name a file that can be written"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time begins the file or puts it aside."""
    fd = os.open(path.with_name(path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
