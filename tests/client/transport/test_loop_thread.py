"""The thread with the event loop of a synchronous client."""

import concurrent.futures
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
                thread.submit(nothing()).result(30)
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


def test_a_map_that_is_left_while_its_client_is_closed_raises_no_other_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread closes the client after the map has seen that the loop is open."""
    thread = LoopThread("test")
    calls: Any = SimpleNamespace(withdraw_where=None)
    running = SyncMap(thread, calls, MapBuffer(calls, ordered=True, tasks_max=1, bytes_max=1, timeout_s=None))
    results = running.run(iter(["item"]), str)

    def close(*_: object) -> NoReturn:
        thread.finish(nothing())
        ended: Any = SimpleNamespace(is_closed=lambda: False, call_soon_threadsafe=thread.loop.call_soon_threadsafe)
        thread.loop = ended
        raise KeyboardInterrupt

    monkeypatch.setattr(MapBuffer, "pull", close)
    with pytest.raises(KeyboardInterrupt):
        next(results)
