"""The age of outcomes: the time that passed on the clocks of running masters since an outcome was written.

Time during which no master ran does not count. It cannot be distinguished from a host's clock that was set meanwhile,
and such a clock must not delete results. The journal saves the time at its start and every SAVE_S; the difference to
the next master's first time is added to the lifetime of all older outcomes.
"""

import json
from collections.abc import Callable

SAVE_S = 30.0
_DOWNTIMES_MAX = 1000


class Retention:
    """See the module. `downtime_s` and `now` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._saved_s = 0.0  # the time that the journal holds; 0: none
        self._downtimes: list[tuple[int, float]] = []  # the first cursor after it, and its seconds; in this order

    def downtime_s(self, cursor: int) -> float:
        """The seconds during which no master ran since the outcome at this cursor was written."""
        total_s = 0.0
        for first_cursor, seconds in reversed(self._downtimes):
            if first_cursor <= cursor:
                break
            total_s += seconds
        return total_s

    def now(self, cursor: int) -> float:
        """The time to compare with the expiry of the outcome at this cursor."""
        return self.clock() - self.downtime_s(cursor)

    def load(self, saved: bytes) -> None:
        """Reads what `save` wrote. ValueError, LookupError or TypeError: it is damaged."""
        fields = json.loads(saved)
        self._saved_s = float(fields["time_s"])
        self._downtimes = [(int(cursor), float(seconds)) for cursor, seconds in fields["downtimes"]]

    def resume(self, next_cursor: int) -> float:
        """Counts the downtime before this master. Returns the difference to the saved time. Save at once."""
        difference_s = self.clock() - self._saved_s if self._saved_s else 0.0
        if difference_s > 0:
            downtimes = [*self._downtimes, (next_cursor, difference_s)]
            while len(downtimes) > _DOWNTIMES_MAX:  # outcomes between the oldest two live longer than they need to
                (_, first_s), (cursor, second_s), *downtimes = downtimes
                downtimes.insert(0, (cursor, first_s + second_s))
            self._downtimes = downtimes
        return difference_s

    def due(self) -> bool:
        return self.clock() - self._saved_s >= SAVE_S

    def save(self, oldest_cursor: int) -> bytes:
        """The value to store now."""
        self._saved_s = self.clock()
        self._downtimes = [each for each in self._downtimes if each[0] > oldest_cursor]
        return json.dumps({"time_s": self._saved_s, "downtimes": self._downtimes}).encode()
