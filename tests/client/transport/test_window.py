"""The window of a client: admission in order, and cancelled waiters."""

import asyncio

from multigpu._transport.window import Window


async def test_the_window_admits_waiters_in_order() -> None:
    window = Window(10, 1000)
    await window.admit(8, 100)
    big = asyncio.create_task(window.admit(5, 100))
    await asyncio.sleep(0)
    small = asyncio.create_task(window.admit(1, 1))
    await asyncio.sleep(0)
    assert not small.done()  # it fits, but must not overtake
    assert not window.try_admit(1, 1)
    window.free(4, 50)
    await asyncio.wait_for(asyncio.gather(big, small), 1)
    assert (window.tasks, window.bytes) == (10, 151)


async def test_a_cancelled_waiter_of_the_window_frees_its_share() -> None:
    window = Window(10, 1000)
    await window.admit(8, 0)
    big = asyncio.create_task(window.admit(5, 0))
    small = asyncio.create_task(window.admit(2, 0))
    await asyncio.sleep(0)
    big.cancel()
    await asyncio.wait_for(small, 1)
    assert window.tasks == 10
    late = asyncio.create_task(window.admit(3, 0))
    await asyncio.sleep(0)
    window.free(10, 0)  # `late` is admitted …
    late.cancel()  # … and cancelled at the same time
    await asyncio.wait([late])
    assert window.tasks == 0


async def test_more_than_the_whole_window_is_admitted_alone() -> None:
    window = Window(10, 1000)
    await window.admit(1, 5000)
    assert not window.try_admit(1, 1)
    window.free(1, 5000)
    assert window.try_admit(20, 1)
