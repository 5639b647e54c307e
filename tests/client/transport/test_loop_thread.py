"""The thread with the event loop of a synchronous client."""

import concurrent.futures
import threading

import pytest
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
