"""The messages that wait to be sent on a bidirectional stream.

Callers add items to the open frame. While the writer writes a frame, items gather in the open frame, and the next write
sends them together. There is no timer, and on an idle stream no added latency.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from multigpu_master.errors import CallError
from multigpu_master.wire.payloads import Peer

# Limits of a frame. The items of one call of `frame_for` stay in one frame, even if they pass these limits.
FRAME_BYTES = 4 << 20
FRAME_ITEMS = 2048

F = TypeVar("F")


class Outbox(Generic[F]):
    """Frames of one type for one stream. Callers fill what `frame_for` returns; the writer takes frames with `next`."""

    def __init__(self, frame_type: Callable[[], F], peer: Peer) -> None:
        self.peer = peer
        self._type = frame_type
        self._full: deque[tuple[F, int]] = deque()
        self._open = frame_type()
        self._open_items = 0
        self._open_bytes = 0
        self._wake: asyncio.Future[None] | None = None
        self._frame_taken = asyncio.Event()
        self._frame_taken.set()
        self._finished = False
        # Has the error of the first `abort` as its result.
        self.aborted: asyncio.Future[CallError] = asyncio.get_running_loop().create_future()
        self.bytes = 0  # size of all waiting items
        # By task_id: index of the first partial output to send. The peer got the earlier ones on an earlier stream.
        self.partials_from: dict[int, int] = {}
        self.peer_name = ""  # the name of the client, or of the worker's process, at the other end
        self.pending_outcomes = 0  # outcomes that the peer waits for
        self._none_pending = asyncio.Event()

    def frame_for(self, size: int, items: int = 1) -> F:
        """Counts items of this total size as waiting, wakes the writer, and returns the open frame. The caller must add
        the items to the frame before the next await.
        """
        if self._open_items and (self._open_items >= FRAME_ITEMS or self._open_bytes + size > FRAME_BYTES):
            self._full.append((self._open, self._open_bytes))
            self._open = self._type()
            self._open_items = self._open_bytes = 0
        self._open_items += items
        self._open_bytes += size
        self.bytes += size
        wake = self._wake
        if wake is not None and not wake.done():
            wake.set_result(None)
        return self._open

    async def next(self) -> F | None:
        """Waits for the next frame to write, removes and returns it. Returns None if the stream has finished."""
        while True:
            if self._full:
                frame, size = self._full.popleft()
                break
            if self._open_items:
                frame, size = self._open, self._open_bytes
                self._open = self._type()
                self._open_items = self._open_bytes = 0
                break
            if self._finished:
                return None
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            self._wake = None
        self.bytes -= size
        self._frame_taken.set()
        return frame

    def finish(self) -> None:
        """Ends the stream with OK after the waiting frames are sent."""
        self._finished = True
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def abort(self, error: CallError) -> None:
        """Ends the stream with this error at once, and drops the waiting frames. The first error counts."""
        self._full.clear()
        self._open = self._type()
        self._open_items = self._open_bytes = self.bytes = 0
        self._frame_taken.set()
        if not self.aborted.done():
            self.aborted.set_result(error)

    def add_pending(self, count: int) -> None:
        """Changes the number of outcomes that the peer waits for."""
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
        while self.bytes > limit_bytes:
            self._frame_taken.clear()
            await self._frame_taken.wait()
