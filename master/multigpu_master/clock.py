"""The master's clock: seconds since the epoch that never go back and never jump.

Sessions, leases, deadlines and the journal's outcomes share it: a jump would end them. When the host's clock is set,
this clock follows by at most SLEW seconds a second.

The journal keeps the skew, by which this clock is ahead of the host's. The next master's clock begins at the host's
time plus the skew, but never before the time at which the skew was saved. A clock that was ahead begins at most AHEAD_S
after that time, or at the host's time if that is later: the host's clock may have been corrected while no master ran,
and the skew would end everything early. A skew that leads to a time before 2025 is ignored: the last master had
started on a host that did not know the time.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from multigpu_master.ids import FIRST_EPOCH_S

SLEW = 0.1
READ_EVERY_S = 1.0
AHEAD_S = 600.0
SAVED_SKEW_MIN_S = 1.0  # of the skew, and of what it moves before it is saved again


@dataclass(frozen=True, slots=True)
class SavedSkew:
    """The skew at `time_s` of the master's clock."""

    skew_s: float
    time_s: float

    def begin_s(self, wall_s: float) -> float:
        """Where the next clock begins if the host's is at `wall_s`. See the module."""
        begin_s = wall_s + self.skew_s
        if begin_s < FIRST_EPOCH_S:
            return wall_s
        if self.skew_s > 0:
            begin_s = min(begin_s, max(wall_s, self.time_s + AHEAD_S))
        return max(begin_s, self.time_s)


class Clock:
    """`wall` and `monotonic` are the host's clocks, in seconds. Safe to read from several threads."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        # Since when (monotonic), the time then, and by how much it is faster in the first READ_EVERY_S. Replaced as a
        # whole, after these are over: so the time is continuous.
        self._line = monotonic(), wall(), 0.0
        self._lock = threading.Lock()
        self._saved_skew_s = 0.0

    def resume(self, saved: SavedSkew) -> None:
        """Continues the last master's clock. Call it before anything is stamped or can expire."""
        with self._lock:
            self._line = self._monotonic(), saved.begin_s(self._wall()), 0.0
        self._saved_skew_s = saved.skew_s

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
        """By how much this clock is ahead of the host's now."""
        return self.now() - self._wall()

    def unsaved(self) -> SavedSkew | None:
        """The skew to save, if it has moved since this was last called; 0: nothing to keep."""
        now_s, skew_s = self.now(), self.skew()
        if abs(skew_s) < SAVED_SKEW_MIN_S:
            skew_s = 0.0
        moved_s = abs(skew_s - self._saved_skew_s)
        if moved_s < SAVED_SKEW_MIN_S and bool(skew_s) == bool(self._saved_skew_s):
            return None
        self._saved_skew_s = skew_s
        return SavedSkew(skew_s, now_s)
