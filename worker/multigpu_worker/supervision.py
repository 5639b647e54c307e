"""An error of our own that nobody awaits ends the worker, which is started again: half a worker must not go on."""

import asyncio
from typing import Any

import structlog

log = structlog.get_logger()


def supervised(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Has what a task raises, which nobody awaits, reach `Supervision`."""
    task.add_done_callback(_raise)
    return task


def _raise(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.result()


class Supervision:
    """Watches the callbacks of the running loop."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = loop.create_future()
        loop.set_exception_handler(self._handle)

    async def watch(self) -> None:
        """Raises what a callback has raised, as soon as one does."""
        await self._failed

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" not in context or not isinstance(error, Exception):
            loop.default_exception_handler(context)
            return
        log.critical("a callback failed, so the worker ends", exc_info=error)
        if not self._failed.done():
            self._failed.set_exception(error)
