"""Energy of a window: the true value lies within the stated uncertainty, for devices of every kind of load."""

import random
import statistics
from itertools import pairwise

import pytest
from multigpu_worker.device.energy import SENSOR_ERROR, EnergyMethod
from multigpu_worker.energy.windows import Readings

BEGIN_S = 5.0


class SimulatedDevice:
    """A device with a random load, whose sensor errs by up to SENSOR_ERROR. Its counter moves in steps, or its power is
    the mean of the last second, as with NVIDIA's drivers.
    """

    def __init__(self, seed: int, length_s: float) -> None:
        chosen = random.Random(seed)
        self.gain = 1 + chosen.uniform(-SENSOR_ERROR, SENSOR_ERROR)
        self.period_s = chosen.uniform(0.02, 0.1)
        self.jitter_s = [chosen.uniform(0, 0.02) for _ in range(int(12 * (length_s + 2 * BEGIN_S)))]
        idle, busy = chosen.uniform(50, 90), chosen.uniform(200, 700)
        self.powers = [(0.0, idle)]
        at_s, mean_s = BEGIN_S, chosen.choice([0.05, 0.5, 3.0])
        while at_s < BEGIN_S + length_s:
            self.powers.append((at_s, chosen.choice([busy, busy * chosen.uniform(0.5, 1.0), 2 * idle])))
            at_s += chosen.expovariate(1 / mean_s)
        self.powers += [(BEGIN_S + length_s, idle), (length_s + 2 * BEGIN_S, 0.0)]

    def joules(self, begin_s: float, end_s: float) -> float:
        """The true energy."""
        spans = ((max(a, begin_s), min(b, end_s), power) for (a, power), (b, _) in pairwise(self.powers))
        return sum(max(0.0, b - a) * power for a, b, power in spans)

    def readings(self, method: EnergyMethod) -> Readings:
        found, at_s = Readings(method), 0.0
        for jitter_s in self.jitter_s:
            if method is EnergyMethod.COUNTER:
                found.add(at_s, self.gain * self.joules(0, at_s // self.period_s * self.period_s))
            else:
                found.add(at_s, self.gain * self.joules(max(0.0, at_s - 1), at_s) / min(1.0, at_s or 1.0))
            at_s += 0.1 + jitter_s
        return found


@pytest.mark.parametrize(
    ("method", "length_s", "error_max"),
    [
        (EnergyMethod.COUNTER, 1.0, 0.2),
        (EnergyMethod.COUNTER, 10.0, 0.08),
        (EnergyMethod.SAMPLED_POWER, 10.0, 0.5),
    ],
)
def test_the_true_energy_is_within_the_uncertainty_in_95_of_100_runs(
    method: EnergyMethod, length_s: float, error_max: float
) -> None:
    inside, uncertainties = 0, []
    for seed in range(1000):
        device = SimulatedDevice(seed, length_s)
        energy = device.readings(method).energy(BEGIN_S, BEGIN_S + length_s)
        inside += abs(energy.joules - device.joules(BEGIN_S, BEGIN_S + length_s)) <= energy.uncertainty_joules
        uncertainties.append(energy.uncertainty_joules / energy.joules)
    assert inside >= 950
    assert statistics.median(uncertainties) < error_max, "an uncertainty that is always right says nothing"


def test_a_constant_power_is_found_exactly() -> None:
    for method in EnergyMethod:
        readings = Readings(method)
        for n in range(101):
            readings.add(n / 10, 200.0 * n / 10 if method is EnergyMethod.COUNTER else 200.0)
        energy = readings.energy(1.05, 6.05)
        assert energy.joules == pytest.approx(1000.0)
        assert energy.uncertainty_joules == pytest.approx(SENSOR_ERROR * 1000.0)


def test_windows_add_up() -> None:
    readings = SimulatedDevice(1, 10.0).readings(EnergyMethod.COUNTER)
    parts = [readings.energy(a, b) for a, b in pairwise([5.0, 6.3, 9.1, 15.0])]
    assert sum(part.joules for part in parts) == pytest.approx(readings.energy(5.0, 15.0).joules)
    whole = parts[0] + parts[1] + parts[2]
    assert whole.uncertainty_joules >= readings.energy(5.0, 15.0).uncertainty_joules
    assert whole.minus(parts[0]).joules == pytest.approx(parts[1].joules + parts[2].joules)


def test_a_time_without_readings_has_no_energy() -> None:
    readings = Readings(EnergyMethod.COUNTER)
    with pytest.raises(ValueError, match="no readings"):
        readings.energy(0.0, 0.0)
    readings.add(1.0, 0.0)
    readings.add(2.0, 100.0)
    for begin_s, end_s in ((0.9, 1.5), (1.5, 2.1), (1.6, 1.5)):
        with pytest.raises(ValueError, match="no readings"):
            readings.energy(begin_s, end_s)
