"""The embedding cache's file: one SQLite table of vectors that the engines of a host share and that survives restarts.

SQLite's locks order the processes (WAL, so a local disk). It does not notice every changed bit, so each row has a
checksum. A damaged file is deleted with a warning, and a new one begun; another process that has the old one open
shares nothing until it finds the damage or restarts. Rows are evicted in the order in which they were written.
"""

import contextlib
import os
import sqlite3
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import structlog

from multigpu_worker.engines.base import EmbeddingCacheSettings

# Bytes 60 to 72 of the file: format 1, no incremental vacuum, and the application's id, "mgve".
FORMAT, APPLICATION_ID = 1, 0x6D677665
IDENTITY = struct.pack(">III", FORMAT, 0, APPLICATION_ID)
# Holds ten vectors of 384. Default pages would be a quarter empty.
PAGE_BYTES = 16_384
# How long a query waits for other processes, which write for milliseconds.
BUSY_S = 1.0
KEYS_PER_QUERY = 500
# Expired rows that are deleted with each write.
EXPIRED_PER_WRITE = 2_000

T = TypeVar("T")

log = structlog.get_logger(__name__)


class CacheFileError(ValueError):
    """The file cannot be used. The message says why, and what to change."""


class _DamagedError(Exception):
    """A row is not what was written."""


# Errors of the file that do not fail a task. sqlite3 raises MemoryError too.
TROUBLE = (sqlite3.Error, OSError, MemoryError, CacheFileError, _DamagedError)


class Row(NamedTuple):
    key: bytes
    # Time of computation, in seconds since 1970.
    stored_s: float
    vector: bytes


class CacheFile:
    """Any thread may call it. Errors are logged: what cannot be read is not found, what cannot be written is lost."""

    def __init__(self, settings: EmbeddingCacheSettings) -> None:
        """The file is opened, or created, when it is first used."""
        self._settings = settings
        self._path = Path(settings.file)
        self._lock = threading.Lock()
        self._db: sqlite3.Connection | None = None
        # The last problem that was logged. Empty: the last use had none.
        self._problem = ""

    def find(self, keys: Sequence[bytes]) -> list[Row]:
        """The rows of these keys, in no order, perhaps expired."""
        return self._use(lambda db: _select(db, keys)) or []

    def put(self, rows: Sequence[Row]) -> None:
        self._use(lambda db: _insert(db, rows, self._settings))

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _use(self, action: Callable[[sqlite3.Connection], T]) -> T | None:
        """None: it failed."""
        with self._lock:
            try:
                self._db = self._db or _open(self._path)
                result = action(self._db)
            except TROUBLE as error:
                self._handle(error)
                return None
            self._problem = ""
            return result

    def _handle(self, error: Exception) -> None:
        """Delete a damaged file; log any other problem, once while it lasts."""
        if _is_damage(error):
            self._disconnect()
            try:
                for suffix in ("", "-wal", "-shm"):
                    self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
            except OSError as another:
                error = another
            else:
                event = "the embedding cache's file was damaged: it is deleted, and a new one begun"
                log.warning(event, file=str(self._path), problem=str(error))
                return
        # Without an OSError's file, which may have a random name.
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if problem != self._problem:
            log.warning("the embedding cache's file fails", file=str(self._path), problem=problem)
        self._problem = problem

    def _disconnect(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None


def check_cache_file(path: Path) -> None:
    """Raises CacheFileError if the file cannot be used, before there is anything to write."""
    if not path.parent.is_dir():
        raise CacheFileError(f"embedding_cache_file is {path}, and {path.parent} is no folder: make it, or correct it")
    try:
        _open(path).close()
    except TROUBLE as error:
        if not _is_damage(error):
            raise CacheFileError(
                f"embedding_cache_file is {path}, which can't be opened ({error}): name a file that can be written"
            ) from error


def _open(path: Path) -> sqlite3.Connection:
    """Raises an error of TROUBLE, also if the file can be read but not written."""
    if not path.exists():
        _create(path)
    # SQLite reads no header of a damaged file. This process must not have the file open now: closing any descriptor
    # releases all its locks on a file.
    with path.open("rb") as file:
        if file.read(72)[60:] != IDENTITY:
            raise CacheFileError("it is no embedding cache of this version: delete it, or name another file")
    db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        # A power loss may cost the newest rows.
        db.executescript("PRAGMA synchronous = NORMAL; PRAGMA journal_size_limit = 4194304; BEGIN IMMEDIATE; COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _create(path: Path) -> None:
    """Create an empty database, unless another process is first."""
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
        new = Path(folder) / path.name
        # Readable by its user only: keys tell which texts were embedded.
        new.touch(mode=0o600)
        with contextlib.closing(sqlite3.connect(new, isolation_level=None)) as db:
            db.executescript(
                f"PRAGMA page_size = {PAGE_BYTES}; PRAGMA journal_mode = WAL;"
                f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {FORMAT};"
                "CREATE TABLE vectors (key BLOB NOT NULL UNIQUE, stored_s REAL NOT NULL, checksum INTEGER NOT NULL, "
                "vector BLOB NOT NULL);"
            )
        with contextlib.suppress(FileExistsError):
            os.link(new, path)


def _select(db: sqlite3.Connection, keys: Sequence[bytes]) -> list[Row]:
    rows = []
    for at in range(0, len(keys), KEYS_PER_QUERY):
        some = keys[at : at + KEYS_PER_QUERY]
        marks = ",".join("?" * len(some))
        query = f"SELECT key, stored_s, checksum, vector FROM vectors WHERE key IN ({marks})"  # noqa: S608  marks only
        for key, stored_s, checksum, vector in db.execute(query, some):
            row = Row(key, stored_s, vector)
            if not (type(stored_s) is float and type(vector) is bytes) or _checksum(row) != checksum:
                raise _DamagedError("a row's checksum is wrong")
            rows.append(row)
    return rows


def _insert(db: sqlite3.Connection, rows: Sequence[Row], limits: EmbeddingCacheSettings) -> None:
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.executemany(
            "INSERT OR REPLACE INTO vectors (key, stored_s, checksum, vector) VALUES (?, ?, ?, ?)",
            [(row.key, row.stored_s, _checksum(row), row.vector) for row in rows],
        )
        _prune(db, limits)


def _prune(db: sqlite3.Connection, limits: EmbeddingCacheSettings) -> None:
    """Delete the oldest rows past the limits.

    Row ids increase, so the lowest are the oldest. Counting rows would take time in proportion to their number, so the
    range of ids counts, including those of rows that were replaced.
    """
    if limits.ttl_s:
        # In either direction: the clock may have been set back.
        now_s = time.time()
        oldest = "SELECT rowid FROM vectors ORDER BY rowid LIMIT ?"
        query = f"DELETE FROM vectors WHERE rowid IN ({oldest}) AND stored_s NOT BETWEEN ? AND ?"  # noqa: S608  no input
        db.execute(query, (EXPIRED_PER_WRITE, now_s - limits.ttl_s, now_s + limits.ttl_s))
    first, last = (_number(db, f"SELECT ifnull({which}(rowid), 0) FROM vectors") for which in ("min", "max"))  # noqa: S608
    rows = keep = last - first + 1
    used_bytes = PAGE_BYTES * (_number(db, "PRAGMA page_count") - _number(db, "PRAGMA freelist_count"))
    if used_bytes > limits.bytes_max:
        # Rows of one model have one size, so the share of rows is the share of bytes.
        keep = rows * limits.bytes_max // used_bytes
    if rows > min(keep, limits.entries):
        db.execute("DELETE FROM vectors WHERE rowid <= ?", (last - min(keep, limits.entries),))


def _number(db: sqlite3.Connection, query: str) -> int:
    return int(db.execute(query).fetchone()[0])


def _checksum(row: Row) -> int:
    return zlib.crc32(row.vector, zlib.crc32(row.key + struct.pack("<d", row.stored_s)))


def _is_damage(error: Exception) -> bool:
    # The low eight bits are the primary result code.
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return isinstance(error, _DamagedError) or code == sqlite3.SQLITE_CORRUPT
