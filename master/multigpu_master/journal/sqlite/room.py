"""Space for the journal: a watermark and a size limit for new tasks, and a reserve for a full disk.

Tasks are accepted while more than the watermark is free on the disk and the journal is below its limit. Other entries
are written while the disk has space for them. A file in the journal's directory, the reserve, keeps space for the time
when another program has filled the disk: even deletions need space, since the log grows first. The reserve is deleted
for transactions at that time and for a new master's start, and made again afterwards from free space. The reserve,
the watermark and the limit of a transaction's bytes have the same size: a share of the disk or of the size limit.
"""

import contextlib
import errno
import os
import sqlite3
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from multigpu.v1 import task_pb2

from multigpu_master.errors import JournalFullError
from multigpu_master.journal.protocol import Entry, LargeBody
from multigpu_master.journal.sqlite import connections, failures
from multigpu_master.journal.sqlite.schema import PAGE_BYTES
from multigpu_master.journal.sqlite.segments import Segments

TRANSACTION_RECORDS = 8192  # a transaction takes no more entries once it has this many records
SMALL_BODY_BYTES = 4 << 10  # on a full disk, a cancellation's outcome up to this size may overtake waiting entries
NAME = "reserve"
# A segment has at most a quarter of the reserve's size, and outcomes may take half of the reserve
# (require_room_for_outcome). So on a full disk the outcomes of all tasks whose payloads are in one segment can be
# written, if they are smaller than the payloads. Then the segment is deleted.
SEGMENTS_IN_RESERVE = 4
_SHARE = 16  # the reserve has 1/16 of the disk or of the size limit
_SHARE_BYTES_MIN, _SHARE_BYTES_MAX = 64 << 10, 16 << 20


def free_bytes(path: Path) -> int:
    """The bytes that are free on the disk of a directory."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize


class Reserve:
    """The file that reserves the space. Only the journal's thread changes it."""

    def __init__(self, data_dir: Path, size_max_bytes: int) -> None:
        self._path = data_dir / NAME
        self._size_max_bytes = size_max_bytes

    @property
    def wanted_bytes(self) -> int:
        """The size that the reserve should have."""
        disk = os.statvfs(self._path.parent)
        share_bytes = min(self._size_max_bytes, disk.f_blocks * disk.f_frsize) // _SHARE
        return min(max(share_bytes, _SHARE_BYTES_MIN), _SHARE_BYTES_MAX)

    @property
    def size_bytes(self) -> int:
        """The size of the file; 0 if it does not exist. May be read from any thread."""
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def make(self) -> None:
        """Extends the file to `wanted_bytes`, or less if there is less space. Raises OSError if there is no space or no
        file descriptor.
        """
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            size_bytes, wanted_bytes = os.fstat(fd).st_size, self.wanted_bytes
            if size_bytes >= wanted_bytes:
                return
            # Leave an eighth of the free space to the file system, which may need blocks to manage the file.
            size_bytes = min(wanted_bytes, size_bytes + free_bytes(self._path.parent) * 7 // 8)
            if not size_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.posix_fallocate(fd, 0, size_bytes)
        finally:
            os.close(fd)

    def release(self) -> bool:
        """Deletes the file, which needs neither space nor a file descriptor. Returns False if it did not exist."""
        try:
            self._path.unlink()
        except FileNotFoundError:
            return False
        return True


class Room:
    """Decides how much the journal may write. Used only on the journal's thread."""

    def __init__(
        self, path: Path, writer: sqlite3.Connection, segments: Segments, reserve: Reserve, size_max_bytes: int
    ) -> None:
        self._path = path
        self._writer = writer
        self._segments = segments
        self._reserve = reserve
        self.size_max_bytes = size_max_bytes
        self._watermark_bytes = reserve.wanted_bytes
        # Each record may change a page of its own in an index.
        self._transaction_records = min(max(self._watermark_bytes // PAGE_BYTES, 16), TRANSACTION_RECORDS)
        self._used_bytes = 0
        self._bytes_until_measure = 0  # how much may be written before `_used_bytes` is measured again
        # With the space of the reserve, the pages that are only in the log must fit into the database.
        connections.limit_log(writer, self._watermark_bytes // 2, max(size_max_bytes // _SHARE, PAGE_BYTES))

    def pop_batch(self, waiting: deque[Entry]) -> tuple[list[Entry], int]:
        """Removes the entries of the next transaction from `waiting`. Returns them, and the bytes of their content."""
        batch: list[Entry] = []
        records = bytes_total = 0
        records_max, bytes_max = self._transaction_records, self._watermark_bytes
        while waiting and records < records_max and bytes_total < bytes_max and len(batch) < records_max:
            entry = waiting.popleft()
            records += len(entry.submits) + len(entry.settles)
            bytes_total += content_bytes(entry)
            batch.append(entry)
        self._bytes_until_measure -= records * PAGE_BYTES + bytes_total
        return batch, bytes_total

    def require_room_for_submits(self, size_bytes: int) -> None:
        """Raises JournalFullError if a transaction with these submits would pass the watermark or the size limit."""
        if self._bytes_until_measure < 0:
            self.measure()
        if self._used_bytes + size_bytes + self._watermark_bytes > self.size_max_bytes:
            raise failures.limit_error(self._path)
        self.require(2 * size_bytes + self._watermark_bytes)

    def require_room_for_outcome(self, size_bytes: int) -> None:
        """Raises JournalFullError if an outcome would take space that is kept for entries that free space."""
        self.require(size_bytes + self._watermark_bytes // 2)

    def require_room_for_transaction(self, size_bytes: int) -> None:
        """Raises JournalFullError if the disk has no room for a transaction of this size. It is written to the log, and
        later to the database, where it first fills empty pages; without room there, the log could not be emptied.
        Transactions of at most _SHARE_BYTES_MIN always pass.
        """
        if size_bytes > _SHARE_BYTES_MIN:
            ((empty_pages,),) = self._writer.execute("PRAGMA freelist_count").fetchall()
            self.require(size_bytes + max(0, size_bytes - empty_pages * PAGE_BYTES))

    def require(self, size_bytes: int) -> None:
        """Raises JournalFullError if fewer bytes are free on the disk, JournalError if the directory is gone."""
        try:
            free = free_bytes(self._path.parent)
        except FileNotFoundError as error:
            raise failures.gone_error(self._path) from error
        if free < size_bytes:
            raise failures.full_error(self._path)

    def measure(self) -> None:
        """Measures the bytes that count for the size limit: all except the log and empty pages of the database. Not
        called for each transaction, because it makes two calls into SQLite.
        """
        self._used_bytes = connections.used_bytes(self._writer) + self._segments.size_bytes + self._reserve.size_bytes
        self._bytes_until_measure = self._watermark_bytes // 2

    def prepare_for_submits(self) -> JournalFullError | None:
        """Makes the reserve, as far as there is space. Returns why no tasks can be accepted; None if they can."""
        try:
            self._reserve.make()
            self.measure()
            self.require_room_for_submits(self._watermark_bytes // 4)  # room for more than the next few tasks
        except JournalFullError as error:
            return error
        except OSError:
            return failures.full_error(self._path)
        return None if self._reserve.size_bytes >= self._watermark_bytes else failures.full_error(self._path)

    def is_short(self) -> bool:
        """Whether unused space of the journal's files should be returned to the disk, so that tasks are accepted."""
        return free_bytes(self._path.parent) < 2 * self._watermark_bytes

    @contextlib.contextmanager
    def reserve_released(self) -> Iterator[None]:
        """Within this block, transactions may use the space of the reserve. At its end the reserve is made again, so
        that other programs do not take the space before the next transaction, or a new master, needs it. After an error
        it is not made again, and the log stays as it is.
        """
        self._reserve.release()
        self._empty_log()
        yield
        self._empty_log()
        with contextlib.suppress(OSError):  # `prepare_for_submits` tries again
            self._reserve.make()

    def _empty_log(self) -> None:
        try:
            connections.empty_log(self._writer)
        except sqlite3.Error as error:
            if not isinstance(failures.explain(error, self._path), JournalFullError):
                raise


def content_bytes(entry: Entry) -> int:
    """Returns the bytes of payloads, bodies, settings and distinct specs. Usage takes almost none. Bytes in shared
    files are not counted, because they are on the disk already.
    """
    size = sum([len(value or b"") for value in entry.settings.values()]) if entry.settings else 0
    submits = [*entry.submits, *[r.dead for r in entry.settles if r.dead is not None]]
    if submits:
        size += sum([len(r.payload) for r in submits if type(r.payload) is bytes])
        size += sum(map(len, {r.spec for r in submits}))
    return size + sum([_unshared_bytes(r.body) for r in entry.settles])


def _unshared_bytes(body: bytes | LargeBody) -> int:
    """The bytes of a body without those in a shared file."""
    return len(body) if isinstance(body, bytes) or isinstance(body.tail, bytes) else len(body.head)


def is_small_or_frees(entry: Entry) -> bool:
    """Whether an entry frees space in the journal or usually takes almost none: deletions, settings, usage, and
    cancellations whose outcomes have at most SMALL_BODY_BYTES.
    """
    return not entry.submits and all(
        record.state == task_pb2.OUTCOME_STATE_CANCELLED and len(record.body) <= SMALL_BODY_BYTES
        for record in entry.settles
    )
