"""Waiting for a state that no event announces."""

import asyncio
from collections.abc import Callable

POLL_S = 0.02


async def until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. The caller bounds it with `asyncio.timeout`."""
    while not condition():  # noqa: ASYNC110  see the module
        await asyncio.sleep(POLL_S)
