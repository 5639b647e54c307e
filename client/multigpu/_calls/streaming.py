"""Iterators over the partial outputs of one task. Reading one to its end gives the `outcome`; closing or dropping it
cancels the task.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, Generic, NamedTuple, Self, TypeVar

from multigpu._transport.encoding import decode
from multigpu._transport.loop_thread import LoopThread
from multigpu.errors import ClientClosedError, Outcome

T = TypeVar("T")
_END = object()


class SyncIterator(Iterator[T]):
    """An asynchronous generator of the loop thread, for threads without a loop.

    Closing it, from any thread, closes the generator and ends a pending `next`. Dropping it closes the generator too:
    the loop's asyncgen hooks do that.
    """

    def __init__(
        self, generator: AsyncGenerator[T, None], thread: LoopThread, wait: Callable[[Coroutine[Any, Any, Any]], Any]
    ) -> None:
        """`wait`: runs a coroutine on the thread and returns its result, or raises ClientClosedError."""
        self._generator = generator
        self._thread = thread
        self._wait = wait
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
        """Harmless when it is closed or at its end."""
        if not self._ended:
            self._ended = True
            with contextlib.suppress(ClientClosedError):
                self._wait(self._close())

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


class Part(NamedTuple):
    """A partial output as it came, and how it is to be read."""

    data: bytes
    content_type: str


class Reader(Generic[T]):
    """What both iterators do with a partial output, and with the outcome."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the task, which SUCCEEDED. RuntimeError: the iterator is not at its end yet."""
        if self._outcome is None:
            raise RuntimeError("the task has not ended: read the iterator to its end first")
        return self._outcome

    def _read(self, part: Part) -> T:
        value: Any = decode(part.data, part.content_type)
        return value  # type: ignore[no-any-return]  # the caller knows the type

    def _finish(self, outcome: Outcome) -> None:
        self._outcome = outcome


class Stream(Reader[T]):
    """Partial outputs as they come. It can be closed from any thread."""

    _parts: SyncIterator[Part | Outcome]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopIteration

    def close(self) -> None:
        """Cancel the task, unless it has ended."""
        self._parts.close()


class AsyncStream(Reader[T]):
    """Partial outputs as they come."""

    _parts: AsyncGenerator[Part | Outcome, None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        async for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the task, unless it has ended."""
        await self._parts.aclose()
