"""Iterators over the partial outputs of one task. Reading one to its end gives the `outcome`; closing or dropping it
cancels the task.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from multigpu._transport.encoding import decode
from multigpu.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from multigpu._calls.sync_iterator import SyncIterator

T = TypeVar("T")


class Part(NamedTuple):
    """A partial output as it came, and how it is to be read."""

    data: bytes
    content_type: str


class Reader(Generic[T]):
    """What both iterators do with a partial output, and with the outcome."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """Of a task that SUCCEEDED; its `value()` is what the handler returned. RuntimeError: not read to the end."""
        if self._outcome is None:
            raise RuntimeError("the task has not ended: read the iterator to its end first")
        return self._outcome

    def _read(self, part: Part) -> T:
        value: Any = decode(part.data, part.content_type)
        return value  # type: ignore[no-any-return]  # the caller knows the type

    def _finish(self, outcome: Outcome) -> None:
        self._outcome = outcome


class Stream(Reader[T]):
    """Partial outputs as they come. It can be closed from any thread."""

    _parts: SyncIterator[Part | Outcome]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> T:
        for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopIteration

    def close(self) -> None:
        """Cancel the task, unless it has ended."""
        self._parts.close()


class AsyncStream(Reader[T]):
    """Partial outputs as they come."""

    _parts: AsyncGenerator[Part | Outcome, None]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        async for part in self._parts:
            if isinstance(part, Part):
                return self._read(part)
            self._finish(part)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Cancel the task, unless it has ended."""
        await self._parts.aclose()
