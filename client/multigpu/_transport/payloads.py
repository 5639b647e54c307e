"""Large payloads and results, by reference: files that the master, the workers and the clients of one host share.

Bytes that cross three processes through sockets are copied a dozen times. Here the writer puts them once into a file of
a directory beside the master's journal, and a reference travels: segment, offset, size. The bytes are pages of the
kernel's cache, which all processes share; to make them durable the master syncs the file, and copies nothing.

A peer that can read the key in that directory may share it: it is on the same host, in the same file system, and the
same user. All others send the bytes.

Each writer appends to its own segments, named after a random token, so that names can't be guessed. Writers, and peers
that still have to pass a reference on, hold a shared lock on the file; the master knows which segments its tasks and
its journal refer to, and deletes one without references when it gets the exclusive lock. The kernel releases the locks
of a process when it ends, however it ends.
"""

import contextlib
import errno
import hashlib
import hmac
import os
import re
import secrets
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

try:
    import fcntl
except ImportError:  # Windows: payloads are sent
    fcntl = None  # type: ignore[assignment]

# Above this size the copies cost more than the file.
LARGE_BYTES = 128 << 10
# The size at which a segment is closed and the next one begun.
SEGMENT_BYTES = 16 << 20
# Free disk space that is left to the master's journal.
FREE_BYTES_MIN = 64 << 20
# Initial metadata of Run and Session: the SHA-256 of the key, then the directory's path.
METADATA = "mgpu-payloads-bin"
KEY_NAME = "KEY"
# Unused segments that are kept for a moment: writing into pages that exist costs less than half.
FREE_NAMES = tuple(f"free-{n}" for n in range(8))
NAME = re.compile(r"[0-9a-f]{24}-[0-9a-f]{1,8}")
_KEY_BYTES_MAX = 1024
# The process or the host lacks resources at the moment; the file is intact.
_TRANSIENT = frozenset({errno.EAGAIN, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM})


class Pin(Protocol):
    """Keeps a segment from being deleted while it is held."""

    @property
    def name(self) -> str: ...
    def read(self, offset: int, size_bytes: int) -> bytes: ...


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """Bytes in a segment. `len()` is their size, as of bytes."""

    pin: Pin
    offset: int
    size_bytes: int
    crc: int = -1  # CRC-32 of the bytes; -1: not known

    def __len__(self) -> int:
        return self.size_bytes

    def read(self) -> bytes:
        """The bytes. OSError: the file was deleted or truncated."""
        return self.pin.read(self.offset, self.size_bytes)


class Segment:
    """An open segment, pinned by its shared lock while this object lives."""

    __slots__ = ("__weakref__", "fd", "name")

    def __init__(self, name: str, fd: int) -> None:
        self.name = name
        self.fd = fd

    def read(self, offset: int, size_bytes: int) -> bytes:
        return read_at(self.fd, offset, size_bytes)

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.fd)


@dataclass(frozen=True, slots=True, eq=False)
class Elsewhere:
    """A segment that the sender of the reference pins."""

    path: str
    name: str

    def read(self, offset: int, size_bytes: int) -> bytes:
        return read_file(self.path, offset, size_bytes)


class Directory:
    """A master's directory of payloads that this process shares. The key changes with each start of a master, and makes
    earlier references invalid: after a disk error the kernel may have dropped pages, and no later sync reports that.
    """

    def __init__(self, path: Path, key: bytes) -> None:
        self.path = path
        self.key = key

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, str | bytes]]) -> "Directory | None":
        """The directory offered in a stream's initial metadata; None: there is none, or this process can't share it."""
        offers = [value for name, value in metadata if name == METADATA]
        if fcntl is None or not offers or not isinstance(offers[0], bytes):
            return None
        digest, path = offers[0][:32], Path(os.fsdecode(offers[0][32:]))
        try:
            fd = os.open(path / KEY_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                key = os.read(fd, _KEY_BYTES_MAX)
                ours = os.fstat(fd).st_uid == os.geteuid()
            finally:
                os.close(fd)
        except (OSError, ValueError):
            return None
        return cls(path, key) if ours and hmac.compare_digest(hashlib.sha256(key).digest(), digest) else None

    def pin(self, name: str) -> Segment:
        """Opens and locks a segment that another process wrote. FileNotFoundError: it is gone."""
        if NAME.fullmatch(name) is None:
            raise FileNotFoundError(f"{name!r} is no name of a segment")
        fd = os.open(self.path / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        return Segment(name, _locked(fd))


class Writer:
    """Writes bytes to its own segments. Safe to use from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = secrets.token_hex(12)
        self._segments = 0
        self._segment: Segment | None = None
        self._end = 0
        self._lock = threading.Lock()

    def put(self, data: bytes | memoryview) -> Reference:
        """Writes the bytes. OSError: the disk is nearly full, or the directory is gone."""
        size_bytes = len(data)
        disk = os.statvfs(self.path)
        if disk.f_bavail * disk.f_frsize < max(FREE_BYTES_MIN, 2 * size_bytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        with self._lock:
            segment = self._segment
            if segment is None or self._end + size_bytes > SEGMENT_BYTES:
                segment = self._segment = None  # unlocks the old one, also if the new one fails
                segment = self._segment = self._begin()
                self._end = 0
            offset = self._end
            self._end += size_bytes
        view, at = memoryview(data), offset
        while view:
            written = os.pwrite(segment.fd, view, at)
            view, at = view[written:], at + written
        return Reference(segment, offset, size_bytes)

    def _begin(self) -> Segment:
        while True:
            self._segments += 1
            name = f"{self._token}-{self._segments:x}"
            path = self.path / name
            flags = os.O_RDWR | os.O_CLOEXEC
            if not self._take_free(path):
                flags |= os.O_CREAT | os.O_EXCL
            with contextlib.suppress(FileNotFoundError):  # deleted as an orphan before it was locked
                fd = os.open(path, flags, 0o600)
                segment = Segment(name, _locked(fd))
                if path.stat().st_ino == os.fstat(fd).st_ino:
                    return segment

    def _take_free(self, path: Path) -> bool:
        """Renames an unused segment, if there is one."""
        for name in FREE_NAMES:
            with contextlib.suppress(FileNotFoundError):
                (self.path / name).rename(path)
                return True
        return False


def _locked(fd: int) -> int:
    """The same descriptor, with the shared lock. FileNotFoundError: the file was deleted before."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)  # waits at most while the master checks the file
        if os.fstat(fd).st_nlink:
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    raise FileNotFoundError("the segment was deleted")


def is_transient(error: BaseException) -> bool:
    """Whether a later attempt to read may succeed. False: the bytes are gone or damaged."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in _TRANSIENT)


def read_file(path: str | Path, offset: int, size_bytes: int) -> bytes:
    """Bytes of a segment that another process pins. OSError: it is gone, or too short."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return read_at(fd, offset, size_bytes)
    finally:
        os.close(fd)


def read_at(fd: int, offset: int, size_bytes: int) -> bytes:
    """Exactly `size_bytes` bytes of a file. OSError: it ends before."""
    if offset + size_bytes > os.fstat(fd).st_size:  # allocates nothing for a damaged reference
        raise OSError(f"the segment ends before {offset} + {size_bytes}")
    data = os.pread(fd, size_bytes, offset)
    if len(data) != size_bytes:
        raise OSError(f"the segment ends before {offset} + {size_bytes}")
    return data
