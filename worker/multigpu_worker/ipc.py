"""How agent and engine talk: frames over a socket pair, and a page of shared memory.

Frames carry batches down and reports up. A frame is a tuple of plain values in `marshal`: the fastest encoding in the
standard library (about 0.1 us a value), unsafe between strangers and unstable between Python versions, and neither
matters here: both ends are the same interpreter, started by one another, and whoever can write to the socket is already
inside. Bytes of 32 KiB and more travel beside the tuple instead of inside it, so that they are not copied through it.

The shared page holds, for each slot, what the engine is running at this instant. The engine writes it with three stores
and no system call, so it is true even for an engine that hangs or has just died, and that is what it is for: the agent
reads it to enforce timeouts and to blame a death on the right lease.
"""

import marshal
import mmap
import os
import socket
import struct
from dataclasses import dataclass
from typing import Any

# Bytes values at least this long travel beside the frame's tuple.
BLOB_BYTES_MIN = 32 << 10
# No frame is larger: a batch's payloads are bounded by the window, a report's by the result limit.
FRAME_BYTES_MAX = 1 << 30

_HEAD = struct.Struct("<II")  # bytes of the tuple, number of blobs
_RECEIVE_BYTES = 256 << 10

Message = tuple[Any, ...]


def encode(message: Message, blobs: list[bytes]) -> list[bytes]:
    """Make a frame, as the buffers to write one after the other."""
    body = marshal.dumps(message)
    head = _HEAD.pack(len(body), len(blobs))
    if not blobs:
        return [head + body]
    return [head + struct.pack(f"<{len(blobs)}Q", *map(len, blobs)) + body, *blobs]


def put(data: bytes, blobs: list[bytes]) -> bytes | int:
    """Choose the way of a bytes value: inside the tuple as it is, or beside it, and its number inside."""
    if len(data) < BLOB_BYTES_MIN:
        return data
    blobs.append(data)
    return len(blobs) - 1


def _receive_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Block until so many bytes are there. EOFError: the other end is gone."""
    if size_bytes == 0:
        return b""
    # MSG_WAITALL fills one buffer of the right size, and that buffer is the value: nothing is copied afterwards.
    data = sock.recv(size_bytes, socket.MSG_WAITALL)
    if len(data) == size_bytes:
        return data
    parts = [data]
    missing = size_bytes - len(data)
    while missing:
        if not data:
            raise EOFError
        data = sock.recv(missing, socket.MSG_WAITALL)
        parts.append(data)
        missing -= len(data)
    return b"".join(parts)


def receive(sock: socket.socket) -> tuple[Message, list[bytes]]:
    """Block until one frame is there. EOFError: the other end is gone."""
    body_bytes, blob_count = _HEAD.unpack(_receive_exactly(sock, _HEAD.size))
    sizes = struct.unpack(f"<{blob_count}Q", _receive_exactly(sock, 8 * blob_count))
    message = marshal.loads(_receive_exactly(sock, body_bytes))  # noqa: S302  from our own process, see above
    return message, [_receive_exactly(sock, size) for size in sizes]


def send(sock: socket.socket, buffers: list[bytes]) -> None:
    """Block until the buffers are written."""
    for buffer in buffers:
        sock.sendall(buffer)


class Decoder:
    """Frames out of a non-blocking socket, in whatever pieces they come."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, sock: socket.socket) -> list[tuple[Message, list[bytes]]]:
        """Take what the socket holds now, up to some 256 KiB, and return the frames that are complete.

        BlockingIOError: it holds nothing. EOFError: the other end is gone.
        """
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._buffer += data
        frames = []
        start = 0
        with memoryview(self._buffer) as view:
            while (end := _frame_end(view, start)) is not None:
                frames.append(_decode(view[start:end]))
                start = end
        if start:
            del self._buffer[:start]
        return frames


def _frame_end(view: memoryview, start: int) -> int | None:
    """Where the frame at `start` ends, or None while it isn't all there."""
    if len(view) - start < _HEAD.size:
        return None
    body_bytes, blob_count = _HEAD.unpack_from(view, start)
    if len(view) - start < _HEAD.size + 8 * blob_count:
        return None
    sizes = struct.unpack_from(f"<{blob_count}Q", view, start + _HEAD.size)
    end = start + _HEAD.size + 8 * blob_count + body_bytes + sum(sizes)
    assert end - start <= FRAME_BYTES_MAX
    return end if len(view) >= end else None


def _decode(frame: memoryview) -> tuple[Message, list[bytes]]:
    body_bytes, blob_count = _HEAD.unpack_from(frame, 0)
    sizes = struct.unpack_from(f"<{blob_count}Q", frame, _HEAD.size)
    at = _HEAD.size + 8 * blob_count
    message = marshal.loads(frame[at : at + body_bytes])  # noqa: S302  from our own process, see above
    at += body_bytes
    blobs = []
    for size in sizes:
        blobs.append(bytes(frame[at : at + size]))
        at += size
    return message, blobs


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


class SlotPage:
    """The shared page. The engine's side writes by `view[offset(slot) + field]`, the agent's side samples."""

    BATCH, LEASE, STARTED, BEATS = range(4)
    FIELDS = 8  # one cache line a slot, so that slots don't slow one another

    def __init__(self, fd: int, slots: int) -> None:
        self.fd = fd
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

    def clear(self) -> None:
        """Forget everything: a new engine begins."""
        for at in range(len(self.view)):
            self.view[at] = 0

    def close(self) -> None:
        self.view.release()
        self._map.close()
        os.close(self.fd)
