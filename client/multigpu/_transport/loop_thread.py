"""An event loop on a private thread, for callers without one. The thread is a daemon: it keeps no program alive."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from multigpu._transport import forks
from multigpu.errors import ClientClosedError

T = TypeVar("T")
# Threads that were told to end and have not ended yet.
_ending: "set[LoopThread]" = set()


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = _new_loop()
        self.loop.set_exception_handler(_handle)
        self._pid = os.getpid()
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Set before the last tasks are cancelled: a caller that schedules something later gets an error, and what was
        # scheduled earlier has its turn, and is cancelled.
        self._ended = True
        self.loop.run_until_complete(_cancel_tasks())
        self.loop.close()
        _ending.discard(self)

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork, without the thread."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """ClientClosedError: this process does not have the thread."""
        if self.inherited:
            forks.check()
            raise ClientClosedError("this client was made before a fork; make a new one in the child process")

    def call(self, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function on the event loop. ClientClosedError: the loop has ended."""
        try:
            self.loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            raise _closed() from None
        if self._ended:
            raise _closed()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Runs the coroutine on the event loop. ClientClosedError: the loop has ended. If it ends meanwhile, this waits
        for the end of the thread.
        """
        if not self._ended:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
                if not self._ended:
                    return future
                self._thread.join()  # this is another thread: on the loop's own, `_ended` has not changed
        coroutine.close()  # it may not have begun; Python warns of a coroutine that never does
        raise _closed()

    def finish(self, last: Coroutine[Any, Any, None]) -> None:
        """As `begin_end`, and waits for the end of the thread."""
        ended = self.begin_end(last)
        if threading.current_thread() is self._thread:
            return  # it can't wait for itself
        ended.result()
        self._thread.join()

    def begin_end(self, last: Coroutine[Any, Any, None]) -> "concurrent.futures.Future[None]":
        """Has the loop run a last coroutine, cancel what still runs, and end with its thread. Does not wait for that;
        the interpreter's exit does.
        """
        _ending.add(self)
        # Not by `submit`: when that returns, the loop may have ended already.
        return asyncio.run_coroutine_threadsafe(_stop_after(last), self.loop)


def _join_ending() -> None:
    for each in list(_ending):
        if not each.inherited:
            each._thread.join()  # noqa: SLF001  its own module


# Finalizers run at exit in reverse order of their creation: this one after those of clients, which begin the end.
weakref.finalize(LoopThread, _join_ending)


def _closed() -> ClientClosedError:
    return ClientClosedError("this client is closed; make a new one")


async def _stop_after(last: Coroutine[Any, Any, None]) -> None:
    try:
        await last
    finally:
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.stop)  # after the callbacks of this coroutine's end


async def _cancel_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # noqa: PLC0415  not on every platform
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # gRPC wakes every loop of a process through one descriptor: the second loop finds it empty, and the first may find
    # an event for a loop that was closed meanwhile. Both errors are harmless.
    harmless = isinstance(context.get("exception"), BlockingIOError | RuntimeError)
    if harmless and "PollerCompletionQueue" in str(context.get("handle", "")):
        return
    loop.default_exception_handler(context)
