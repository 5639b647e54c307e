"""The master's side of payloads by reference (multigpu._transport.payloads): whom it shares them with, which references
it believes, what of them is on the disk, and what may go.

A reference that came in is held as a `Reference` on a `Stored`, one for each segment, for as long as any task, outcome
or entry of the journal holds it: Python's own counts of references are ours, so they can't drift. When the last is
gone the segment is looked at: if no row of the journal refers to it either, and nobody else has a lock on it, it is
deleted. Whatever nobody ever told us of (a client killed before it could) is found by looking through the directory.

Files are only ever opened relative to the directory, never followed if they are links, and must be ours alone.
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
from collections.abc import Callable, Iterable
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

from multigpu_master.journal.errors import JournalError

log = structlog.get_logger()

DIRECTORY_NAME = "payloads"
# Segments kept open between two uses of theirs; the others are opened for each.
OPEN_MAX = 256
# Between two looks at what was released, while there is some; and else.
BUSY_S, IDLE_S = 0.05, 0.5
# What its writer holds on to for longer is left to the look through the directory.
WAIT_S = 2.0
# How long segments that nobody needs are kept for writers.
FREE_S = 3.0
# Between two looks at a part of the directory, and how large a part that is.
SCAN_S, SCAN_SEGMENTS = 1.0, 64
_OFFSET_MAX = 1 << 40
_TRASH = "trash"


# Initial metadata for peers.
Offer = tuple[tuple[str, bytes], ...]
WRONG_KEY = "payload_key is not what this master keeps in KEY; leave it out to send and get bytes"


class BadReferenceError(Exception):
    """A reference that is not to be believed; the message says why."""


class Stored:
    """A segment that something in the master refers to."""

    __slots__ = ("__weakref__", "_payloads", "fd", "name")

    def __init__(self, payloads: "Payloads", name: str) -> None:
        self.name = name
        self.fd = -1
        self._payloads = payloads

    def read(self, offset: int, size_bytes: int) -> bytes:
        with self._payloads.opened(self) as fd:
            return read_at(fd, offset, size_bytes)

    def __del__(self) -> None:
        self._payloads.released(self)


class _Opened:
    """The segment's descriptor, for the time of a block."""

    def __init__(self, fd: int, *, close: bool) -> None:
        self._fd = fd
        self._close = close

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        if self._close:
            os.close(self._fd)


class Payloads:
    """See the module. `in_use` says whether rows of the journal refer to a segment."""

    def __init__(self, data_dir: Path, in_use: Callable[[str], bool]) -> None:
        self.path = data_dir / DIRECTORY_NAME
        # As of the last look; of all segments, whoever needs them.
        self.size_bytes = 0
        self._in_use = in_use
        self._key = secrets.token_hex(32).encode()
        self._dir_fd = -1
        self._stored: WeakValueDictionary[str, Stored] = WeakValueDictionary()
        self._lock = threading.Lock()  # of _stored, and of deletions
        self._open: set[int] = set()  # a set and no count: it is changed from any thread
        self._released: deque[str] = deque()
        self._journaled: set[str] = set()  # rows may refer to these
        self._scan_from = ""
        self._freed_s = 0.0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Makes the directory if need be, and its key anew."""
        self.path.mkdir(mode=0o700, exist_ok=True)
        self._dir_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        aside = f"{KEY_NAME}.new"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=self._dir_fd)
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._dir_fd)
        try:
            os.write(fd, self._key)
        finally:
            os.close(fd)
        os.rename(aside, KEY_NAME, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_TRASH, dir_fd=self._dir_fd)
        self._journaled.update(self._names())
        self._measure()

    def sweep(self) -> None:
        """From now on deletes what nobody needs. What the journal holds must have been restored before."""
        self._thread = threading.Thread(target=self._run, name="payloads", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(5.0)
        if self._dir_fd >= 0:
            os.close(self._dir_fd)
            self._dir_fd = -1

    # --- peers -------------------------------------------------------------------------------------------------------

    def offer(self) -> Offer:
        """Initial metadata that invite a peer to share."""
        return ((METADATA, hashlib.sha256(self._key).digest() + os.fsencode(self.path.absolute())),)

    def shared_with(self, key: bytes) -> bool:
        """Whether a peer that says this key has read it where we keep it."""
        return hmac.compare_digest(key, self._key)

    # --- references --------------------------------------------------------------------------------------------------

    def resolve(self, name: str, offset: int, size_bytes: int, crc: int = -1) -> Reference:
        """Believes a peer's reference, and holds it. BadReferenceError: it leads nowhere."""
        if NAME.fullmatch(name) is None:
            raise BadReferenceError("the reference names no segment: it must be one that the sender wrote itself")
        if offset >= _OFFSET_MAX or not LARGE_BYTES <= size_bytes < _OFFSET_MAX:
            raise BadReferenceError(
                f"the reference's offset {offset} or size {size_bytes} is out of range; send what has less than "
                f"{LARGE_BYTES} bytes as it is"
            )
        stored = self._hold(name)
        try:
            with self.opened(stored) as fd:
                found = os.fstat(fd)
        except OSError as error:
            raise BadReferenceError(
                f"segment {name} can't be opened ({error.strerror}); write it into the directory that the master "
                "offered, keep it locked, and refer to it then, or send the bytes themselves"
            ) from error
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_nlink != 1:
            raise BadReferenceError(f"segment {name} is not a plain file of the master's own user, with one name")
        if offset + size_bytes > found.st_size:
            raise BadReferenceError(
                f"segment {name} has {found.st_size} bytes, and the reference needs {offset + size_bytes}; "
                "write the bytes before you refer to them"
            )
        return Reference(stored, offset, size_bytes, crc)

    def restore(self, text: str) -> Reference | None:
        """Holds what a row refers to; None: it is gone."""
        name, offset, size_bytes, _, crc = parse_reference(text)
        try:
            whole = os.stat(name, dir_fd=self._dir_fd).st_size >= offset + size_bytes
        except FileNotFoundError:
            return None
        return Reference(self._hold(name), offset, size_bytes, crc) if whole else None

    def _hold(self, name: str) -> Stored:
        with self._lock:
            stored = self._stored.get(name)
            if stored is None:
                stored = self._stored[name] = Stored(self, name)
            return stored

    def opened(self, stored: Stored) -> _Opened:
        """The segment's file, for a `with`. OSError: there is none."""
        if stored.fd >= 0:
            return _Opened(stored.fd, close=False)
        # Not blocked by whatever else may have that name.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(stored.name, flags, dir_fd=self._dir_fd)
        with self._lock:
            if stored.fd < 0 and len(self._open) < OPEN_MAX:
                stored.fd = fd
                self._open.add(fd)
                return _Opened(fd, close=False)
        return _Opened(fd, close=True)

    def released(self, stored: Stored) -> None:
        """Nothing in the master refers to it any more. From any thread, between any two instructions: no lock here."""
        fd, stored.fd = stored.fd, -1  # another thread may have found it just before: it opens the file again
        if fd >= 0:
            self._open.discard(fd)
            os.close(fd)
        self._released.append(stored.name)

    # --- the disk ----------------------------------------------------------------------------------------------------

    def sync(self, references: Iterable[Reference]) -> None:
        """All these bytes are on the disk when this returns, by their names. On the journal's thread. OSError: no."""
        fresh = False
        for name, pin in {r.pin.name: r.pin for r in references}.items():
            assert isinstance(pin, Stored), "the master's references are to what it stored"
            with self.opened(pin) as fd:
                os.fdatasync(fd)
            fresh = fresh or name not in self._journaled
            self._journaled.add(name)
        if fresh:
            os.fsync(self._dir_fd)

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir() if NAME.fullmatch(path.name))

    def _measure(self) -> None:
        size_bytes = 0
        with os.scandir(self._dir_fd) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
        self.size_bytes = size_bytes

    # --- what may go -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting: dict[str, float] = {}  # released here, and until when to look whether its writer lets go too
        scan_at_s = 0.0
        while not self._closing.wait(BUSY_S if waiting or self._released else IDLE_S):
            now_s = time.monotonic()
            try:
                while self._released:
                    waiting[self._released.popleft()] = now_s + WAIT_S
                waiting = {n: end_s for n, end_s in waiting.items() if not self._delete_unused(n) and now_s < end_s}
                if now_s >= scan_at_s:
                    self._measure()
                    for name in self._part():
                        self._delete_unused(name)
                    if now_s > self._freed_s + FREE_S:
                        self._delete_free()
                    scan_at_s = now_s + SCAN_S
            except (OSError, JournalError) as error:
                log.warning("payloads can't be tidied up", directory=str(self.path), error=str(error))
                scan_at_s = now_s + SCAN_S

    def _part(self) -> list[str]:
        """The names to look at next, in turns."""
        names = self._names()
        part = [name for name in names if name > self._scan_from][:SCAN_SEGMENTS]
        self._scan_from = part[-1] if len(part) == SCAN_SEGMENTS else ""
        return part

    def _free_name(self) -> str | None:
        """A name under which a segment may be kept for the next writer; None: there are enough."""
        self._freed_s = time.monotonic()
        for name in FREE_NAMES:
            try:
                os.stat(name, dir_fd=self._dir_fd)
            except FileNotFoundError:
                return name
        return None

    def _delete_free(self) -> None:
        """Nobody has freed a segment for a while, so nobody is about to need one."""
        for name in FREE_NAMES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=self._dir_fd)

    def _delete_unused(self, name: str) -> bool:
        """True: it is gone, or needed for long. False: somebody holds it just now."""
        if name in self._stored:
            return True  # it will be released
        try:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            fd = os.open(name, flags, dir_fd=self._dir_fd)
        except FileNotFoundError:
            return True
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            # Nobody can refer to it anew now, but through what we hold. Rows first: what we held may have become one.
            if name in self._journaled and self._in_use(name):
                return True
            free = self._free_name() if os.fstat(fd).st_size >= SEGMENT_BYTES // 2 else None
            with self._lock:
                if name in self._stored:
                    return True
                os.rename(name, free or _TRASH, src_dir_fd=self._dir_fd, dst_dir_fd=self._dir_fd)
            self._journaled.discard(name)
            if free is None:
                os.unlink(_TRASH, dir_fd=self._dir_fd)
            return True
        finally:
            os.close(fd)


# As rows of the journal have a reference; a body's also has, in hexadecimal, the bytes that come before, and a
# payload's its CRC, if that is known.


def reference_text(reference: Reference, head: bytes = b"") -> str:
    crc = f":{reference.crc:x}" if reference.crc >= 0 else ""
    return f"{reference.pin.name}:{reference.offset:x}:{reference.size_bytes:x}:{head.hex()}{crc}"


def is_shared(text: str) -> bool:
    """Whether that is one of ours, and not one to a segment of the journal's own."""
    return "-" in text


def parse_reference(text: str) -> tuple[str, int, int, bytes, int]:
    """Segment, offset, size, head, and CRC or -1. ValueError: it is none of ours."""
    name, offset, size, head, *crc = text.split(":")
    if NAME.fullmatch(name) is None:
        raise ValueError(f"{name[:100]!r} is no name of a segment")
    return name, int(offset, 16), int(size, 16), bytes.fromhex(head), int(crc[0], 16) if crc else -1
