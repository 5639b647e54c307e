"""A replacement for asyncio.to_thread where files are read: the process can end while a function still runs."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


async def to_daemon_thread(function: Callable[..., T], *arguments: object) -> T:
    """Like asyncio.to_thread, on a new daemon thread. Neither the event loop nor the interpreter waits for it at exit:
    large files take long to read, and a network file system may hang.
    """
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()  # the thread goes on when the caller is cancelled

    def run() -> None:
        try:
            future.set_result(function(*arguments))
        except BaseException as error:  # noqa: BLE001  raised again in the caller
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name="file-reader", daemon=True).start()
    return await asyncio.wrap_future(future)
