"""The master's clock: seconds since the epoch that never go back and never jump.

Sessions, leases, deadlines and the journal's outcomes share it: a jump would end them. It begins at the host's time, or
at the newest time in the journal if that is later, and then follows the host's monotonic clock. If the host's clock is
set while the master runs, the next master follows it.
"""

import time
from collections.abc import Callable


class Clock:
    """`wall` and `monotonic` are the host's clocks, in seconds. Safe to read from several threads."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._offset_s = wall() - monotonic()

    def begin(self, newest_s: float) -> None:
        """Goes on to the newest time in the journal. Call it before anything is stamped or can expire."""
        self._offset_s = max(self._offset_s, newest_s - self._monotonic())

    def now(self) -> float:
        """The time now, in seconds since the epoch."""
        return self._offset_s + self._monotonic()

    def skew(self) -> float:
        """By how much this clock is ahead of the host's now."""
        return self.now() - self._wall()
