"""Space for the journal: its size limit, and a reserve for a full disk.

Deletions take space, too: the log grows first, then the database. So a file in the journal's directory reserves some.
On a full disk, the journal releases it for a transaction that empties the journal or for a new master's start, and
takes it again afterwards. Once all of it can be taken, tasks are accepted again.
"""

import contextlib
import errno
import os
import shutil
import sqlite3
from collections import deque
from pathlib import Path

from multigpu.v1 import task_pb2

from multigpu_master.journal.protocol import Entry
from multigpu_master.journal.sqlite import connections, failures
from multigpu_master.journal.sqlite.schema import PAGE_BYTES
from multigpu_master.journal.sqlite.segments import Segments

TRANSACTION_RECORDS = 8192  # a transaction takes no more entries once it has as many records,
TRANSACTION_BYTES = 16 << 20  # or as many bytes of payloads and bodies,
LOG_SHARE = 16  # or as much as may be this part of the journal's limit once it is in the log
SMALL_BODY_BYTES = 4 << 10  # limit of a cancellation's outcome that is written on a full disk
UNLIMITED_BYTES = 1 << 60  # for entries without submits
PROBE_BYTES = 64 << 10
NAME = "reserve"
# The reserve's part of the journal's limit or of the file system, within bounds.
_SHARE = 16
BYTES_MIN, BYTES_MAX = 64 << 10, 16 << 20
_PART_BYTES_MIN = 16 << 10  # a smaller reserve is of no use


class Reserve:
    """The file that reserves the space. For one thread at a time."""

    def __init__(self, data_dir: Path, size_max_bytes: int) -> None:
        self._path = data_dir / NAME
        self._size_max_bytes = size_max_bytes
        self.size_bytes = 0  # the reserved space

    @property
    def wanted_bytes(self) -> int:
        """The size of the whole reserve."""
        disk = os.statvfs(self._path.parent)
        share_bytes = min(self._size_max_bytes, disk.f_blocks * disk.f_frsize) // _SHARE
        return min(max(share_bytes, BYTES_MIN), BYTES_MAX)

    def room_bytes(self) -> int:
        """The bytes of the reserve and those that are free on the disk. From any thread."""
        disk = os.statvfs(self._path.parent)
        try:
            taken_bytes = self._path.stat().st_blocks * 512
        except FileNotFoundError:
            taken_bytes = 0
        return taken_bytes + disk.f_bavail * disk.f_frsize

    def make(self) -> None:
        """Reserves the whole space, or a part. OSError: there is not enough space for the whole."""
        wanted_bytes = size_bytes = self.wanted_bytes
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size == wanted_bytes:
                self.size_bytes = wanted_bytes
                return
            while True:
                os.ftruncate(fd, 0)
                try:
                    os.posix_fallocate(fd, 0, size_bytes)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT) or size_bytes <= _PART_BYTES_MIN:
                        os.ftruncate(fd, 0)
                        raise
                    size_bytes //= 2
        finally:
            os.close(fd)
        self.size_bytes = size_bytes
        if size_bytes < wanted_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def give_up(self) -> bool:
        """Returns the reserved space to the disk. False: no space was reserved."""
        try:
            fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in failures.NO_DESCRIPTOR:  # more space would not help
                return False
            self.size_bytes = 0
            if error.errno == errno.ENOENT:
                return False
            raise
        self.size_bytes = 0
        try:
            taken = os.fstat(fd).st_size > 0
            os.ftruncate(fd, 0)
        finally:
            os.close(fd)
        return taken


class Room:
    """How much the journal may write. On the journal's thread."""

    def __init__(
        self, path: Path, writer: sqlite3.Connection, segments: Segments, reserve: Reserve, size_max_bytes: int
    ) -> None:
        self._path = path
        self._writer = writer
        self._segments = segments
        self.reserve = reserve
        self.size_max_bytes = size_max_bytes
        self.limited = False  # whether the limit holds for the next transaction: it may have submits
        self._transaction_bytes = min(size_max_bytes // LOG_SHARE, TRANSACTION_BYTES)
        # Each record may change a page of its own in an index.
        self._transaction_records = min(max(size_max_bytes // LOG_SHARE // PAGE_BYTES, 16), TRANSACTION_RECORDS)

    def need(self, size_bytes: int) -> None:
        """JournalFullError: fewer bytes are free on the disk."""
        if shutil.disk_usage(self._path.parent).free < size_bytes:
            raise failures.full(self._path)

    def need_for_transaction(self, size_bytes: int) -> None:
        """As `need`, for the log and the database: without room in the database the log could not be emptied."""
        if size_bytes > BYTES_MIN:
            ((empty_pages,),) = self._writer.execute("PRAGMA freelist_count").fetchall()
            self.need(size_bytes + max(0, size_bytes - empty_pages * PAGE_BYTES))

    def need_for_segments(self) -> None:
        """JournalFullError: the next `flush` of the segments would exceed the limit."""
        if self._used_bytes() + self._segments.waiting_bytes > self._may_use_bytes():
            raise failures.full(self._path)

    def batch(self, waiting: deque[Entry], *, singly: bool) -> tuple[list[Entry], int]:
        """Takes the entries of the next transaction; returns them with their bytes of payloads and bodies."""
        batch: list[Entry] = []
        records = bytes_total = 0
        records_max, bytes_max = self._transaction_records, self._transaction_bytes
        while waiting and records < records_max and bytes_total < bytes_max and len(batch) < records_max:
            entry = waiting.popleft()
            records += len(entry.submits) + len(entry.settles)
            bytes_total += sum([len(record.payload) for record in entry.submits])
            bytes_total += sum([len(record.body) for record in entry.settles])
            batch.append(entry)
            if singly:
                break
        return batch, bytes_total

    def is_over(self) -> bool:
        """Whether the limit leaves no room for submits."""
        return self._used_bytes() + PROBE_BYTES > self.size_max_bytes - self._transaction_bytes

    def give_up_reserve(self) -> None:
        self.reserve.give_up()
        self.limit()

    def take_reserve(self) -> None:
        """OSError or sqlite3.Error: there is no room for all of it."""
        connections.empty_log(self._writer)
        self.reserve.make()
        self.limit()

    def take_some_reserve(self) -> None:
        """Keeps other programs from taking the room before the next transaction, or a new master, needs it."""
        with contextlib.suppress(OSError, sqlite3.OperationalError):  # the next transaction says what is wrong
            self.take_reserve()

    def limit(self) -> None:
        """Tells SQLite how far the database may grow now."""
        reserve_bytes = self.reserve.size_bytes
        size_max_bytes = self._may_use_bytes() - self._segments.size_bytes - reserve_bytes - self._transaction_bytes
        # If the disk is suddenly full, the reserve must hold the pages that are in the log and not in the database.
        log_bytes, log_keep_bytes = reserve_bytes // 2, self.size_max_bytes // LOG_SHARE
        connections.limit_size(self._writer, size_max_bytes, log_bytes, log_keep_bytes)

    def _used_bytes(self) -> int:
        """The bytes that count for the limit: all except the log."""
        return connections.used_bytes(self._writer) + self._segments.size_bytes + self.reserve.size_bytes

    def _may_use_bytes(self) -> int:
        return self.size_max_bytes if self.limited else UNLIMITED_BYTES


def frees(entry: Entry) -> bool:
    """Whether an entry empties the journal or takes almost no room: deletions, cancellations, settings."""
    return not entry.submits and all(
        record.state == task_pb2.OUTCOME_STATE_CANCELLED and len(record.body) <= SMALL_BODY_BYTES
        for record in entry.settles
    )
