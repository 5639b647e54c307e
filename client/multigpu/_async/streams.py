"""Iterators over the partial outputs of one task. Reading one to its end gives the `outcome`; closing or dropping it
cancels the task.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Self, TypeVar

from multigpu._calls.streaming import Part, StreamBase
from multigpu._kinds.generation import GenerationBase
from multigpu.outcome import Outcome

T = TypeVar("T")


class AsyncStream(StreamBase[T]):
    """Partial outputs as they come."""

    _parts: AsyncGenerator[Part | Outcome, None]

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def __anext__(self) -> T:
        async for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the task, unless it has ended."""
        await self._parts.aclose()


class AsyncGeneration(GenerationBase, AsyncStream[str]):
    """Pieces of text as they come. Closing or dropping it cancels the task."""

    async def __anext__(self) -> str:
        while not (piece := await super().__anext__()):
            pass
        return piece
