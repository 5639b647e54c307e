"""Handlers that take several arguments, for test_calls.py."""

import asyncio
import time
from typing import Any, Literal

import multigpu
import numpy as np
from numpy.typing import NDArray


@multigpu.handler
def scale(values: NDArray[np.float32], factor: float = 2.0, *, offset: int = 0) -> NDArray[np.float32]:
    return values * np.float32(factor) + np.float32(offset)


@multigpu.handler("calls.describe", retries=6)
def describe(mode: Literal["short", "long"], pair: tuple[int, str], *rest: int, **more: list[float]) -> list[Any]:
    return [mode, list(pair), type(pair).__name__, list(rest), more]


@multigpu.handler("calls.nothing")
def nothing() -> str:
    return "done"


@multigpu.handler("calls.vectors")
class Vectors:
    @multigpu.batch(max_size=16)
    def __call__(self, texts: list[str]) -> list[NDArray[np.float32]]:
        return [np.full(3, len(text), np.float32) for text in texts]


@multigpu.handler("calls.size_of_batch")
@multigpu.batch(max_size=8)
def size_of_batch(values: list[int]) -> list[int]:
    time.sleep(0.6)  # longer than the time for which a worker's pace lets it hold tasks
    return [len(values)] * len(values)


running = 0


@multigpu.handler("calls.running_together")
async def running_together(_value: int) -> int:
    global running  # noqa: PLW0603  of this process
    running += 1
    await asyncio.sleep(0.1)
    found = running
    await asyncio.sleep(0.1)
    running -= 1
    return found
