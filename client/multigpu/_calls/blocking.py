"""BlockingCore: what a Core does, for threads without an event loop. The clients of multigpu._sync are made of it.

A Core runs on a private loop thread. Iterables that a caller passes are pulled on the caller's thread, and results
cross between the threads in chunks. Ctrl-C in a waiting call cancels the tasks that the call started, waits until the
master has confirmed it, and raises KeyboardInterrupt.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sized
from typing import Any, Self, TypeVar

from multigpu._calls.calls import CallFactory, Encode, ThreadCall
from multigpu._calls.core import Core, outcome
from multigpu._calls.mapping import SyncMap
from multigpu._calls.progress import ProgressBar
from multigpu._calls.streaming import Part
from multigpu._calls.submitting import MakeHandle, Submission
from multigpu._calls.timeouts import CANCELLED, timeout_error
from multigpu._transport.loop_thread import LoopThread
from multigpu.errors import ClientClosedError, MultigpuError
from multigpu.outcome import Outcome, TaskName
from multigpu.task import Task
from multigpu.v1 import task_service_pb2

T = TypeVar("T")
_END = object()
Wait = Callable[[Coroutine[Any, Any, Any]], Any]


class BlockingCore:
    _origin: BlockingCore | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes the arguments of Core."""
        self._core = Core(*arguments, **options)
        self._thread = LoopThread("multigpu client")
        # Runs if the client is never closed: when it is collected, or at exit.
        self._finalizer = weakref.finalize(self, _begin_end, self._core, self._thread)

    @property
    def master(self) -> str:
        return self._core.master

    @property
    def calls(self) -> CallFactory:
        return self._core.calls

    @property
    def _closed(self) -> bool:
        return not self._finalizer.alive

    def pop_timeout(self, options: Any) -> float | None:
        return self._core.pop_timeout(options)

    def with_options(self, options: Mapping[str, Any]) -> Self:
        other = copy.copy(self)
        other._core = self._core.with_options(options)  # noqa: SLF001  its own class
        other._origin = self  # noqa: SLF001  the connection ends when the first of them is dropped
        return other

    def leave(self, exc_type: type[BaseException] | None) -> None:
        interrupted = exc_type is not None and issubclass(exc_type, KeyboardInterrupt)
        if interrupted and not (self._closed or self._thread.inherited):
            # Ctrl-C between two results of a map, for example: cancel everything that this client started.
            self._thread.loop.call_soon_threadsafe(self._core.stream.withdraw_where, lambda _: True)
        self.close()

    def close(self) -> None:
        # Not by calling it: the finalizer does not wait.
        if self._finalizer.detach() is not None and not self._thread.inherited:
            self._thread.finish(self._core.close())

    def submission(self, timeout_s: float | None, make_handle: MakeHandle) -> BlockingSubmission:
        return BlockingSubmission(self._core.submission(timeout_s, make_handle), self._thread, self._wait)

    def follow(self, task_id: int, request_id: str, timeout_s: float | None) -> Outcome:
        return self._wait(self._core.follow(task_id, request_id, timeout_s))

    def follow_parts(self, task_id: int, request_id: str, timeout_s: float | None) -> SyncIterator[Part | Outcome]:
        return self._iterate(self._core.follow_parts(task_id, request_id, timeout_s))

    def follow_all(
        self, handles: Iterable[Any], ordered: bool, timeout_s: float | None, total: bool
    ) -> Generator[Any, None, None]:
        self._check()
        buffer, convert = self._core.follow_buffer(ordered, timeout_s, total)
        return self._interruptible(SyncMap(self._thread, self._core.stream, buffer).run(iter(handles), convert))

    def explain(self, task_id: int, timeout_s: float | None) -> Any:
        return self._wait(self._core.explain(task_id, timeout_s))

    def run(self, kind: str, payload: Any, options: dict[str, Any], traceparent: str) -> Outcome:
        self._check()
        core = self._core
        timeout_s = core.pop_timeout(options)
        call = core.calls.one(ThreadCall, kind, payload, options, traceparent)
        try:
            self._thread.call(core.start, call)  # a coroutine and its futures would take more time than all the rest
            answer = call.wait(timeout_s)
        except KeyboardInterrupt:
            self._wait(core.withdraw(call))
            self._confirm_cancellations()
            raise
        if answer is None:
            assert timeout_s is not None, "there is no answer only after a timeout"
            self._wait(core.withdraw(call))
            raise timeout_error(timeout_s, core.rejection(call), CANCELLED)
        return outcome(answer)

    def parts(
        self, kind: str, payload: Any, options: dict[str, Any], traceparent: str
    ) -> SyncIterator[Part | Outcome]:  # fmt: skip
        return self._iterate(self._core.parts(kind, payload, options, traceparent))

    def map(
        self, kind: str, payloads: Iterable[Any], options: Any, read: Callable[[Outcome], T], encode: Encode | None,
        bar: ProgressBar | None,
    ) -> Generator[T, None, None]:  # fmt: skip
        self._check()
        buffer, convert = self._core.map_buffer(kind, options, read, encode)
        source, running = iter(payloads), SyncMap(self._thread, self._core.stream, buffer)
        try:
            running.begin(source, sized=isinstance(payloads, Sized))
        except KeyboardInterrupt:
            self._confirm_cancellations()
            raise
        results = self._interruptible(running.run(source, convert))
        return results if bar is None else bar.of(results)

    def get(self, task: TaskName, wait_s: float, timeout_s: float | None, rank: int = 0) -> Task:
        return self._wait(self._core.get(task, wait_s, timeout_s, rank))

    def cancel(
        self, tasks: tuple[TaskName, ...], reason: str, timeout_s: float | None
    ) -> task_service_pb2.CancelResponse:
        return self._wait(self._core.cancel(tasks, reason, timeout_s))

    def count(
        self, task_filter: task_service_pb2.TaskFilter, timeout_s: float | None
    ) -> task_service_pb2.CountResponse:
        return self._wait(self._core.count(task_filter, timeout_s))

    def page(self, request: task_service_pb2.ListRequest, timeout_s: float | None) -> tuple[list[Task], str]:
        return self._wait(self._core.page(request, timeout_s))

    def pages(
        self, task_filter: task_service_pb2.TaskFilter, timeout_s: float | None, *, oldest_first: bool
    ) -> SyncIterator[list[Task]]:
        return self._iterate(self._core.pages(task_filter, timeout_s, oldest_first=oldest_first))

    def admin(self, method: str, request: Any) -> Any:
        return self._wait(self._core.admin(method, request))

    def admin_pages(self, method: str, request: Any) -> SyncIterator[Any]:
        return self._iterate(self._core.admin_pages(method, request))

    def watch(self, cursor: str, from_now: bool, queue: str, kind: str) -> SyncIterator[list[tuple[Outcome, str]]]:
        return self._iterate(self._core.watch(cursor, from_now, queue, kind))

    def current_cursor(self, timeout_s: float | None) -> str:
        return self._wait(self._core.current_cursor(timeout_s))

    def _check(self) -> None:
        if self._closed:
            raise ClientClosedError("this client is closed; make a new one")
        self._thread.check()

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        try:
            self._check()
        except ClientClosedError:
            coroutine.close()
            raise
        future = self._thread.submit(coroutine)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosedError("the client was closed before the call ended") from None
        except KeyboardInterrupt:
            future.cancel()
            self._confirm_cancellations()
            raise

    def _iterate(self, generator: AsyncGenerator[T, None]) -> SyncIterator[T]:
        self._thread.check()
        return SyncIterator(generator, self._wait, self._thread)

    def _interruptible(self, items: Iterator[T]) -> Generator[T, None, None]:
        """Yields the items; after Ctrl-C, waits until the master has confirmed the cancellations."""
        try:
            yield from items
        except KeyboardInterrupt:
            self._confirm_cancellations()
            raise

    def _confirm_cancellations(self) -> None:
        with contextlib.suppress(concurrent.futures.CancelledError, ClientClosedError):
            self._thread.submit(self._core.stream.wait_for_cancellations()).result()


class BlockingSubmission:
    def __init__(self, submission: Submission, thread: LoopThread, wait: Wait) -> None:
        self._submission = submission
        self._thread = thread
        self._wait = wait

    @property
    def results(self) -> list[Any]:
        return self._submission.results

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, KeyboardInterrupt):
            self._thread.submit(self._submission.undo()).result()
        elif isinstance(error, MultigpuError):
            error.submitted = self.results

    def send(self, request: task_service_pb2.SubmitRequest) -> None:
        self._wait(self._submission.send(request))


class SyncIterator(Iterator[T]):
    """An asynchronous generator of the loop thread, for threads without a loop.

    Closing it, from any thread, closes the generator and ends a pending `next`. Dropping it closes the generator too:
    the loop's asyncgen hooks do that.
    """

    def __init__(self, generator: AsyncGenerator[T, None], wait: Wait, thread: LoopThread) -> None:
        """`wait`: runs a coroutine on the thread and returns its result, or raises ClientClosedError."""
        self._generator = generator
        self._wait = wait
        self._thread = thread
        self._ended = False
        # The pending `_next`.
        self._waiter: asyncio.Task[Any] | None = None

    def __next__(self) -> T:
        if self._ended:
            raise StopIteration
        try:
            item = self._wait(self._next())
        except ClientClosedError:
            if self._ended:  # another thread has closed it meanwhile
                raise StopIteration from None
            raise
        if item is _END:
            self._ended = True
            raise StopIteration
        return item  # type: ignore[no-any-return]  # _END is the only one that is no T

    def close(self) -> None:
        """Begins to close the generator. Harmless when it is closed or at its end.

        Does not wait for the thread: the garbage collector, on any thread, may close a generator that uses this one.
        """
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ClientClosedError):
                self._thread.submit(self._close())

    async def _next(self) -> Any:
        self._waiter = asyncio.current_task()
        try:
            return await anext(self._generator, _END)
        finally:
            self._waiter = None

    async def _close(self) -> None:
        if self._waiter is not None:
            self._waiter.cancel()
            await asyncio.wait([self._waiter])
        await self._generator.aclose()


def _begin_end(core: Core, thread: LoopThread) -> None:
    """Begins the end of a client and its thread, unless they belong to the parent of a fork.

    Does not wait for the thread: the garbage collector may call this on any thread, which may hold a lock for which the
    loop's thread waits.
    """
    if not thread.inherited:
        thread.begin_end(core.close())
