"""The master's side of payloads by reference (multigpu._transport.payloads): which peers share the directory, which
references are valid, which files must be synced, and which may be deleted.

A shared segment is a file of payloads that a client or worker wrote. (journal/sqlite/segments.py has the segments that
the journal writes.) Each shared segment to which a task, an outcome or an unwritten entry in the master's memory refers
has one `SegmentHold`. When the last of these references is gone, the segment is unused, unless a row of the journal
refers to it or another process has a lock on it. A scan finds unused segments that were never reported to the master,
because their writer was killed before. Unused segments are deleted. A few large ones are first kept under FREE_NAMES:
writers overwrite them, which is faster than a new file.

Files are opened relative to the directory, never through links. They must belong to the master's user, and have
a single hard link.
"""

import contextlib
import fcntl
import hashlib
import hmac
import os
import secrets
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import structlog
from multigpu._transport.payloads import (
    FREE_NAMES,
    KEY_NAME,
    LARGE_BYTES,
    METADATA,
    NAME,
    SEGMENT_BYTES,
    Reference,
    read_at,
)

from multigpu_master.errors import JournalError

log = structlog.get_logger()

DIRECTORY_NAME = "payloads"
# Time between two checks for released segments: BUSY_S if some wait to be deleted, IDLE_S if none do.
BUSY_S, IDLE_S = 0.05, 0.5
# After this time, a segment that its writer still has locked is left to the scan.
WAIT_S = 2.0
# Segments under FREE_NAMES are deleted when no large segment (half of SEGMENT_BYTES or more) has become unused for this
# time.
FREE_S = 3.0
# The scan checks SCAN_SEGMENTS of the directory's segments every SCAN_S.
SCAN_S, SCAN_SEGMENTS = 1.0, 64
_OFFSET_MAX = 1 << 40
_TRASH = "trash"


# Initial metadata of a stream, for the peer.
InitialMetadata = tuple[tuple[str, bytes], ...]
WRONG_KEY = (
    "payload_key differs from the file KEY in this master's directory of payloads; send no key, and payloads inline"
)


class BadReferenceError(Exception):
    """A reference that is not valid; the message says why."""


class SegmentHold:
    """A shared segment to which references in the master's memory exist."""

    __slots__ = ("__weakref__", "_payloads", "name")

    def __init__(self, payloads: "Payloads", name: str) -> None:
        self.name = name
        self._payloads = payloads

    def read(self, offset: int, size_bytes: int) -> bytes:
        with self._payloads.opened(self.name) as fd:
            return read_at(fd, offset, size_bytes)

    def __del__(self) -> None:
        self._payloads.released.append(self.name)  # from any thread, between any two instructions: no lock here


class Payloads:
    """See the module. `in_use` says whether rows of the journal refer to a segment."""

    def __init__(self, data_dir: Path, in_use: Callable[[str], bool]) -> None:
        self.path = data_dir / DIRECTORY_NAME
        self.size_bytes = 0  # of all segments, at the last scan
        self._in_use = in_use
        self._key = secrets.token_hex(32).encode()
        self._dir_fd = -1
        self._held: WeakValueDictionary[str, SegmentHold] = WeakValueDictionary()
        self._lock = threading.Lock()  # protects _held, and deletions
        self.released: deque[str] = deque()  # names of segments without references
        self._journaled: set[str] = set()  # segments to which rows may refer; their names are synced
        self._undeletable: set[str] = set()  # segments whose failed deletion was logged
        self._scan_from = ""  # the last name that the scan has checked; "": begin with the first
        self._last_large_at_s = 0.0  # when a segment large enough to be kept was last found unused
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Creates the directory if it does not exist, and a new key."""
        self._closing.clear()
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        aside = f"{KEY_NAME}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=self._dir_fd)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._dir_fd)
        with os.fdopen(fd, "wb") as file:
            file.write(self._key)
        os.rename(aside, KEY_NAME, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_TRASH, dir_fd=self._dir_fd)
        self._journaled.update(self._names())
        os.fsync(self._dir_fd)  # makes the names read above durable
        self._measure()

    def start_deleting(self) -> None:
        """Starts the thread that deletes unused segments. Call it after the journal's references were restored."""
        self._thread = threading.Thread(target=self._run, name="payloads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1

    def initial_metadata(self) -> InitialMetadata:
        """Returns initial metadata with the directory's path and a hash of its key."""
        return ((METADATA, hashlib.sha256(self._key).digest() + os.fsencode(self.path.absolute())),)

    def shared_with(self, key: bytes) -> bool:
        """Returns whether `key` is the directory's: the peer that sent it can read the directory."""
        return hmac.compare_digest(key, self._key)

    def resolve(self, name: str, offset: int, size_bytes: int, crc: int = -1) -> Reference:
        """Returns a peer's reference; while it exists, its segment stays. Raises BadReferenceError if it is invalid."""
        if NAME.fullmatch(name) is None:
            raise BadReferenceError(
                "the reference's segment has an invalid name; refer to a segment that the sender wrote"
            )
        if offset >= _OFFSET_MAX or not LARGE_BYTES <= size_bytes < _OFFSET_MAX:
            raise BadReferenceError(
                f"the reference's offset {offset} or size {size_bytes} is out of range; send payloads of less "
                f"than {LARGE_BYTES} bytes inline"
            )
        hold = self._hold(name)
        try:
            with self.opened(name) as fd:
                found = os.fstat(fd)
        except OSError as error:
            raise BadReferenceError(
                f"segment {name} can't be opened ({error.strerror}); write it into the directory that the master "
                "offered, keep it locked, and refer to it only then; or send the payload inline"
            ) from error
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise BadReferenceError(
                f"segment {name} is not a plain file of the master's own user, with a single hard link"
            )
        if offset + size_bytes > found.st_size:
            raise BadReferenceError(
                f"segment {name} has {found.st_size} bytes, and the reference needs {offset + size_bytes}; "
                "write the bytes before you refer to them"
            )
        return Reference(hold, offset, size_bytes, crc)

    def restore(self, text: str) -> Reference | None:
        """Returns a row's reference; while it exists, its segment stays. None if the segment is gone or too short."""
        name, offset, size_bytes, _, crc = parse_reference(text)
        try:
            whole = os.stat(name, dir_fd=self._dir_fd).st_size >= offset + size_bytes
        except FileNotFoundError:
            return None
        return Reference(self._hold(name), offset, size_bytes, crc) if whole else None

    def _hold(self, name: str) -> SegmentHold:
        with self._lock:
            hold = self._held.get(name)
            if hold is None:
                hold = self._held[name] = SegmentHold(self, name)
            return hold

    @contextlib.contextmanager
    def opened(self, name: str) -> Iterator[int]:
        """Opens the segment for a `with` block, and yields its file descriptor."""
        # O_NONBLOCK: a FIFO of that name must not block.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._dir_fd)
        try:
            yield fd
        finally:
            os.close(fd)

    # --- the disk ----------------------------------------------------------------------------------------------------

    def sync(self, references: Iterable[Reference]) -> None:
        """Syncs these bytes and their files' names to the disk. Called on the journal's thread."""
        names = {r.pin.name for r in references}
        for name in names:
            # A peer may delete a file that it wrote: only the peer's own task or result is lost.
            with contextlib.suppress(FileNotFoundError), self.opened(name) as fd:
                os.fdatasync(fd)
        if not names <= self._journaled:
            os.fsync(self._dir_fd)
            self._journaled |= names

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if NAME.fullmatch(path.name))

    def _measure(self) -> None:
        size_bytes = 0
        with os.scandir(self._dir_fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        self.size_bytes = size_bytes

    # --- deletion ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting: dict[str, float] = {}  # released segments, and when to stop checking for the writer's lock
        scan_at_s = 0.0
        while not self._closing.wait(BUSY_S if waiting or self.released else IDLE_S):
            now_s = time.monotonic()
            try:
                while self.released:
                    waiting[self.released.popleft()] = now_s + WAIT_S
                waiting = {n: end_s for n, end_s in waiting.items() if not self._try_delete(n) and now_s < end_s}
                if now_s >= scan_at_s:
                    self._measure()
                    for name in self._next_names():
                        self._try_delete(name)
                    if now_s > self._last_large_at_s + FREE_S:
                        self._delete_free()
                    scan_at_s = now_s + SCAN_S
            except (OSError, JournalError) as error:
                log.warning("unused payloads can't be deleted", directory=str(self.path), error=str(error))
                scan_at_s = now_s + SCAN_S

    def _next_names(self) -> list[str]:
        """Returns the names to scan next."""
        names = self._names()
        part = [name for name in names if name > self._scan_from][:SCAN_SEGMENTS]
        self._scan_from = part[-1] if len(part) == SCAN_SEGMENTS else ""
        return part

    def _vacant_free_name(self) -> str | None:
        """Returns a name under which to keep a segment for the next writer, or None if enough segments are kept."""
        for name in FREE_NAMES:
            try:
                os.stat(name, dir_fd=self._dir_fd)
            except FileNotFoundError:
                return name
        return None

    def _delete_free(self) -> None:
        """Deletes the segments kept for the next writers."""
        for name in FREE_NAMES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._dir_fd)

    def _try_delete(self, name: str) -> bool:
        """Like `_delete_unused`, but logs an error, once for each segment, and leaves the segment."""
        try:
            return self._delete_unused(name)
        except (OSError, JournalError) as error:
            if name not in self._undeletable:
                self._undeletable.add(name)
                log.warning("an unused payload can't be deleted", path=str(self.path / name), error=str(error))
            return True

    def _delete_unused(self, name: str) -> bool:
        """Deletes an unused segment, or keeps it for the next writer. Returns False if another process locks it."""
        if name in self._held:
            return True  # it will be released
        with contextlib.suppress(FileNotFoundError), self.opened(name) as fd:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # The lock was free, so no process writes to the segment. `_held` has segments with references in memory.
            # The rows of the journal are checked too, because a row may refer to a segment without such a reference.
            if name in self._journaled and self._in_use(name):
                return True
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                return True
            free: str | None = None
            if found.st_size >= SEGMENT_BYTES // 2:
                free, self._last_large_at_s = self._vacant_free_name(), time.monotonic()
            with self._lock:
                if name in self._held:
                    return True
                os.rename(name, free or _TRASH, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            self._journaled.discard(name)
            if free is None:
                os.unlink(_TRASH, dir_fd=self._dir_fd)
        return True


# The text of a reference in a row of the journal: name:offset:size:head[:crc], in hexadecimal. `head` has the bytes of
# an outcome's body before its result. The CRC is that of a payload, if it is known.


def reference_text(reference: Reference, head: bytes = b"") -> str:
    crc = f":{reference.crc:x}" if reference.crc >= 0 else ""
    return f"{reference.pin.name}:{reference.offset:x}:{reference.size_bytes:x}:{head.hex()}{crc}"


def is_shared(text: str) -> bool:
    """Returns whether the reference is to a shared file. The names of the journal's own segments have no dash."""
    return "-" in text


def parse_reference(text: str) -> tuple[str, int, int, bytes, int]:
    """Returns the segment's name, the offset, the size, the head, and the CRC (-1 if there is none)."""
    name, offset, size, head, *crc = text.split(":")
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:100]!r} is no name of a segment")
    return name, int(offset, 16), int(size, 16), bytes.fromhex(head), int(crc[0], 16) if crc else -1
