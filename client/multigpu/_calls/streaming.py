"""The partial outputs of one task, for `for` and `async for`, and how the task ended.

Both clients hand out an iterator. Reading it to the end gives `outcome`; closing it, or letting go of it, cancels the
task.
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
    """What both iterators do with a part, and with the end."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """How the task SUCCEEDED; its `value()` is what the handler returned. RuntimeError: not read to the end yet."""
        if self._outcome is None:
            raise RuntimeError("the task has not ended: read the iterator to its end first")
        return self._outcome

    def _read(self, part: Part) -> T:
        value: Any = decode(part.data, part.content_type)
        return value  # type: ignore[no-any-return]  # the type of what a handler yields is not known here

    def _finish(self, outcome: Outcome) -> None:
        self._outcome = outcome


class Stream(Reader[T]):
    """Partial outputs as they come. Closing it, from any thread, or letting go of it, cancels the task."""

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
    """Partial outputs as they come. `aclose`, or letting go of it, cancels the task."""

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
