"""What an iterator over the partial outputs of one task has, whichever client made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from multigpu._encoding import decode
from multigpu.errors import MultigpuError

if TYPE_CHECKING:
    from multigpu.outcome import Outcome

T = TypeVar("T")


class Part(NamedTuple):
    """A partial output as it came, and how it is to be read."""

    data: bytes
    content_type: str


class StreamBase(Generic[T]):
    """What both iterators do with a partial output, and with the outcome."""

    def __init__(self, parts: Any) -> None:
        self._parts = parts
        self._outcome: Outcome | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome of the finished task. RuntimeError until the iterator is exhausted."""
        if self._outcome is None:
            raise RuntimeError("the task has not ended: read the iterator to its end first")
        return self._outcome

    def _read(self, part: Part) -> T:
        try:
            value: Any = decode(part.data, part.content_type)
        except ValueError as error:
            raise MultigpuError(f"a partial output can't be read: {error}") from None
        return value  # type: ignore[no-any-return]  # the caller knows the type

    def _finish(self, outcome: Outcome) -> None:
        self._outcome = outcome
