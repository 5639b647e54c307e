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
        # Since when (monotonic), the time then, and by how much it is faster in the first READ_EVERY_S. Replaced as a
        # whole, and not before these are over: the time goes on where it was.
        self._line = monotonic(), wall(), 0.0
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time now, in seconds since the epoch."""
        began_s, time_s, faster = self._line
        elapsed_s = self._monotonic() - began_s
        if elapsed_s >= READ_EVERY_S:
            return self._read_wall()
        return time_s + elapsed_s + elapsed_s * faster

    def _read_wall(self) -> float:
        with self._lock:
            began_s, time_s, faster = self._line
            monotonic_s = self._monotonic()
            elapsed_s = monotonic_s - began_s
            now_s = time_s + elapsed_s + min(elapsed_s, READ_EVERY_S) * faster
            if elapsed_s >= READ_EVERY_S:  # else another thread has been here
                error_s = self._wall() - now_s
                self._line = monotonic_s, now_s, max(-SLEW, min(SLEW, error_s / READ_EVERY_S))
            return now_s

    def skew(self) -> float:
        """What to add to a time of the host's clock, as it is now, for the same time of this one."""
        return self.now() - self._wall()
