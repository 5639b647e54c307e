"""AsyncTaskHandle: a submitted task."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

from multigpu._calls.core import Core
from multigpu.fleet import Explanation
from multigpu.task import Task

if TYPE_CHECKING:
    from multigpu._calls.streaming import Part
    from multigpu.outcome import Outcome

R = TypeVar("R")


class AsyncTaskHandle(Generic[R]):
    """A submitted task, whose result is of type R. Awaiting it gives its result; asyncio.gather and
    asyncio.as_completed take it.

    The task goes on without the handle, its client and this process: `client.handle(id)` makes another one anywhere.
    """

    def __init__(self, core: Core, task_id: int, request_id: str) -> None:
        self._core = core
        self._outcome: Outcome | None = None
        # The task_id, which is unique for ever.
        self.id = task_id
        # The one it was submitted with, or a random one.
        self.request_id = request_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id}, request_id {self.request_id!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} can't be pickled: send its id, and use client.handle(id) there")

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """Waits until the task ends and returns how, whatever it is. Raises CallTimeoutError after `timeout` seconds
        (default: the client's); the task goes on. NotFoundError: the master has forgotten the task, an ephemeral one
        after its result_ttl.
        """
        if self._outcome is None:
            self._outcome = await self._core.follow(self.id, self.request_id, timeout)
        return self._outcome

    async def follow(self, *, timeout: float | None = None) -> AsyncGenerator[Part | Outcome, None]:
        """Yields the partial outputs from the first on, as they come and not decoded (`data`, `content_type`), and at
        last the outcome, whatever it is. `timeout`: of the wait for each. Leaving the iterator cancels nothing. Raises
        as `outcome`.
        """
        async with aclosing(self._core.follow_parts(self.id, self.request_id, timeout)) as parts:
            async for part in parts:
                yield part

    async def result(self, timeout: float | None = None) -> R:
        """Waits until the task ends and returns its result. Raises its TaskError, and as `outcome`."""
        value: R = (await self.outcome(timeout)).value()
        return value

    def __await__(self) -> Generator[Any, None, R]:
        return self.result().__await__()

    async def done(self, *, timeout: float | None = None) -> bool:
        """Whether the task has ended. Does not wait for it."""
        return self._outcome is not None or (await self.status(timeout=timeout)).outcome is not None

    async def status(self, *, timeout: float | None = None) -> Task:
        """The task as it is now: queued, leased to a worker, its progress, or ended."""
        return await self._core.get(self.id, 0.0, timeout)

    async def cancel(self, reason: str = "", *, timeout: float | None = None) -> bool:
        """Ends the task. False: it had ended before. `reason`: recorded in its outcome."""
        return bool((await self._core.cancel((self.id,), reason, timeout)).cancelled_task_ids)

    async def explain(self, *, timeout: float | None = None) -> Explanation:
        """Why the task is where it is: which workers could take it, and what excludes the others."""
        return Explanation.of(await self._core.explain(self.id, timeout))
