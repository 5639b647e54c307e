"""The option `timeout` of a call."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from numbers import Real
from typing import Any, TypeVar

from multigpu.errors import INVALID_ARGUMENT, CallTimeoutError, InvalidTaskError

T = TypeVar("T")
# 31 years. Clocks and event loops don't accept much larger numbers.
_SECONDS_MAX = 1e9


def pop_timeout(options: Any, default: float | None = None) -> float | None:
    """Removes `timeout` from the options of a call and returns it; in place of None, the default. None: no limit.
    Raises InvalidTaskError if it is not valid.
    """
    value = options.pop("timeout", None)
    if value is None:
        return default
    is_number = isinstance(value, Real)  # includes the numbers of NumPy
    if is_number and value == math.inf:
        return None
    if is_number and 0 <= value < _SECONDS_MAX:
        return float(value)
    raise InvalidTaskError(INVALID_ARGUMENT, f"timeout={value!r}: give seconds, 0 or more; math.inf for no limit")


# What becomes of the tasks of a call that has reached its `timeout`.
CANCELLED = "tasks that this call submitted are cancelled. Give it more time; explain() of a handle says why one waits"
GOES_ON = "the task goes on. Wait again, cancel it, or ask `mgpuctl tasks explain` why it waits"


async def within(
    timeout_s: float | None, awaitable: Awaitable[T], rejection: Callable[[], str], fate: str = CANCELLED
) -> T:
    """The result of an awaitable. Raises timeout_error after `timeout_s`; None: no limit."""
    if timeout_s is None:
        return await awaitable
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await awaitable
    except TimeoutError:
        if not limit.expired():  # the awaitable raised it
            raise
        raise timeout_error(timeout_s, rejection(), fate) from None


def timeout_error(timeout_s: float, rejection: str, fate: str) -> CallTimeoutError:
    """The error of a call that has reached its `timeout`. `rejection`: why no task reaches the master now, or ""."""
    if rejection:
        return CallTimeoutError(f"no answer within {timeout_s:g} s (timeout): {rejection}")
    return CallTimeoutError(f"no answer within {timeout_s:g} s (timeout); {fate}")
