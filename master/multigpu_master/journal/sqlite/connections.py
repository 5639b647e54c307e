"""Connections to the journal's database: one that writes, any number that read; and its log."""

# statements are put together from this package's constants; values are always bound

import contextlib
import os
import sqlite3
from pathlib import Path

from multigpu_master.journal.sqlite.schema import BUSY_TIMEOUT_S, PAGE_BYTES, clear_open_flag

WAL_PAGES = (8 << 20) // PAGE_BYTES  # how much log is gathered before it is copied into the database
WAL_KEEP_BYTES = 64 << 20


def has_log(path: Path) -> bool:
    """Whether there is a log. The database alone means nothing then: a copy of the log into it may be incomplete."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def secure_log(path: Path) -> None:
    """Writes the log again as it reads, down to the disk. To be done before a connection is opened that writes.

    What is read may be in the kernel's memory only: after an fsync that failed, the kernel takes for written what was
    not, and no later fsync writes it. The last master ended for that, perhaps; behind such a gap nothing that we add
    would be found after a loss of power, and what is copied from there into the database would be half a transaction.
    """
    if not has_log(path):
        return
    fd = os.open(path.with_name(path.name + "-wal"), os.O_RDWR | os.O_CLOEXEC)
    try:
        at = 0
        while data := os.pread(fd, 1 << 20, at):
            at += os.pwrite(fd, data, at)
        os.fsync(fd)
    finally:
        os.close(fd)


def keep_log(connection: sqlite3.Connection) -> None:
    """Commits go to a write-ahead log. SQLite says in its answer if they won't: an error of the disk is not raised."""
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise sqlite3.OperationalError(f"no write-ahead log could be begun; the mode stayed {mode!r}")


def connect_writer(path: Path) -> sqlite3.Connection:
    """The one connection that writes. Autocommit: transactions are begun and ended in so many words."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=128, timeout=BUSY_TIMEOUT_S
    )
    keep_log(connection)
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


def close_keeping_log(path: Path, writer: sqlite3.Connection) -> None:
    """Closes the writer but not the journal: a last connection that may write would copy the log into the database and
    delete it. If no other connection can be opened, the writer stays open until the process ends.
    """
    with contextlib.suppress(sqlite3.Error), contextlib.closing(connect_reader(path)) as reader:
        reader.execute("SELECT count(*) FROM sqlite_master").fetchall()  # holds the file from now on
        writer.close()


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


def empty_log(writer: sqlite3.Connection) -> None:
    """Copies the log into the database and gives its room back, as far as nobody reads it just now."""
    writer.execute("PRAGMA busy_timeout = 100").fetchall()
    try:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        writer.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}").fetchall()


def limit_log(writer: sqlite3.Connection, log_bytes: int, log_keep_bytes: int) -> None:
    """A log of more than `log_bytes` is copied into the database at once, and its file is cut to `log_keep_bytes`."""
    writer.execute(f"PRAGMA journal_size_limit = {min(log_keep_bytes, WAL_KEEP_BYTES)}").fetchall()
    writer.execute(f"PRAGMA wal_autocheckpoint = {max(min(log_bytes // PAGE_BYTES, WAL_PAGES), 1)}").fetchall()


def used_bytes(writer: sqlite3.Connection) -> int:
    """What the database holds, less its empty pages, which are used before it grows."""
    ((pages,),) = writer.execute("PRAGMA page_count").fetchall()
    ((empty_pages,),) = writer.execute("PRAGMA freelist_count").fetchall()
    return int((pages - empty_pages) * PAGE_BYTES)
