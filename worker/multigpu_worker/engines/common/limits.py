"""A limit on how much goes through a model at once, adapted when the device runs out of memory."""

# Micro-batches that have to fit before a lowered limit is doubled.
FITTED_MIN = 64


class Limit:
    """Lowers a limit when memory runs out, and doubles it again once enough micro-batches have fitted."""

    def __init__(self, fitted_min: int = FITTED_MIN) -> None:
        self._fitted_min = fitted_min
        # The limit before memory ran out. 0: not lowered.
        self._full = 0
        self._fitted = 0

    def lower(self, now: int, to: int) -> int:
        """Return the new limit after memory ran out."""
        self._full = max(self._full, now)
        self._fitted = 0
        return to

    def fitted(self, now: int) -> int:
        """Return the new limit after a micro-batch fitted."""
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
