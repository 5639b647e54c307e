"""Large payloads and results cross between agent and engine through shared memory, one copy in and one copy out.

A socket would take a megabyte in a dozen pieces, with a wake-up of both processes for each. Here one side writes a blob
into a ring and names its place in the next frame; the other side reads the blob when the frame comes. Frames come in
order, so the reader frees the ring by one number in shared memory: how far it has read. If the ring has no room for a
blob at the moment, the blob is sent through the socket.
"""

import mmap
import os

RING_BYTES = 32 << 20
_HEAD_BYTES = mmap.PAGESIZE


class BlobRing:
    """One direction. A place is a count of bytes since the beginning; modulo the ring's size it is an offset."""

    def __init__(self, memory: "BlobMemory", direction: int) -> None:
        self._ring = memory.view[_HEAD_BYTES + direction * RING_BYTES : _HEAD_BYTES + (direction + 1) * RING_BYTES]
        # How far the reader has read.
        self._read_to = memory.view[direction * 8 : direction * 8 + 8].cast("Q")
        self._written_to = 0

    def write(self, data: bytes) -> int | None:
        """Write a blob. Returns its place, or None if there is no room now."""
        size_bytes = len(data)
        if size_bytes > RING_BYTES:
            return None
        read_to = self._read_to[0]
        place = self._written_to
        offset = place % RING_BYTES
        empty = read_to == place
        if empty or offset + size_bytes > RING_BYTES:
            # Begin at the front: to reuse cached memory, or because a blob must be contiguous.
            place += -place % RING_BYTES
            offset = 0
        if empty:
            read_to = place
        if place + size_bytes - read_to > RING_BYTES:
            return None
        self._ring[offset : offset + size_bytes] = data
        self._written_to = place + size_bytes
        return place

    def read(self, place: int, size_bytes: int) -> bytes:
        """Read a blob and free its room. Blobs must be read in the order in which they were written.

        Raises ValueError if no blob of this size can lie there.
        """
        offset = place % RING_BYTES
        if offset + size_bytes > RING_BYTES or place + size_bytes >= 1 << 64:
            raise ValueError(f"a blob of {size_bytes} bytes can't lie at {place}")
        data = bytes(self._ring[offset : offset + size_bytes])
        self._read_to[0] = place + size_bytes
        return data

    def close(self) -> None:
        self._ring.release()
        self._read_to.release()


class BlobMemory:
    """The memory of both rings: an unnamed file. Only the pages that are used take memory."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, _HEAD_BYTES + 2 * RING_BYTES)
        self.view = memoryview(self._map)
        # From agent to engine, and from engine to agent.
        self.down = BlobRing(self, 0)
        self.up = BlobRing(self, 1)

    @classmethod
    def create(cls) -> "BlobMemory":
        fd = os.memfd_create("multigpu-blobs", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEAD_BYTES + 2 * RING_BYTES)
        return cls(fd)

    def close(self) -> None:
        self.down.close()
        self.up.close()
        self.view.release()
        self._map.close()
        os.close(self.fd)
