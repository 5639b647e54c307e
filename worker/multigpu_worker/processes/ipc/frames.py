"""Frames between agent and engine, over a socket pair: batches down, reports up.

A frame is a tuple of plain values in `marshal`: the fastest encoding in the standard library (about 0.1 us a value). It
is unsafe with untrusted peers and differs between Python versions; here both ends run the same interpreter, and code
that can write to the socket has the same rights. User code may write to the wrong descriptor by mistake. So a frame's
head contains a checksum of its other fields, and four fixed bytes follow the tuple. After a stray write the decoder
therefore raises FrameError; it neither waits for more bytes nor passes wrong bytes to marshal, which some inputs keep
busy for ever. The agent ends an engine after a FrameError.

Values of 32 KiB and more (blobs) are in shared memory (blobs.py) or, if that is full, after the tuple.
"""

import marshal
import socket
import struct
from collections.abc import Sequence
from typing import Any

from multigpu_worker.processes.ipc.blobs import BlobRing

BLOB_BYTES_MIN = 32 << 10

_HEAD = struct.Struct("<III")  # checksum of the other two, bytes of the tuple with its tail, number of blobs
_TAIL = b"mgpu"
_BLOB = struct.Struct("<QQ")  # bytes, place in the ring
# Instead of a place in the ring: the blob follows the tuple.
_FOLLOWS = (1 << 64) - 1
_RECEIVE_BYTES = 256 << 10

Message = tuple[Any, ...]


class FrameError(Exception):
    """The bytes are no frame: the other end is damaged, or other code wrote to its socket."""


def _check(body_bytes: int, blob_count: int) -> int:
    return (0x9E3779B1 * (body_bytes + 1) ^ 0x85EBCA6B * (blob_count + 1)) & 0xFFFFFFFF


def put(data: bytes, blobs: list[bytes]) -> bytes | int:
    """A bytes value as the tuple holds it: itself, or its number among the blobs."""
    if len(data) < BLOB_BYTES_MIN:
        return data
    blobs.append(data)
    return len(blobs) - 1


def encode(message: Message, blobs: Sequence[bytes], ring: BlobRing) -> list[bytes]:
    """A frame, as buffers to write one after the other. Frames must be written in the order in which they are made."""
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


class Decoder:
    """Frames from a socket, in whatever pieces they come."""

    def __init__(self, ring: BlobRing) -> None:
        self._ring = ring
        self._buffer = bytearray()
        # The bytes after the frames that `feed` has returned are no frame: the next call raises it.
        self.error: FrameError | None = None

    def feed(self, sock: socket.socket) -> list[tuple[Message, list[bytes]]]:
        """Read from the socket once, up to 256 KiB, and return the frames that are complete.

        Raises BlockingIOError if a non-blocking socket has no data, EOFError if the other end is closed, FrameError.
        Frames that were complete before the damage are returned first; then `error` is set.
        """
        if self.error is not None:
            raise self.error
        data = sock.recv(_RECEIVE_BYTES)
        if not data:
            raise EOFError
        self._buffer += data
        frames: list[tuple[Message, list[bytes]]] = []
        start = 0
        try:
            with memoryview(self._buffer) as view:
                while (found := self._decode(view, start)) is not None:
                    message, blobs, start = found
                    frames.append((message, blobs))
        except FrameError as error:
            self.error = error
            if not frames:
                raise
            return frames
        if start:
            del self._buffer[:start]
        return frames

    def _decode(self, view: memoryview, start: int) -> tuple[Message, list[bytes], int] | None:
        """The frame at `start` and where it ends; None: it is incomplete. Raises FrameError."""
        if len(view) < start + _HEAD.size:
            return None
        check, body_bytes, blob_count = _HEAD.unpack_from(view, start)
        if check != _check(body_bytes, blob_count):
            raise FrameError("a frame begins wrong")
        table_at = start + _HEAD.size
        body_at = table_at + blob_count * _BLOB.size
        at = body_at + body_bytes
        if len(view) < at:
            return None
        if view[max(at - len(_TAIL), body_at) : at] != _TAIL:
            raise FrameError("a frame ends wrong")
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
