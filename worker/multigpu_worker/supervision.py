"""An error in our own code ends the worker, also if no caller awaits it: its supervisor starts the worker again."""

import asyncio
from typing import Any

import structlog

log = structlog.get_logger()


def supervised(task: asyncio.Task[None]) -> asyncio.Task[None]:
    """Have what a task raises reach `Supervision`, although no caller awaits the task."""
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
        """Raise what a callback has raised, as soon as one does."""
        await self._failed

    def _handle(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if "handle" not in context or not isinstance(error, Exception):
            loop.default_exception_handler(context)
            return
        log.critical("a callback failed, so the worker ends", exc_info=error)
        if not self._failed.done():
            self._failed.set_exception(error)
