"""What the engines of models do about memory: how much goes through at once, and which back ends stay loaded."""

import gc
from typing import Any

# Micro-batches that have to fit before a limit that memory has lowered is doubled.
FITTED_MIN = 64


class Limit:
    """How much goes through a model at once: less when memory runs out, and more again when it no longer does."""

    def __init__(self, fitted_min: int = FITTED_MIN) -> None:
        self._fitted_min = fitted_min
        # What it was before memory ran out; 0: it is that.
        self._full = 0
        self._fitted = 0

    def lower(self, now: int, to: int) -> int:
        """Memory ran out. Returns the limit from here on."""
        self._full = max(self._full, now)
        self._fitted = 0
        return to

    def fitted(self, now: int) -> int:
        """A micro-batch has fitted. Returns the limit from here on."""
        if not self._full:
            return now
        self._fitted += 1
        if self._fitted < self._fitted_min:
            return now
        self._fitted = 0
        limit = min(self._full, 2 * max(1, now))
        if limit == self._full:
            self._full = 0
        return limit


def make_room(loaded: dict[Any, Any]) -> None:
    """Let go of all back ends but the first, which is the model's own: another is about to be loaded.

    A batch that is ready for one of them keeps it until it is done.
    """
    for key in list(loaded)[1:]:
        del loaded[key]
    gc.collect()
