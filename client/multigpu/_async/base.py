"""What AsyncClient and AsyncAdminClient have in common: the connection, and the tasks that the master has."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from os import PathLike
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack

from multigpu._calls.core import Core
from multigpu.fleet import CancelResult, TaskCounts
from multigpu.options import SpecOptions, TaskFilter, filter_of
from multigpu.v1 import task_service_pb2

if TYPE_CHECKING:
    from multigpu.outcome import Outcome, TaskName
    from multigpu.task import Task


class AsyncBaseClient:
    """A connection to one master."""

    def __init__(
        self,
        master: str | None = None,
        *,
        token: str | None = None,
        tls_ca: str | PathLike[str] | None = None,
        tls_cert: str | PathLike[str] | None = None,
        tls_key: str | PathLike[str] | None = None,
        timeout: float | None = None,
        connect_timeout_s: float = 10.0,
        defaults: SpecOptions | None = None,
        max_in_flight: int | None = None,
        max_in_flight_bytes: int | None = None,
        wait_when_full: bool = True,
    ) -> None:
        files = {"tls_ca": tls_ca, "tls_cert": tls_cert, "tls_key": tls_key}
        settings: dict[str, Any] = {name: str(path) for name, path in files.items() if path is not None}
        limits = {"master": master, "max_in_flight": max_in_flight, "max_in_flight_bytes": max_in_flight_bytes}
        settings |= {name: value for name, value in limits.items() if value is not None}
        self._core = Core(settings, token, timeout, connect_timeout_s, defaults or {}, wait_when_full=wait_when_full)
        self.master: str = self._core.master

    def __reduce__(self) -> NoReturn:
        name = type(self).__name__
        raise TypeError(f"{name} can't be pickled or copied: make one in each process, from the master's address")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        await self._core.leave(exc_type)

    async def close(self) -> None:
        """Ends the connection. Tasks of maps that are being read are cancelled. Other pending calls raise
        ClientClosedError, and their durable tasks go on in the master.
        """
        await self._core.close()

    async def get(self, task: TaskName, *, wait_s: float = 0.0, rank: int = 0, timeout: float | None = None) -> Task:
        """A task as it is now, by its task_id (int) or request_id (str). Waits up to `wait_s` for it to end. `rank`: of
        those of a running task with `world_size`, the one whose log it has. Raises NotFoundError.
        """
        return await self._core.get(task, wait_s, timeout, rank)

    async def cancel(self, *tasks: TaskName, reason: str = "", timeout: float | None = None) -> CancelResult:
        """Cancels tasks by task_id (int) or request_id (str). `reason`: recorded in their outcomes."""
        return CancelResult.of(await self._core.cancel(tasks, reason, timeout))

    async def watch(
        self, *, cursor: str = "", from_now: bool = False, queue: str = "", kind: str = ""
    ) -> AsyncGenerator[tuple[Outcome, str], None]:
        """Yields (outcome, cursor) for every durable task that ends, without gap or repetition; reconnects by itself.

        A later watch with that cursor and the same filters continues after the outcome. An empty cursor begins with
        the oldest retained outcome, or now with `from_now`. Raises CursorExpiredError.
        """
        async with aclosing(self._core.watch(cursor, from_now, queue, kind)) as frames:
            async for frame in frames:
                for pair in frame:
                    yield pair

    async def current_cursor(self, *, timeout: float | None = None) -> str:
        """The cursor from which a watch yields what ends from now on."""
        return await self._core.current_cursor(timeout)

    async def count(self, *, timeout: float | None = None, **filters: Unpack[TaskFilter]) -> TaskCounts:
        """How many tasks match all filters, by state and outcome. Default: all."""
        return TaskCounts.of(await self._core.count(filter_of(filters), timeout))

    async def list_page(
        self,
        *,
        page_size: int = 100,
        page_token: str = "",
        oldest_first: bool = False,
        timeout: float | None = None,
        **filters: Unpack[TaskFilter],
    ) -> tuple[list[Task], str]:
        """A page of `list_tasks`, of up to 1,000 tasks, and the `page_token` of the next one; "": this is the last.
        InvalidTaskError: the master did not give out this token.
        """
        request = task_service_pb2.ListRequest(
            filter=filter_of(filters), page_size=page_size, page_token=page_token, oldest_first=oldest_first
        )
        return await self._core.page(request, timeout)

    async def list_tasks(
        self, *, oldest_first: bool = False, timeout: float | None = None, **filters: Unpack[TaskFilter]
    ) -> AsyncGenerator[Task, None]:
        """Tasks that match all filters, by default the newest first; their outcomes come without results. Default: all.

        `timeout`: of each page.
        """
        async with aclosing(self._core.pages(filter_of(filters), timeout, oldest_first=oldest_first)) as pages:
            async for page in pages:
                for task in page:
                    yield task
