"""An asynchronous generator of the loop thread, as an iterator for threads without a loop."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from multigpu._transport.loop_thread import LoopThread
from multigpu.errors import ClientClosedError

T = TypeVar("T")
_END = object()


class SyncIterator(Iterator[T]):
    """Closing it, from any thread, or dropping it closes the generator and ends a pending `next`."""

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

    def __del__(self) -> None:
        if not (self._ended or self._thread.inherited or self._thread.loop.is_closed()):
            self._thread.submit(self._close())  # not waited for: this may be the loop's thread

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
