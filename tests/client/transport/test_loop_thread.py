"""The thread with the event loop of a synchronous client."""

import asyncio
import concurrent.futures
import inspect
import threading
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from multigpu._calls.mapping import MapBuffer, SyncMap
from multigpu._transport.loop_thread import LoopThread
from multigpu.errors import ClientClosedError


async def nothing() -> None:
    pass


@pytest.mark.filterwarnings("error:coroutine .* was never awaited")
def test_what_is_submitted_while_the_loop_ends_ends_too() -> None:
    """Some waited for ever: they were scheduled after the loop's last turn, and before it was closed."""
    lost: list[str] = []

    def submit_until_closed(thread: LoopThread) -> None:
        while True:
            try:
                thread.submit(nothing()).result(120)
            except (ClientClosedError, concurrent.futures.CancelledError):
                return
            except TimeoutError:
                lost.append("lost")
                return

    for _ in range(100):
        thread = LoopThread("test")
        callers = [threading.Thread(target=submit_until_closed, args=(thread,)) for _ in range(4)]
        for each in callers:
            each.start()
        thread.finish(nothing())
        for each in callers:
            each.join()
    assert not lost


def test_a_submit_on_the_thread_of_a_loop_that_ends_is_rejected() -> None:
    """It waited for its own thread, and raised RuntimeError."""
    thread = LoopThread("test")
    errors: list[BaseException] = []
    late = nothing()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                thread.submit(late)
            except Exception as error:
                errors.append(error)

    thread.submit(endless())
    thread.finish(nothing())
    assert [type(error) for error in errors] == [ClientClosedError]
    assert inspect.getcoroutinestate(late) == inspect.CORO_CLOSED


def test_a_map_that_is_left_while_its_client_is_closed_raises_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of withdrawing its tasks hid the error that ended the map."""
    thread = LoopThread("test")
    calls: Any = SimpleNamespace(withdraw_where=None)
    running = SyncMap(thread, calls, MapBuffer(calls, ordered=True, tasks_max=1, bytes_max=1, timeout_s=None))
    results = running.run(iter(["item"]), str)

    def close(*_: object) -> NoReturn:
        thread.finish(nothing())
        raise KeyboardInterrupt

    monkeypatch.setattr(MapBuffer, "pull", close)
    with pytest.raises(KeyboardInterrupt):
        next(results)
