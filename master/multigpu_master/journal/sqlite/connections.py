"""Connections to the journal's database, one that writes and any number that read; and its write-ahead log."""

# SQL is built from constants only, and values are bound as parameters, so the f-strings below are safe.

import contextlib
import os
import sqlite3
from pathlib import Path

from multigpu_master.journal.sqlite.schema import BUSY_TIMEOUT_S, PAGE_BYTES, clear_open_flag

# A commit that leaves at least this many pages in the log copies the log into the database.
WAL_PAGES = (8 << 20) // PAGE_BYTES
# Largest size of the log's file after the log was copied: the file is kept, and overwritten.
WAL_KEEP_BYTES = 64 << 20
_left_open: list[sqlite3.Connection] = []  # see close_keeping_log


def has_log(path: Path) -> bool:
    """Whether there is a write-ahead log that is not empty. Then the database file alone may lack some of the pages."""
    log = path.with_name(path.name + "-wal")
    return log.exists() and log.stat().st_size > 0


def rewrite_log(path: Path) -> None:
    """Reads the log, writes the same bytes back, and syncs them. Call it before a connection that writes is opened.

    The last master may have stopped because an fsync failed. After such a failure the kernel marks the data as written
    although it is not on the disk, still returns it to readers, and does not write it at a later fsync. After a loss of
    power, the log would have a gap there. SQLite would ignore all frames after the gap, also those that this master
    adds. If part of a transaction had been copied from the log into the database, its other part could be missing.
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


def enable_wal(connection: sqlite3.Connection) -> None:
    """Turns on the write-ahead log. On a disk error the pragma raises nothing and returns the old mode, so the mode is
    checked. Raises sqlite3.OperationalError if the log could not be turned on.
    """
    ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
    if mode != "wal":
        raise sqlite3.OperationalError(f"the write-ahead log could not be turned on: the mode is still {mode!r}")


def connect_writer(path: Path) -> sqlite3.Connection:
    """Opens the one connection that writes, in autocommit mode: longer transactions need explicit BEGIN and COMMIT."""
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, cached_statements=128, timeout=BUSY_TIMEOUT_S
    )
    enable_wal(connection)
    for pragma in (
        "synchronous = FULL",
        "secure_delete = OFF",  # by default, some builds overwrite deleted data with zeros
        "temp_store = MEMORY",
        "cache_size = -32768",  # in KiB if negative
        f"wal_autocheckpoint = {WAL_PAGES}",
    ):
        connection.execute(f"PRAGMA {pragma}").fetchall()
    return connection


def close_writer(path: Path, writer: sqlite3.Connection) -> None:
    """Closes the writer. SQLite copies the log into the database and deletes the log, unless the disk is full."""
    try:
        clear_open_flag(writer)
    except sqlite3.OperationalError:
        close_keeping_log(path, writer)
    else:
        writer.close()


def close_keeping_log(path: Path, writer: sqlite3.Connection) -> None:
    """Closes the writer, and leaves the log as it is. When the last connection closes, SQLite copies the log into the
    database and deletes it, if that connection may write. So a connection that only reads is opened and closed last.
    If it can't be opened, the writer stays open until the process ends.
    """
    try:
        with contextlib.closing(connect_reader(path)) as reader:
            reader.execute("SELECT count(*) FROM sqlite_master").fetchall()  # now the reader has a lock on the database
            writer.close()
    except sqlite3.Error:
        _left_open.append(writer)  # without a reference Python would close it


def connect_reader(path: Path) -> sqlite3.Connection:
    """Opens a connection that only reads. Any thread may use it, but only one at a time."""
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
    """Copies the log into the database and cuts the log's file to 0 bytes. If a reader still needs the log after 0.1 s,
    copies only a part, and cuts nothing.
    """
    writer.execute("PRAGMA busy_timeout = 100").fetchall()  # in milliseconds
    try:
        writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    finally:
        writer.execute(f"PRAGMA busy_timeout = {int(BUSY_TIMEOUT_S * 1000)}").fetchall()


def limit_log(writer: sqlite3.Connection, log_bytes: int, log_keep_bytes: int) -> None:
    """Sets limits for later commits. The commit by which the log reaches `log_bytes` (at most WAL_PAGES) copies the log
    into the database. Then the log's file is cut to `log_keep_bytes` (at most WAL_KEEP_BYTES) if it is larger.
    """
    writer.execute(f"PRAGMA journal_size_limit = {min(log_keep_bytes, WAL_KEEP_BYTES)}").fetchall()
    writer.execute(f"PRAGMA wal_autocheckpoint = {max(min(log_bytes // PAGE_BYTES, WAL_PAGES), 1)}").fetchall()


def used_bytes(writer: sqlite3.Connection) -> int:
    """Bytes of the database's pages in use. Empty pages are not counted: SQLite fills them before the file grows."""
    ((pages,),) = writer.execute("PRAGMA page_count").fetchall()
    ((empty_pages,),) = writer.execute("PRAGMA freelist_count").fetchall()
    return int((pages - empty_pages) * PAGE_BYTES)
