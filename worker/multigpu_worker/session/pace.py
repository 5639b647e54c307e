"""Decides when an engine whose batches run together gets its next batch. Pure.

The next batch is prepared while one runs. If it were handed over as early as possible, callers who wait for their
answers before they send more would form three groups: one runs, one is prepared, one waits. Handed over shortly before
it is needed, the next batch includes all tasks that have come until then: two groups, in larger batches.
"""

# Time allowed to prepare a batch: LEAD_S, and this share of the run time of the batch before it.
LEAD_S = 0.01
LEAD_SHARE = 0.1


class Pace:
    """The batches in one engine process, and the measured time for a token."""

    def __init__(self) -> None:
        self._tokens: dict[int, int] = {}
        # When the oldest batch began to run: when it was handed over, or when the batch before it ended.
        self._since_s = 0.0
        self._token_s = 0.0

    def begin(self, batch_id: int, tokens: int, now_s: float) -> None:
        """A batch was handed over. `now_s`: on a monotonic clock."""
        if not self._tokens:
            self._since_s = now_s
        self._tokens[batch_id] = tokens

    def end(self, batch_id: int, now_s: float) -> None:
        token_s = (now_s - self._since_s) / self._tokens.pop(batch_id)
        self._token_s = (self._token_s + token_s) / 2 if self._token_s else token_s
        self._since_s = now_s

    def drop(self, batch_id: int) -> None:
        """A batch was given back before it began."""
        self._tokens.pop(batch_id, None)

    def due_s(self) -> float:
        """When to hand over the next batch, on the same clock. An instant in the past means now."""
        if not self._tokens:
            return 0.0
        work_s = sum(self._tokens.values()) * self._token_s
        return self._since_s + work_s * (1 - LEAD_SHARE) - LEAD_S

    def clear(self) -> None:
        self._tokens.clear()
