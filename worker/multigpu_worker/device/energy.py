"""What a batch takes of its device's energy: the difference of the device's counter over the batch's window.

Pure: readings come in with their instants, figures go out. Readings are taken while the device works, ten times a
second; what lies between two is interpolated, what lies after the last is taken to go on as before. Batches that run
at one time share what the device took in equal parts, for as long as they did; the tasks of a batch share its part by
their work. So what is put down to tasks adds up to what the device took while it worked, idle power included.

A figure is worth no more than the device's sensor, so each has an uncertainty, half the width of the interval as a
share of the figure. It adds up:

- SENSOR_ERROR, what NVIDIA's sensors are off by;
- the counter's period over the time that was measured: at its ends the counter may lag so far behind;
- how much power varied meanwhile, over the root of the number of readings: the sensors of A100 and H100 see a quarter
  of the time only, so that each reading is a sample of what went on; and what is shorter than the counter can tell is
  put down at the mean power of the busy second that it was part of;
- the share of the window that no reading covers, by how much power varied, at least a tenth of it;
- one for each other process that worked on the device: all are taken to have equal parts while they work, and each may
  have had anything between nothing and all.

Where that comes to 1 or more with us alone on the device, the device can't tell: then there is no figure.
"""

import bisect
from dataclasses import dataclass
from enum import IntEnum

# NVIDIA's own word for its sensors.
SENSOR_ERROR = 0.05
READING_INTERVAL_S = 0.1
# Readings closer than this are one: the counter moves in steps, and a step between two such would look like a burst.
_APART_NS = int(READING_INTERVAL_S * 1e9 / 2)
# So many readings are kept; past it the older half is thinned out.
READINGS_MAX = 512


class EnergyMethod(IntEnum):
    """How it was measured. The numbers are those of multigpu.v1.EnergyMethod."""

    COUNTER = 1
    SAMPLED_POWER = 2


# How far behind the truth a reading may be, in seconds: NVML's counter moves every 20 to 100 ms, and the power that it
# tells is the mean of the last second.
LAG_S = {EnergyMethod.COUNTER: 0.1, EnergyMethod.SAMPLED_POWER: 1.0}
# A window shorter than this many lags is measured as part of a longer one.
BASE_LAGS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What tasks took, for each unit of their work."""

    joules_per_unit: float
    method: EnergyMethod
    uncertainty: float


class EnergyMeter:
    """The readings since the device last began to work. Instants in nanoseconds since 1970."""

    def __init__(self, method: EnergyMethod) -> None:
        self.method = method
        # Who works on the device now: our engines count as one, other processes as one each.
        self.sharers = 1
        self._base_ns = int(BASE_LAGS * LAG_S[method] * 1e9)
        self._lag_ns = int(LAG_S[method] * 1e9)
        self._last_value = 0.0
        # Instants, and the joules by then of one of those that ran at one time, since the first reading: all, and our
        # part. Replaced, never changed: another thread may be at it.
        self._readings: tuple[list[int], list[float], list[float]] = ([], [], [])

    def reset(self) -> None:
        """The device has no work any more."""
        self._readings = ([], [], [])

    def read(self, now_ns: int, value: float, running: int) -> None:
        """The counter in joules, or power in watts, by the method; and how many batches run at one time."""
        times, joules, ours = self._readings
        if times and 0 < now_ns - times[-1] < _APART_NS:
            return
        last_value, self._last_value = self._last_value, value
        if self.method is EnergyMethod.COUNTER:
            grown = value - last_value
        else:
            grown = (last_value + value) / 2 * (now_ns - times[-1]) / 1e9 if times else 0.0
        # Nothing before it, the clock was set back, or the driver was loaded again.
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
        """What a batch took between two instants for each of its units. None: the device can't tell."""
        times, joules, ours = self._readings
        window_ns = finish_ns - start_ns
        if len(times) < 2 or window_ns <= 0 or units <= 0:
            return None
        # What is measured: the readings about the window, and those before it if that is too short.
        right = min(bisect.bisect_left(times, finish_ns), len(times) - 1)
        left = max(0, bisect.bisect_right(times, min(start_ns, times[right] - self._base_ns)) - 1)
        base_ns = times[right] - times[left]
        if base_ns <= 0:
            return None
        # In joules a nanosecond.
        powers = [(joules[i + 1] - joules[i]) / (times[i + 1] - times[i]) for i in range(left, right)]
        mean = (joules[right] - joules[left]) / base_ns
        if mean <= 0:
            return None
        covered_ns = max(0, min(finish_ns, times[right]) - max(start_ns, times[left]))
        if window_ns >= self._base_ns:
            inside = _at(times, joules, min(finish_ns, times[right])) - _at(times, joules, max(start_ns, times[left]))
            total = inside + mean * (window_ns - covered_ns)
        else:
            total = mean * window_ns
        # How far power went from its mean.
        swing = max(max(powers) - mean, mean - min(powers)) / mean
        uncertainty = (
            SENSOR_ERROR
            + self._lag_ns / base_ns
            + swing / max(1.0, window_ns / self._lag_ns) ** 0.5
            + max(0.1, swing) * (1.0 - covered_ns / window_ns)
        )
        if uncertainty >= 1.0:
            return None
        share = (ours[right] - ours[left]) / (joules[right] - joules[left])
        return Energy(
            joules_per_unit=total * share / units, method=self.method, uncertainty=uncertainty + 1 / share - 1
        )


def _at(times: list[int], joules: list[float], instant_ns: int) -> float:
    """Between two readings, as if power had been even."""
    right = min(max(1, bisect.bisect_left(times, instant_ns)), len(times) - 1)
    left = right - 1
    share = (instant_ns - times[left]) / (times[right] - times[left])
    return joules[left] + share * (joules[right] - joules[left])
