"""Waiting for a condition, in tests with and without asyncio."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
_INTERVAL_S = 0.005
# Limits are those of an idle host; a busy one may take this many times as long.
BUSY_FACTOR = 4


def until(condition: Callable[[], T | None], timeout_s: float = 60.0, what: str = "") -> T:
    """Calls `condition` until it returns a true value, and returns that. AssertionError after `timeout_s` times
    `BUSY_FACTOR`.
    """
    end_s = time.monotonic() + timeout_s * BUSY_FACTOR
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {timeout_s * BUSY_FACTOR:g} s in vain for {what or condition}"
        time.sleep(_INTERVAL_S)
    return value


async def until_async(condition: Callable[[], T | None], timeout_s: float = 60.0, what: str = "") -> T:
    """`until` for coroutines: the event loop runs between the calls."""
    end_s = time.monotonic() + timeout_s * BUSY_FACTOR
    while not (value := condition()):
        assert time.monotonic() < end_s, f"waited {timeout_s * BUSY_FACTOR:g} s in vain for {what or condition}"
        await asyncio.sleep(_INTERVAL_S)
    return value
