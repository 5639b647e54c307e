"""The map of the synchronous client: the caller's thread pulls, encodes and takes; the loop's sends and settles."""

import concurrent.futures
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from multigpu._calls.mapping import CHUNK_TASKS, MapBuffer, MapCall
from multigpu._calls.timeouts import timed_out
from multigpu._transport.loop_thread import LoopThread
from multigpu._transport.run_state import Answer
from multigpu._transport.run_stream import RunStream

T = TypeVar("T")


class SyncMap:
    def __init__(self, thread: LoopThread, stream: RunStream, buffer: MapBuffer) -> None:
        self._thread = thread
        self._stream = stream
        self._buffer = buffer
        self._event = threading.Event()
        # The chunk that the stream's window has not admitted yet; there is at most one.
        self._starting: concurrent.futures.Future[None] | None = None
        # True once the caller has left: a chunk that the loop has not begun to start never starts.
        self._left = False
        # Wakes the caller once the loop thread has handled the whole frame, not at the frame's first outcome.
        buffer.wake = lambda: thread.loop.call_soon(self._event.set)

    def run(self, source: Iterator[Any], convert: Callable[[Answer], T]) -> Iterator[T]:
        """Yields convert(answer) for each item. Closing it, or an error, withdraws what it started."""
        buffer = self._buffer
        try:
            while True:
                self._thread.check()
                fed = self._feed(source)
                taken = 0
                while taken < CHUNK_TASKS and (answer := buffer.take()) is not None:
                    yield convert(answer)
                    taken += 1
                if buffer.finished:
                    return
                if not (fed or taken):
                    self._wait()
        finally:
            if not buffer.finished:
                self._withdraw()

    def _feed(self, source: Iterator[Any]) -> bool:
        """Starts another chunk if the last one was admitted and another may be pulled. False: it did not."""
        starting = self._starting
        if starting is not None:
            if not starting.done():
                return False
            self._starting = None
            starting.result()
        if self._buffer.exhausted or not self._buffer.has_capacity():
            return False
        chunk = self._buffer.pull(source)
        if chunk:
            self._starting = self._thread.submit(self._start(chunk))
            self._starting.add_done_callback(lambda _: self._event.set())
        return True

    async def _start(self, chunk: list[MapCall]) -> None:
        if not self._left:
            await self._stream.start(chunk)

    def _wait(self) -> None:
        """Returns when there may be something to take or to feed."""
        buffer = self._buffer
        self._event.clear()
        buffer.waiting = True
        starting = self._starting
        can_feed = starting is not None and starting.done()
        if not can_feed and not buffer.has_answer() and not self._event.wait(buffer.timeout_s):
            assert buffer.timeout_s is not None, "without a timeout wait() returns True"
            raise timed_out(buffer.timeout_s)
        buffer.waiting = False

    def _withdraw(self) -> None:
        if self._thread.inherited:
            return
        # First: cancelling a coroutine that the loop has yet to begin comes too late for its first step.
        self._left = True
        if self._starting is not None:
            self._starting.cancel()
        if not self._thread.loop.is_closed():
            self._thread.loop.call_soon_threadsafe(self._stream.withdraw_where, self._buffer.owns)
