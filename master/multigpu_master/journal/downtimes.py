"""Downtimes: the times without a running master. They do not count for the age of an outcome, which is the time that
passed on the clocks of running masters since the outcome was written.

A downtime can't be distinguished from a change of the host's clock, which must not delete results. The journal saves
the time at its start and then every SAVE_S. The time from the last save to the next master's start is added to the
lifetime of all outcomes that exist at that start.
"""

import json
from collections.abc import Callable

SAVE_S = 30.0
_DOWNTIMES_MAX = 1000


class Downtimes:
    """See the module. `downtime_s` and `now_without_downtime_s` may be called from any thread."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._saved_at_s = 0.0  # the clock at the last save; 0: the journal has no saved time
        self._downtimes: list[tuple[int, float]] = []  # (first cursor after the downtime, seconds), oldest first

    def downtime_s(self, cursor: int) -> float:
        """Returns for how many seconds no master ran since the outcome at this cursor was written."""
        total_s = 0.0
        for first_cursor, seconds in reversed(self._downtimes):
            if first_cursor <= cursor:
                break
            total_s += seconds
        return total_s

    def now_without_downtime_s(self, cursor: int) -> float:
        """Returns the time to compare with the expiry of the outcome at this cursor."""
        return self.clock() - self.downtime_s(cursor)

    def load(self, saved: bytes) -> None:
        """Loads a value that `save` has written. Raises ValueError, LookupError or TypeError if it is damaged."""
        fields = json.loads(saved)
        self._saved_at_s = float(fields["time_s"])
        self._downtimes = [(int(cursor), float(seconds)) for cursor, seconds in fields["downtimes"]]

    def add_downtime(self, next_cursor: int) -> float:
        """Adds the downtime before this master. Returns the clock minus the saved time, or 0.0 without one. `save` must
        follow before new outcomes are written.
        """
        difference_s = self.clock() - self._saved_at_s if self._saved_at_s else 0.0
        if difference_s > 0:
            downtimes = [*self._downtimes, (next_cursor, difference_s)]
            while len(downtimes) > _DOWNTIMES_MAX:  # merge the oldest two; outcomes between them are kept for longer
                (_, first_s), (cursor, second_s), *downtimes = downtimes
                downtimes.insert(0, (cursor, first_s + second_s))
            self._downtimes = downtimes
        return difference_s

    def save_due(self) -> bool:
        return self.clock() - self._saved_at_s >= SAVE_S

    def save(self, oldest_cursor: int, write: Callable[[bytes], object]) -> None:
        """Calls `write` with the value to store, without the downtimes that precede all outcomes. If `write`
        raises, the time counts as not saved.
        """
        time_s, downtimes = self.clock(), [each for each in self._downtimes if each[0] > oldest_cursor]
        write(json.dumps({"time_s": time_s, "downtimes": downtimes}).encode())
        self._saved_at_s, self._downtimes = time_s, downtimes
