"""Energy of a device between two times, from readings that were taken before, during and after, with its uncertainty.

From an energy counter: the difference of its readings, interpolated at both ends. From sampled power, where there is no
counter: the integral, with straight lines between the readings.

The uncertainty bounds the error at about 95 % confidence, as half the width of the interval. It is the sum of:

- SENSOR_ERROR of the energy. NVIDIA states ±5 %; Yang et al., "Part-time Power Measurements" (SC 2024,
  https://arxiv.org/abs/2312.02741) found errors of this size;
- the lag of the readings (energy.LAG_S: 0.1 s for a counter, 1 s for power) times the variation of power around both
  ends: the readings at an end may be that old, and power may have changed since. A window without work around it has
  the variation between idle and working;
- for sampled power, the variation of power within the window over the root of the number of independent readings: the
  sensor is blind between them.

Windows that follow one another share the error of the end between them. So the lag counts for each change between the
windows and what surrounds them, which is what `variation` measures.
"""

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from multigpu_worker.device.energy import LAG_S, SENSOR_ERROR, EnergyMethod


@dataclass(frozen=True, slots=True)
class Energy:
    joules: float
    uncertainty_joules: float

    def __add__(self, other: "Energy") -> "Energy":
        """Errors of sensors are not independent: they are added, not their squares."""
        return Energy(self.joules + other.joules, self.uncertainty_joules + other.uncertainty_joules)

    def minus(self, other: "Energy") -> "Energy":
        return Energy(self.joules - other.joules, self.uncertainty_joules + other.uncertainty_joules)

    def times(self, factor: float) -> "Energy":
        return Energy(self.joules * factor, self.uncertainty_joules * factor)


ZERO = Energy(0.0, 0.0)


@dataclass(slots=True)
class Readings:
    """Readings of one device, oldest first: times in seconds, and the counter in joules or the power in watts."""

    method: EnergyMethod
    times_s: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    _integrals: list[float] = field(default_factory=lambda: [0.0], repr=False)

    def add(self, time_s: float, value: float) -> None:
        self.values.append(value)
        self.times_s.append(time_s)  # the last: another thread may read

    def energy(self, begin_s: float, end_s: float) -> Energy:
        """Raises ValueError if the readings do not cover this time."""
        if len(self.times_s) < 2 or not self.times_s[0] <= begin_s <= end_s <= self.times_s[-1]:
            raise ValueError(f"there are no readings for the whole time from {begin_s:.1f} s to {end_s:.1f} s")
        joules = self._total(end_s) - self._total(begin_s)
        lag_s = LAG_S[self.method]
        uncertainty = SENSOR_ERROR * abs(joules) + lag_s * self._variation(begin_s - lag_s, end_s + lag_s)
        if self.method is EnergyMethod.SAMPLED_POWER:
            powers = self._powers(begin_s, end_s)
            independent = max(1.0, (end_s - begin_s) / lag_s)
            uncertainty += 2 * statistics.pstdev(powers) * (end_s - begin_s) / independent**0.5
        return Energy(joules, uncertainty)

    def _total(self, time_s: float) -> float:
        """Energy since a fixed moment, in joules."""
        right = min(max(1, bisect.bisect_left(self.times_s, time_s)), len(self.times_s) - 1)
        left = right - 1
        since_s, until_s = self.times_s[left], self.times_s[right]
        share = (time_s - since_s) / (until_s - since_s)
        before, after = self.values[left], self.values[right]
        if self.method is EnergyMethod.COUNTER:
            return before + share * (after - before)
        power_then = before + share * (after - before)
        return self._integral(left) + (before + power_then) / 2 * (time_s - since_s)

    def _integral(self, count: int) -> float:
        """Of power from the first reading to the one with this index."""
        while len(self._integrals) <= count:
            n = len(self._integrals)
            step = (self.values[n - 1] + self.values[n]) / 2 * (self.times_s[n] - self.times_s[n - 1])
            self._integrals.append(self._integrals[-1] + step)
        return self._integrals[count]

    def _powers(self, begin_s: float, end_s: float) -> Sequence[float]:
        """Power between the readings around this time, in watts."""
        left = max(0, bisect.bisect_right(self.times_s, begin_s) - 1)
        right = min(len(self.times_s) - 1, bisect.bisect_left(self.times_s, end_s))
        if self.method is EnergyMethod.SAMPLED_POWER:
            return self.values[left : right + 1]
        # A counter moves in steps: differences are taken over two lags.
        span_s = 2 * LAG_S[self.method]
        powers, since = [], left
        for n in range(left + 1, right + 1):
            if self.times_s[n] - self.times_s[since] >= span_s:
                powers.append((self.values[n] - self.values[since]) / (self.times_s[n] - self.times_s[since]))
                since = n
        return powers or [(self.values[right] - self.values[left]) / (self.times_s[right] - self.times_s[left])]

    def _variation(self, begin_s: float, end_s: float) -> float:
        powers = self._powers(begin_s, end_s)
        return max(powers) - min(powers)
