"""The master's clock: seconds since the epoch that never go back and never jump.

Sessions, leases, deadlines and the journal's outcomes share it, so a jump would end them. When the host's clock is
set, this one follows by at most SLEW seconds a second.
"""

import threading
import time
from collections.abc import Callable

SLEW = 0.1
READ_EVERY_S = 1.0


class Clock:
    """`wall` and `monotonic` are the host's clocks, in seconds. Safe to read from several threads."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._read_s = monotonic()
        self._offset_s = wall() - self._read_s
        self._last_s = 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time now, in seconds since the epoch."""
        with self._lock:
            monotonic_s = self._monotonic()
            if monotonic_s >= self._read_s + READ_EVERY_S:
                self._read_s = monotonic_s
                error_s = self._wall() - monotonic_s - self._offset_s
                self._offset_s += max(-SLEW * READ_EVERY_S, min(SLEW * READ_EVERY_S, error_s))
            self._last_s = max(self._last_s, monotonic_s + self._offset_s)
            return self._last_s

    def skew(self) -> float:
        """What to add to a time of the host's clock, as it is now, for the same time of this one."""
        return self.now() - self._wall()
