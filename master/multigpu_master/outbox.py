"""The messages that wait to be sent on a bidirectional stream.

Callers add items to the newest waiting frame. While the writer writes a frame, items gather in the next frame. No timer
delays frames, so an idle stream adds no latency.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from multigpu_master.errors import CallError
from multigpu_master.wire.payloads import Peer

# Limits of a frame. The items of one call of `frame_for` stay in one frame, even if they exceed these limits.
FRAME_BYTES = 4 << 20
FRAME_ITEMS = 2048

F = TypeVar("F")


class _Waiting(Generic[F]):
    def __init__(self, frame: F) -> None:
        self.frame = frame
        self.items = self.size_bytes = 0


class Outbox(Generic[F]):
    """Frames of one type for one stream. Callers fill what `frame_for` returns; the writer takes frames with `next`."""

    def __init__(self, frame_type: Callable[[], F], peer: Peer) -> None:
        self.peer = peer
        self._frame_type = frame_type
        self._waiting: deque[_Waiting[F]] = deque()  # the newest last
        self._wake: asyncio.Future[None] | None = None
        self._frame_removed = asyncio.Event()
        self._frame_removed.set()
        self._finished = False
        # Has the error of the first `abort` as its result.
        self.aborted: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()
        self.waiting_bytes = 0  # total size of the waiting items
        # By task_id: index of the first partial output to send. The peer got earlier outputs on an earlier stream.
        self.partials_from: dict[int, int] = {}
        self.peer_name = ""  # the name of the client, or of the worker's process, at the other end
        self.pending_outcomes = 0  # outcomes that the peer waits for
        self._none_pending = asyncio.Event()

    def frame_for(self, size: int, items: int = 1) -> F:
        """Counts `items` items of `size` bytes in total as waiting, wakes the writer, and returns the frame to which
        the caller must add the items before the next await.
        """
        newest = self._waiting[-1] if self._waiting else None
        if newest is None or newest.items >= FRAME_ITEMS or newest.size_bytes + size > FRAME_BYTES:
            newest = _Waiting(self._frame_type())
            self._waiting.append(newest)
        newest.items += items
        newest.size_bytes += size
        self.waiting_bytes += size
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)
        return newest.frame

    async def next(self) -> F | None:
        """Waits for the next frame to write, removes and returns it. Returns None if the stream has finished."""
        while not self._waiting:
            if self._finished:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None
        first = self._waiting.popleft()
        self.waiting_bytes -= first.size_bytes
        self._frame_removed.set()
        return first.frame

    def finish(self) -> None:
        """Ends the stream with OK after the waiting frames are sent."""
        self._finished = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def abort(self, error: CallError) -> None:
        """Ends the stream with this error at once, and drops the waiting frames. The first error counts."""
        self._waiting.clear()
        self.waiting_bytes = 0
        self._frame_removed.set()
        if not self.aborted.done():
            self.aborted.set_result(error)

    def add_pending(self, count: int) -> None:
        """Adds `count`, which may be negative, to `pending_outcomes`."""
        self.pending_outcomes += count
        if self.pending_outcomes <= 0:
            self._none_pending.set()

    async def wait_none_pending(self) -> None:
        """Returns when there are no pending outcomes."""
        if self.pending_outcomes > 0:
            self._none_pending.clear()
            await self._none_pending.wait()

    async def wait_below(self, limit_bytes: int) -> None:
        """Returns when the size of all waiting items is at most `limit_bytes`."""
        while self.waiting_bytes > limit_bytes:
            self._frame_removed.clear()
            await self._frame_removed.wait()
