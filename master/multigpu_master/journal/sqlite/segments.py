"""Large payloads and bodies, beside the database: appended to files, to which its rows refer.

SQLite would write each byte twice, to its log and to the database: for tasks with payloads and results of 1 MiB, files
take a fifth of the time. A row has the bytes (a BLOB) or a reference (a TEXT): to a segment (number, offset, size and
CRC; and for a body with a large result, the size of what precedes the result), or to a shared segment, whose name has a
dash (journal/payload_files.py). The bytes are synced before the transaction that refers to them. Segments without
references are deleted. Payloads and bodies have separate segments, because they are deleted at different times. A
segment is small compared with the reserve (room.py): on a full disk, the reserve has space for the outcomes of all
tasks whose payloads are in one segment; then the segment can be deleted.
"""

# ruff: noqa: S608  # statements are put together from this package's constants; values are always bound

import os
import re
import sqlite3
import sys
import zlib
from collections.abc import Sized
from pathlib import Path

from multigpu._transport.payloads import Reference, read_file

from multigpu_master.journal.payload_files import Payloads, is_shared, parse_reference, reference_text
from multigpu_master.journal.protocol import LargeBody, head_without_result_tag
from multigpu_master.journal.sqlite.files import sync

LARGE_BYTES = 128 << 10  # payloads and bodies of this size or more go into a segment
CHECKS_MAX = 256  # segments that one step checks for references
_REFERENCE = re.compile("[0-9a-f]{8}:[0-9a-f]{1,15}:[0-9a-f]{1,15}:[0-9a-f]{8}(:[0-9a-f]{1,15})?")
DIRECTORY_NAME = "segments"

# The columns that hold references.
LARGE_COLUMNS = (("task", "payload"), ("dead_letter", "payload"), ("outcome", "body"))
INDEXES = "".join(
    f"CREATE INDEX {table}_large ON {table} ({column}) WHERE typeof({column}) = 'text';\n"
    for table, column in LARGE_COLUMNS
)
_REFERENCES = " UNION ALL ".join(
    f"SELECT {column} FROM {table} WHERE typeof({column}) = 'text' AND {column} >= ?1 AND {column} < ?2"
    for table, column in LARGE_COLUMNS
)
IN_USE = f"SELECT EXISTS ({_REFERENCES})"


def bounds(segment: str) -> tuple[str, str]:
    """Returns the parameters of IN_USE: each reference to the segment is >= the first and < the second."""
    return f"{segment}:", f"{segment};"


class LargeObjects:
    """Reads what references refer to. From any thread."""

    def __init__(self, data_dir: Path, shared: Payloads) -> None:
        self.directory = data_dir / DIRECTORY_NAME
        self._shared = shared

    def restore(self, reference: str) -> bytes | Reference | None:
        """Like `read`, but for a shared file returns a Reference, which keeps the file, or None if the file is gone."""
        return self._shared.restore(reference) if is_shared(reference) else self.read(reference)

    def read(self, reference: str) -> bytes:
        """Returns the bytes. Raises OSError if the file can't be read, and ValueError if the reference or the bytes are
        damaged. FileNotFoundError may also mean that the row with the reference has been deleted meanwhile.
        """
        if is_shared(reference):
            name, offset, size_bytes, head, _ = parse_reference(reference)
            path = self._shared.path / name
            data = read_file(path, offset, size_bytes)
            # If the name is gone, the segment may have been given to another writer, which overwrites the bytes: then
            # this raises FileNotFoundError.
            path.stat()
            return head + data
        data, crc = self._read_segment(reference)
        if zlib.crc32(data) != crc:  # damage of the disk must not give a wrong result
            raise ValueError("its bytes are not those that were written")
        return data

    def read_without_result(self, reference: str) -> bytes:
        """Like `read`, for an Outcome whose result is not needed: a large result is not read, and the bytes are not
        checked then.
        """
        if is_shared(reference):
            _, _, size_bytes, head, _ = parse_reference(reference)
            return head_without_result_tag(head, size_bytes)
        _, _, size, _, *head_size = reference.split(":")
        if not head_size:
            return self.read(reference)
        head_bytes = int(head_size[0], 16)
        head, _ = self._read_segment(reference, head_bytes)
        return head_without_result_tag(head, int(size, 16) - head_bytes)

    def _read_segment(self, reference: str, bytes_max: int = sys.maxsize) -> tuple[bytes, int]:
        """Returns the first bytes, up to `bytes_max`, and the CRC of all."""
        if not _REFERENCE.fullmatch(reference):
            raise ValueError("it refers to no segment")
        segment, offset, size, crc = (int(part, 16) for part in reference.split(":")[:4])
        with (self.directory / f"{segment:08x}").open("rb") as file:
            if offset + size > os.fstat(file.fileno()).st_size:
                raise ValueError("its segment is too short for it")
            file.seek(offset)
            return file.read(min(size, bytes_max)), crc


class _Appender:
    """The segment to which payloads, or bodies, are appended. `fd` is -1 if the next `_put` begins a new segment."""

    def __init__(self) -> None:
        self.fd = -1
        self.number = 0
        self.end = 0  # the offset after the bytes that were flushed
        self.waiting: list[bytes] = []
        self.waiting_bytes = 0


class Segments:
    """Writes and deletes segments, on the journal's thread. A segment has at most `segment_bytes`, unless its
    only payload or body is larger.
    """

    def __init__(self, data_dir: Path, shared: Payloads, segment_bytes: int) -> None:
        self._shared = shared
        self._segment_bytes = segment_bytes
        self._referred: list[Reference] = []  # to be synced by the next `flush`
        self._directory = data_dir / DIRECTORY_NAME
        self._directory.mkdir(mode=0o700, exist_ok=True)
        sync(data_dir)
        names = "[0-9a-f]" * 8  # other files are ignored
        segments = sorted(self._directory.glob(names))
        self._sizes = {int(path.name, 16): path.stat().st_size for path in segments}  # by number, ascending
        self._last_number = max(self._sizes, default=0)
        self._payloads, self._bodies = _Appender(), _Appender()
        self._unchecked: list[int] = []  # the numbers that `delete_unused` checks next, the lowest last

    @property
    def size_bytes(self) -> int:
        """The bytes of the segments, and of the shared files in the directory of payloads."""
        return sum(self._sizes.values()) + self._shared.size_bytes

    @property
    def needs_flush(self) -> bool:
        """Whether `flush` has anything to do."""
        return bool(self.waiting_bytes or self._referred)

    @property
    def waiting_bytes(self) -> int:
        """The bytes that the next `flush` writes."""
        return self._payloads.waiting_bytes + self._bodies.waiting_bytes

    def put_payload(self, payload: bytes | Sized) -> str:
        """Adds a payload to the next `flush`. Returns its reference."""
        if isinstance(payload, bytes):
            return self._put(self._payloads, payload)
        assert isinstance(payload, Reference), "there is nothing else"
        return self._refer(payload)

    def put_body(self, body: bytes | LargeBody) -> str:
        if isinstance(body, bytes):
            return self._put(self._bodies, body)
        if isinstance(body.tail, bytes):
            return f"{self._put(self._bodies, body.head, body.tail)}:{len(body.head):x}"
        return self._refer(body.tail, body.head)

    def _refer(self, reference: Reference, head: bytes = b"") -> str:
        self._referred.append(reference)
        return reference_text(reference, head)

    def _put(self, appender: _Appender, *parts: bytes) -> str:
        offset, size_bytes = appender.end + appender.waiting_bytes, sum(map(len, parts))
        if appender.fd < 0 or (offset and offset + size_bytes > self._segment_bytes):
            self._write(appender)
            self._begin(appender)
            offset = 0
        crc = 0
        for part in parts:
            crc = zlib.crc32(part, crc)
        reference = f"{appender.number:08x}:{offset:x}:{size_bytes:x}:{crc:08x}"
        appender.waiting += parts
        appender.waiting_bytes += size_bytes
        return reference

    def flush(self) -> None:
        """Writes and syncs all that was put since the last flush. After an OSError, do not use the references, and call
        `abandon`.
        """
        for appender in (self._payloads, self._bodies):
            self._write(appender)
        if self._referred:
            self._shared.sync(self._referred)
            self._referred = []

    def abandon(self) -> None:
        """Drops the data that no successful flush has written, and removes the partly written data from the files.
        Closes segments that have bytes, so that they may be deleted.
        """
        self._referred = []
        for appender in (self._payloads, self._bodies):
            appender.waiting, appender.waiting_bytes = [], 0
            if appender.fd >= 0:
                os.ftruncate(appender.fd, appender.end)
                if appender.end:
                    os.close(appender.fd)
                    appender.fd, appender.number = -1, 0

    def _begin(self, appender: _Appender) -> None:
        if appender.fd >= 0:
            os.close(appender.fd)
            appender.fd, appender.number = -1, 0
        self._last_number += 1
        path = self._directory / f"{self._last_number:08x}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        self._sizes[self._last_number] = 0
        sync(self._directory)
        # Opened only after its name is synced, because later entries use an open segment even if the entry for which it
        # was made is rejected. If the sync fails, an empty file stays until the next sweep.
        appender.fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        appender.number, appender.end = self._last_number, 0

    def _write(self, appender: _Appender) -> None:
        if not appender.waiting:
            return
        for data in appender.waiting:
            view = memoryview(data)
            while view:
                view = view[os.write(appender.fd, view) :]
        os.fdatasync(appender.fd)
        appender.end += appender.waiting_bytes
        appender.waiting, appender.waiting_bytes = [], 0
        self._sizes[appender.number] = appender.end

    def delete_unused(self, writer: sqlite3.Connection) -> bool:
        """Checks closed segments, in turn, until it has deleted one to which no row refers, at most CHECKS_MAX. Returns
        whether it deleted one.
        """
        self._unchecked = self._unchecked or [*reversed(self._sizes)]
        for _ in range(min(CHECKS_MAX, len(self._unchecked))):
            number = self._unchecked.pop()
            if number in (self._payloads.number, self._bodies.number):
                continue
            ((used,),) = writer.execute(IN_USE, bounds(f"{number:08x}")).fetchall()
            if not used:
                (self._directory / f"{number:08x}").unlink(missing_ok=True)  # another program may have deleted it
                del self._sizes[number]
                return True
        return False

    def close(self) -> None:
        for appender in (self._payloads, self._bodies):
            if appender.fd >= 0:
                os.close(appender.fd)
                appender.fd = -1
