"""Energy of a batch, from the energy counter or the power sensor of its device.

Pure. Readings are taken ten times a second while the device works. Power is taken as constant between two readings, and
as the mean power after the last one. Batches that run at the same time share the device's energy equally, and the tasks
of a batch share its part by their work. So the energies of all tasks add up to the energy that the device used while
it worked, idle power included.

Each energy has an uncertainty: half the width of its error interval, as a share of the value. It is the sum of:

- SENSOR_ERROR, the error of NVIDIA's sensors;
- the lag of a reading divided by the measured time: the readings at both ends may be that old;
- the variation of power divided by the square root of the batch's length in lags, because the sensors of A100 and H100
  see only a quarter of the time, so each reading is a sample. A batch that is too short to be measured gets the mean
  power around it;
- the share of the batch after the last reading, times the variation of power, which counts as at least 0.1;
- 1 for each other process that works on the device: equal shares are assumed, the true share is unknown.

There is no energy if the sum without the last item is 1 or more.
"""

import bisect
from dataclasses import dataclass
from enum import IntEnum

SENSOR_ERROR = 0.05
READING_INTERVAL_S = 0.1
# A reading that follows sooner is ignored: the counter moves in steps, and a step in a short time looks like a burst.
_APART_NS = int(READING_INTERVAL_S * 1e9 / 2)
# When there are this many readings, every second one of the older half is dropped.
READINGS_MAX = 512


class EnergyMethod(IntEnum):
    """Values as in multigpu.v1.EnergyMethod."""

    COUNTER = 1
    SAMPLED_POWER = 2


# How old a reading may be: NVML's counter moves every 20 to 100 ms; its power value is the mean of the last second.
LAG_S = {EnergyMethod.COUNTER: 0.1, EnergyMethod.SAMPLED_POWER: 1.0}
# A batch shorter than this many lags is measured as part of a longer time.
BASE_LAGS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of a batch for each unit of its work."""

    joules_per_unit: float
    method: EnergyMethod
    uncertainty: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a batch used for each unit of its work."""

    # Seconds on the device. Concurrent batches get equal shares of the time.
    device_s_per_unit: float = 0.0
    # None: it wasn't measured.
    energy: Energy | None = None


NO_USAGE = Usage()


class EnergyMeter:
    """The readings since the device began to work. Times in nanoseconds since 1970."""

    def __init__(self, method: EnergyMethod) -> None:
        self.method = method
        # The number of processes that work on the device now; all engines of this worker count as one.
        self.sharers = 1
        self._base_ns = int(BASE_LAGS * LAG_S[method] * 1e9)
        self._lag_ns = int(LAG_S[method] * 1e9)
        self._last_value = 0.0
        # Times; joules for each concurrent batch since the first reading; and the same, divided by the number of
        # sharers. Replaced as a whole, because `read` and `measure` run on different threads.
        self._readings: tuple[list[int], list[float], list[float]] = ([], [], [])

    def reset(self) -> None:
        """The device has no work: forget the readings."""
        self._readings = ([], [], [])

    def read(self, now_ns: int, value: float, running: int) -> None:
        """`value`: the counter in joules or the power in watts, by the method. `running`: concurrent batches."""
        times, joules, ours = self._readings
        if times and 0 < now_ns - times[-1] < _APART_NS:
            return
        last_value, self._last_value = self._last_value, value
        if self.method is EnergyMethod.COUNTER:
            grown = value - last_value
        else:
            grown = (last_value + value) / 2 * (now_ns - times[-1]) / 1e9 if times else 0.0
        # The first reading, or the clock was set back, or the driver was loaded again.
        if not times or now_ns <= times[-1] or grown < 0:
            self._readings = ([now_ns], [0.0], [0.0])
            return
        if len(times) >= READINGS_MAX:
            half = len(times) // 2
            times = times[:half:2] + times[half:]
            joules, ours = (kept[:half:2] + kept[half:] for kept in (joules, ours))
        grown /= max(1, running)
        self._readings = ([*times, now_ns], [*joules, joules[-1] + grown], [*ours, ours[-1] + grown / self.sharers])

    def measure(self, start_ns: int, finish_ns: int, units: int) -> Energy | None:
        """Energy of a batch for each unit of its work. None: it cannot be measured."""
        times, joules, ours = self._readings
        window_ns = finish_ns - start_ns
        if len(times) < 2 or window_ns <= 0 or units <= 0:
            return None
        # The readings around the batch; also earlier ones if the batch is too short.
        right = min(bisect.bisect_left(times, finish_ns), len(times) - 1)
        left = max(0, bisect.bisect_right(times, min(start_ns, times[right] - self._base_ns)) - 1)
        base_ns = times[right] - times[left]
        if base_ns <= 0:
            return None
        # In joules per nanosecond.
        powers = [(joules[i + 1] - joules[i]) / (times[i + 1] - times[i]) for i in range(left, right)]
        mean = (joules[right] - joules[left]) / base_ns
        if mean <= 0:
            return None
        covered_ns = max(0, min(finish_ns, times[right]) - max(start_ns, times[left]))
        total = mean * window_ns
        if window_ns >= self._base_ns:
            inside = _at(times, joules, min(finish_ns, times[right])) - _at(times, joules, max(start_ns, times[left]))
            total = inside + mean * (window_ns - covered_ns)
        variation = max(max(powers) - mean, mean - min(powers)) / mean
        uncertainty = (
            SENSOR_ERROR
            + self._lag_ns / base_ns
            + variation / max(1.0, window_ns / self._lag_ns) ** 0.5
            + max(0.1, variation) * (1.0 - covered_ns / window_ns)
        )
        if uncertainty >= 1.0:
            return None
        share = (ours[right] - ours[left]) / (joules[right] - joules[left])
        return Energy(
            joules_per_unit=total * share / units, method=self.method, uncertainty=uncertainty + 1 / share - 1
        )


def _at(times: list[int], joules: list[float], time_ns: int) -> float:
    """Energy at a time between two readings."""
    right = min(max(1, bisect.bisect_left(times, time_ns)), len(times) - 1)
    left = right - 1
    share = (time_ns - times[left]) / (times[right] - times[left])
    return joules[left] + share * (joules[right] - joules[left])
