"""Handlers that take several arguments, for test_calls.py."""

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
