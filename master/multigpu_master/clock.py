"""The master's clock, in seconds since 1970. Once started, it never goes back and never jumps.

Sessions, leases, deadlines and the retention of outcomes use this clock, and a jump forward would expire all of them.
The clock starts at the host's time, or at the time of the newest task or outcome in the journal if that is later. Then
it follows the host's monotonic clock. A change of the host's time while the master runs takes effect at the next start
of a master.
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
        """Moves the clock to `newest_s` (JournalReads.newest_time_s) if that is later. Call it before the core or the
        retention use `now`. (The journal has already chosen the epoch of this start, from the host's time: see ids.py.)
        """
        self._offset_s = max(self._offset_s, newest_s - self._monotonic())

    def now(self) -> float:
        """The time now, in seconds since 1970."""
        return self._offset_s + self._monotonic()

    def skew(self) -> float:
        """Returns by how many seconds this clock is ahead of the host's clock."""
        return self.now() - self._wall()
