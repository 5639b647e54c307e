"""An error in a callback, or in a task that no code awaits, ends the worker; systemd or `mgpuctl up` restarts it."""

import asyncio
from typing import Any

import structlog

log = structlog.get_logger()


def supervised(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Have `Supervision` handle an exception of a task that no code awaits."""
    task.add_done_callback(_raise)
    return task


def _raise(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()  # raises in a callback of the loop, which calls the exception handler


class Supervision:
    """Installs itself as the exception handler of the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(self._handle)

    async def watch(self) -> None:
        """Wait until a callback raises an exception, and raise it."""
        await self._failed

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" not in context or not isinstance(error, Exception):
            loop.default_exception_handler(context)
            return
        if not self._failed.done():  # before it is logged: the worker must end even if logging fails
            self._failed.set_exception(error)
        log.critical("a callback failed, so the worker ends", exc_info=error)
