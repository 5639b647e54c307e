"""What a map holds between its input and its caller, and the loops of both clients around it.

A MapBuffer bounds what has been pulled from the input and not yet been taken by the caller, by count and by bytes: a
million-item map holds its window and no more. Pulling happens in chunks of what the source yields within two
milliseconds: a fast source costs little for each item, a slow one does not hold up results that are ready.

The loop thread settles calls. The caller's side pulls inputs and takes results, and may run on another thread (the
synchronous client). Therefore each counter has one writer, and the sides meet only in a deque and in fields that are
written once.
"""

import asyncio
import concurrent.futures
import contextlib
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

from multigpu._calls.timeouts import CANCELLED, timeout_error, within
from multigpu._transport.call import Answer, Call
from multigpu._transport.loop_thread import LoopThread
from multigpu._transport.run_stream import RunStream
from multigpu.errors import ClientClosedError
from multigpu.outcome import Outcome

CHUNK_TASKS = 256
# A chunk ends at this share of the window, so that large payloads go to the master a few at a time.
_CHUNK_BYTES_MIN, _CHUNK_SHARE = 1 << 20, 8
_CHUNK_S = 0.002
# How long a map may pull from an iterator before it returns.
_BEGIN_S = 0.1
T = TypeVar("T")


class MapCall(Call):
    """One item of a map."""

    __slots__ = ("answer", "buffer")

    def __init__(self, spec: Any, payload: bytes, request_id: str, own: Any, buffer: "MapBuffer") -> None:
        super().__init__(spec, payload, request_id, own)
        self.buffer = buffer
        self.answer: Answer | None = None

    def settle(self, answer: Answer) -> None:
        self.payload = b""  # the buffer holds the answer's bytes in its place
        self.place = None
        self.answer = answer
        self.buffer.settled(self, answer)


class MapBuffer:
    """`make_call` makes the call of an item; `timeout_s` limits the wait for each next answer, or with `total` all
    waits together.
    """

    def __init__(
        self, make_call: "MakeCall", *, ordered: bool, tasks_max: int, bytes_max: int, timeout_s: float | None,
        total: bool = False, fate: str = CANCELLED,
    ) -> None:  # fmt: skip
        assert tasks_max > 0
        self.make_call = make_call
        self.timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s if total and timeout_s is not None else None
        self.fate = fate
        self._ordered = ordered
        self._tasks_max = tasks_max
        self._bytes_max = bytes_max
        self._chunk_bytes = max(_CHUNK_BYTES_MIN, bytes_max // _CHUNK_SHARE)
        self._chunk_tasks = min(CHUNK_TASKS, max(1, tasks_max // 4))
        # Ordered: every call not taken, in the order of the input. Otherwise: the answered ones, as completed.
        self._line: deque[MapCall] = deque()
        # Called on the loop thread when something was settled while the taker waits.
        self.wake: Callable[[], object] = lambda: None
        self.waiting = False
        self.exhausted = False
        # Whether the caller has begun to take results.
        self.begun = False
        # Written by the side that pulls and takes.
        self._pulled = self._taken = 0
        self._pulled_bytes = self._taken_bytes = 0
        # Written by the loop thread.
        self._answered_bytes = self._answer_bytes = 0

    @property
    def finished(self) -> bool:
        return self.exhausted and self._pulled == self._taken

    @property
    def pulled(self) -> int:
        """How many items have been pulled."""
        return self._pulled

    def wait_s(self) -> float | None:
        """How long the next wait may take; None: no limit."""
        return self.timeout_s if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def has_capacity(self) -> bool:
        """Whether another chunk may be pulled."""
        if self._tasks_max - self._pulled + self._taken < self._chunk_tasks:
            return False
        held_bytes = self._pulled_bytes - self._answered_bytes + self._answer_bytes - self._taken_bytes
        return held_bytes < self._bytes_max

    def pull(self, source: Iterator[Any]) -> list[MapCall]:
        """The next chunk of the source, as calls to be started."""
        chunk: list[MapCall] = []
        nbytes = 0
        make_call = self.make_call
        stop = time.monotonic() + _CHUNK_S
        for item in source:
            call = make_call(item, self)
            self.add(call)
            if call.answer is None:
                chunk.append(call)
                nbytes += call.nbytes
            if len(chunk) >= self._chunk_tasks or nbytes >= self._chunk_bytes or time.monotonic() > stop:
                return chunk
        self.exhausted = True
        return chunk

    def add(self, call: MapCall) -> None:
        """Adds a call that was pulled. One that has its answer already (it could not be encoded) needs no start."""
        self._pulled += 1
        if call.answer is None:
            self._pulled_bytes += call.nbytes
        if self._ordered or call.answer is not None:
            self._line.append(call)

    def settled(self, call: MapCall, answer: Answer) -> None:
        self._answered_bytes += call.nbytes
        self._answer_bytes += answer.frame_bytes if isinstance(answer, Outcome) else 0
        if not self._ordered:
            self._line.append(call)
        if self.waiting:
            self.waiting = False
            self.wake()

    def owns(self, call: Call) -> bool:
        """Whether the call is an item of this map."""
        return isinstance(call, MapCall) and call.buffer is self

    def has_answer(self) -> bool:
        """Whether `take` has something."""
        line = self._line
        return bool(line) and line[0].answer is not None

    def take(self) -> Answer | None:
        """The next answer for the caller; None: there is none yet."""
        line = self._line
        answer = line[0].answer if line else None
        if answer is None:
            return None
        line.popleft()
        self._taken += 1
        if isinstance(answer, Outcome):
            self._taken_bytes += answer.frame_bytes
        return answer


MakeCall = Callable[[Any, MapBuffer], MapCall]


class AsyncMap:
    """A map on one event loop: a feeder task pulls and starts, the caller's loop takes."""

    def __init__(self, stream: RunStream, buffer: MapBuffer) -> None:
        self._stream = stream
        self._buffer = buffer
        self._taker: asyncio.Future[None] | None = None
        self._feeder_waits: asyncio.Future[None] | None = None
        # The caller has dropped the map without reading it.
        self._unread = False
        buffer.wake = self._wake_taker

    def run(
        self, source: Iterable[Any] | AsyncIterable[Any], convert: Callable[[Answer], T]
    ) -> AsyncGenerator[T, None]:
        """Begins to start the items. Yields convert(answer) for each. Closing it, or an error, withdraws what it
        started; if it was never read, the items that the window admits run.
        """
        self._stream.check()
        loop = asyncio.get_running_loop()
        feed = self._feed_async(source) if isinstance(source, AsyncIterable) else self._feed(iter(source))
        feeder = loop.create_task(feed, name="multigpu map feeder")
        feeder.add_done_callback(self._feeder_ended)
        results = self._results(feeder, convert)
        weakref.finalize(results, self._dropped, loop).atexit = False
        return results

    def _dropped(self, loop: asyncio.AbstractEventLoop) -> None:
        """Of an iterator that was read, the feeder has ended."""
        self._unread = True
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._wake_feeder)

    async def _results(
        self, feeder: asyncio.Task[None], convert: Callable[[Answer], T]
    ) -> AsyncGenerator[T, None]:  # fmt: skip
        buffer = self._buffer
        buffer.begun = True
        taken = 0
        try:
            while True:
                while (answer := buffer.take()) is not None:
                    yield convert(answer)
                    taken += 1
                    if taken % CHUNK_TASKS == 0:
                        self._wake_feeder()
                        await asyncio.sleep(0)  # lets the stream work while the caller never waits
                if feeder.done():
                    feeder.result()
                    if buffer.finished:
                        return
                self._wake_feeder()
                await self._answered(feeder)
        finally:
            feeder.cancel()
            if not buffer.finished:
                self._stream.withdraw_where(buffer.owns)

    async def _feed(self, source: Iterator[Any]) -> None:
        buffer = self._buffer
        while not buffer.exhausted:
            if not await self._capacity():
                return
            chunk = buffer.pull(source)
            if chunk:
                await self._stream.start(chunk)
            await asyncio.sleep(0)

    async def _feed_async(self, source: AsyncIterable[Any]) -> None:
        """Starts each item as it comes: the next one may take any time."""
        buffer = self._buffer
        pulled = 0
        async for item in source:
            call = buffer.make_call(item, buffer)
            buffer.add(call)
            if call.answer is None and not self._stream.try_start(call):
                await self._stream.start((call,))
            if not await self._capacity():
                return
            pulled += 1
            if pulled % CHUNK_TASKS == 0:
                await asyncio.sleep(0)
        buffer.exhausted = True

    def _feeder_ended(self, feeder: asyncio.Task[None]) -> None:
        if not feeder.cancelled():
            feeder.exception()  # retrieved, also when the caller left before it was raised there
        self._wake_taker()

    async def _capacity(self) -> bool:
        """Waits until another chunk may be pulled. False: nobody reads the results."""
        while not self._buffer.has_capacity():
            if self._unread:
                return False
            self._feeder_waits = asyncio.get_running_loop().create_future()
            await self._feeder_waits
        return True

    def _wake_feeder(self) -> None:
        waits = self._feeder_waits
        if waits is not None and not waits.done() and (self._unread or self._buffer.has_capacity()):
            waits.set_result(None)

    async def _answered(self, feeder: asyncio.Task[None]) -> None:
        """Returns when there is something to take, or the feeder has ended."""
        self._taker = asyncio.get_running_loop().create_future()
        self._buffer.waiting = True
        if self._buffer.has_answer() or (feeder.done() and self._buffer.finished):
            self._wake_taker()
        rejection = partial(self._stream.rejection, self._buffer.owns)
        await within(self._buffer.wait_s(), self._taker, rejection, self._buffer.fate)

    def _wake_taker(self) -> None:
        taker, self._taker = self._taker, None
        if taker is not None and not taker.done():
            taker.set_result(None)


class SyncMap:
    """A map on two threads: the caller's pulls, encodes and takes; the loop's sends and settles."""

    def __init__(self, thread: LoopThread, stream: RunStream, buffer: MapBuffer) -> None:
        self._thread = thread
        self._stream = stream
        self._buffer = buffer
        self._event = threading.Event()
        # The chunks that the stream's window has not admitted yet, in order. After `begin` there is at most one.
        self._starting: deque[concurrent.futures.Future[None]] = deque()
        # True once the caller has left: a chunk that the loop has not begun to start never starts.
        self._left = False
        # Wakes the caller once the loop thread has handled the whole frame, not at the frame's first outcome.
        buffer.wake = lambda: thread.loop.call_soon(self._event.set)

    def begin(self, source: Iterator[Any], *, sized: bool) -> None:
        """Starts the items for which there is capacity; those of a source that is not `sized`, and may be slow, for a
        moment only.
        """
        buffer = self._buffer
        stop = math.inf if sized else time.monotonic() + _BEGIN_S
        try:
            while not buffer.exhausted and buffer.has_capacity() and time.monotonic() < stop:
                self._pull(source)
        except BaseException:
            self._withdraw()
            raise

    def run(self, source: Iterator[Any], convert: Callable[[Answer], T]) -> Iterator[T]:
        """Yields convert(answer) for each item. Closing it, or an error, withdraws what it started."""
        buffer = self._buffer
        buffer.begun = True
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
        while self._starting:
            if not self._starting[0].done():
                return False
            self._starting.popleft().result()
        if self._buffer.exhausted or not self._buffer.has_capacity():
            return False
        self._pull(source)
        return True

    def _pull(self, source: Iterator[Any]) -> None:
        chunk = self._buffer.pull(source)
        if chunk:
            starting = self._thread.submit(self._start(chunk))
            starting.add_done_callback(lambda _: self._event.set())
            self._starting.append(starting)

    async def _start(self, chunk: list[MapCall]) -> None:
        if not self._left:
            await self._stream.start(chunk)

    def _wait(self) -> None:
        """Returns when there may be something to take or to feed."""
        buffer = self._buffer
        self._event.clear()
        buffer.waiting = True
        can_feed = bool(self._starting) and self._starting[0].done()
        if not can_feed and not buffer.has_answer() and not self._event.wait(buffer.wait_s()):
            assert buffer.timeout_s is not None, "without a timeout wait() returns True"
            raise timeout_error(buffer.timeout_s, self._stream.rejection(buffer.owns), buffer.fate)
        buffer.waiting = False

    def _withdraw(self) -> None:
        if self._thread.inherited:
            return
        # First: cancelling a coroutine that the loop has yet to begin comes too late for its first step.
        self._left = True
        for starting in self._starting:
            starting.cancel()
        with contextlib.suppress(ClientClosedError):
            self._thread.call(self._stream.withdraw_where, self._buffer.owns)
