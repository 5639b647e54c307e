"""Iterators over the partial outputs of one task. Reading one to its end gives the `outcome`; closing or dropping it
cancels the task.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Self, TypeVar

from multigpu._calls.streaming import Part, StreamBase
from multigpu._kinds.generation import GenerationBase
from multigpu.outcome import Outcome

T = TypeVar("T")


class Stream(StreamBase[T]):
    """Partial outputs as they come."""

    _parts: Generator[Part | Outcome, None]

    def __iter__(self) -> Self:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> T:
        for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopIteration

    def close(self) -> None:
        """Cancel the task, unless it has ended."""
        self._parts.close()


class Generation(GenerationBase, Stream[str]):
    """Pieces of text as they come. Closing or dropping it cancels the task."""

    def __next__(self) -> str:
        while not (piece := super().__next__()):
            pass
        return piece
