"""How agent and engine talk: frames over a socket pair, and a page of shared memory.

Frames carry batches down and reports up. A frame is a tuple of plain values in `marshal`: the fastest encoding in the
standard library (about 0.1 us a value), unsafe between strangers and unstable between Python versions, and neither
matters here: both ends are the same interpreter, started by one another, and whoever can write to the socket is already
inside. User code is inside too, and may write to the wrong descriptor: a frame's head carries a check of itself and its
tuple ends with four fixed bytes, so that nothing of what a stray write has shifted is waited for, or reaches marshal,
which some bytes keep busy for ever. What can't be read is a FrameError, upon which the agent ends the engine. Bytes of
32 KiB and more (blobs) don't go through the tuple: they lie in shared memory (blobs.py), or follow the frame if there
is no room.

The shared page holds, for each slot, what the engine is running at this instant. The engine writes it with three stores
and no system call, so it is true even for an engine that hangs or has just died, and that is what it is for: the agent
reads it to enforce timeouts and to blame a death on the right lease.
"""

import marshal
import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any

from multigpu_worker.processes.blobs import BlobRing

# Bytes values at least this long travel beside the frame's tuple.
BLOB_BYTES_MIN = 32 << 10

_HEAD = struct.Struct("<III")  # check of the rest, bytes of the tuple, number of blobs
_TAIL = b"mgpu"
_BLOB = struct.Struct("<QQ")  # bytes, place in the ring
# In the place of a place: the blob follows the frame.
_FOLLOWS = (1 << 64) - 1
_RECEIVE_BYTES = 256 << 10

Message = tuple[Any, ...]


class FrameError(Exception):
    """What came is not a frame: the other end is damaged, or somebody else wrote to its socket."""


def _check(body_bytes: int, blob_count: int) -> int:
    return (0x9E3779B1 * (body_bytes + 1) ^ 0x85EBCA6B * (blob_count + 1)) & 0xFFFFFFFF


def put(data: bytes, blobs: list[bytes]) -> bytes | int:
    """Choose the way of a bytes value: inside the tuple as it is, or beside it, and its number inside."""
    if len(data) < BLOB_BYTES_MIN:
        return data
    blobs.append(data)
    return len(blobs) - 1


def encode(message: Message, blobs: list[bytes], ring: BlobRing) -> list[bytes]:
    """Make a frame, as the buffers to write one after the other. Frames must be written in the order they were made."""
    body = marshal.dumps(message) + _TAIL  # which marshal.loads ignores
    head = _HEAD.pack(_check(len(body), len(blobs)), len(body), len(blobs))
    if not blobs:
        return [head + body]
    places = [ring.write(blob) for blob in blobs]
    table = b"".join(
        _BLOB.pack(len(blob), _FOLLOWS if place is None else place) for blob, place in zip(blobs, places, strict=True)
    )
    following = [blob for blob, place in zip(blobs, places, strict=True) if place is None]
    return [head + table + body, *following]


def send(sock: socket.socket, buffers: list[bytes]) -> None:
    """Block until the buffers are written."""
    for buffer in buffers:
        sock.sendall(buffer)


def receive(sock: socket.socket, ring: BlobRing) -> tuple[Message, list[bytes]]:
    """Block until one frame is there. EOFError: the other end is gone."""
    check, body_bytes, blob_count = _HEAD.unpack(_receive_exactly(sock, _HEAD.size))
    if check != _check(body_bytes, blob_count):
        raise FrameError("a frame does not begin as it should")
    table = _receive_exactly(sock, blob_count * _BLOB.size) if blob_count else b""
    body = _receive_exactly(sock, body_bytes)
    if not body.endswith(_TAIL):
        raise FrameError("a frame does not end as it should")
    message = marshal.loads(body)  # noqa: S302  from our own process, see above
    return message, [
        _receive_exactly(sock, size_bytes) if place == _FOLLOWS else ring.read(place, size_bytes)
        for size_bytes, place in _BLOB.iter_unpack(table)
    ]


def _receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Block until so many bytes are there. EOFError: the other end is gone."""
    # MSG_WAITALL fills one buffer of the right size, and that buffer is the value: nothing is copied afterwards.
    data = sock.recv(size_bytes, socket.MSG_WAITALL)
    if len(data) == size_bytes:
        return data
    parts = [data]
    missing = size_bytes - len(data)
    while missing:
        if not parts[-1]:
            raise EOFError
        parts.append(sock.recv(missing, socket.MSG_WAITALL))
        missing -= len(parts[-1])
    return b"".join(parts)


class Decoder:
    """Frames out of a non-blocking socket, in whatever pieces they come."""

    def __init__(self, ring: BlobRing) -> None:
        self._ring = ring
        self._buffer = bytearray()

    def feed(self, sock: socket.socket) -> list[tuple[Message, list[bytes]]]:
        """Take what the socket holds now, up to some 256 KiB, and return the frames that are complete.

        BlockingIOError: it holds nothing. EOFError: the other end is gone. FrameError: it holds something else.
        """
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._buffer += data
        frames = []
        start = 0
        with memoryview(self._buffer) as view:
            while (found := self._decode(view, start)) is not None:
                message, blobs, start = found
                frames.append((message, blobs))
        if start:
            del self._buffer[:start]
        return frames

    def _decode(self, view: memoryview, start: int) -> tuple[Message, list[bytes], int] | None:
        """The frame at `start` and where it ends, or None while it isn't all there."""
        if len(view) < start + _HEAD.size:
            return None
        check, body_bytes, blob_count = _HEAD.unpack_from(view, start)
        if check != _check(body_bytes, blob_count):
            raise FrameError("a frame does not begin as it should")
        table_at = start + _HEAD.size
        body_at = table_at + blob_count * _BLOB.size
        at = body_at + body_bytes
        if len(view) < at:
            return None
        if view[max(at - len(_TAIL), body_at) : at] != _TAIL:
            raise FrameError("a frame does not end as it should")
        table = list(_BLOB.iter_unpack(view[table_at:body_at]))
        if len(view) < at + sum(size_bytes for size_bytes, place in table if place == _FOLLOWS):
            return None
        try:
            message = marshal.loads(view[body_at:at])  # noqa: S302  from our own process, see above
        except (EOFError, ValueError, TypeError) as error:
            raise FrameError(f"the content of a frame can't be read: {error}") from error
        blobs = []
        for size_bytes, place in table:
            if place == _FOLLOWS:
                blobs.append(bytes(view[at : at + size_bytes]))
                at += size_bytes
            else:
                try:
                    blobs.append(self._ring.read(place, size_bytes))
                except ValueError as error:
                    raise FrameError(str(error)) from error
        return message, blobs, at


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotState:
    """What one slot is doing."""

    # 0: idle.
    batch_id: int
    # The item that runs. 0: between two items, or the batch runs together.
    lease_id: int
    # When it began (the batch, where it runs together), in nanoseconds of CLOCK_MONOTONIC, which both processes share.
    started_ns: int
    # Grows whenever the engine says that work moves.
    beats: int

    def ran_ns(self) -> int:
        """How long ago it began; 0: it is idle."""
        return time.monotonic_ns() - self.started_ns if self.batch_id else 0


class SlotPage:
    """The shared page. The engine's side writes by `view[offset(slot) + field]`, the agent's side samples."""

    BATCH, LEASE, STARTED, BEATS, PREPARED = range(5)
    FIELDS = 8  # one cache line a slot, so that slots don't slow one another

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
        # How many there is room for, and how many are in use.
        self.capacity = slots
        self.slots = slots
        self._map = mmap.mmap(fd, slots * self.FIELDS * 8)
        self.view = memoryview(self._map).cast("Q")

    @classmethod
    def create(cls, slots: int) -> "SlotPage":
        fd = os.memfd_create("multigpu-slots", os.MFD_CLOEXEC)
        os.ftruncate(fd, slots * cls.FIELDS * 8)
        return cls(fd, slots)

    def sample(self) -> list[SlotState]:
        """What each slot is doing now."""
        return [self._sample_slot(slot * self.FIELDS) for slot in range(self.slots)]

    def _sample_slot(self, at: int) -> SlotState:
        # The writer clears the lease before it moves the clock, so a lease that reads the same before and after goes
        # with the time between.
        while True:
            lease_id = self.view[at + self.LEASE]
            batch_id = self.view[at + self.BATCH]
            started_ns = self.view[at + self.STARTED]
            beats = self.view[at + self.BEATS]
            if self.view[at + self.LEASE] == lease_id and self.view[at + self.BATCH] == batch_id:
                return SlotState(batch_id=batch_id, lease_id=lease_id, started_ns=started_ns, beats=beats)

    def prepared(self) -> int:
        """The batch that is being prepared now; 0: none is. It stands in the first slot's line."""
        return int(self.view[self.PREPARED])

    def clear(self) -> None:
        """Forget everything: a new engine begins."""
        for at in range(len(self.view)):
            self.view[at] = 0

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)
