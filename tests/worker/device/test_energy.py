"""The measured energy of batches, from readings of a simulated device whose power is known."""

import random
from collections.abc import Callable

import pytest
from multigpu_worker.device.energy import READINGS_MAX, SENSOR_ERROR, EnergyMeter, EnergyMethod

S = 1_000_000_000
T0 = 1_700_000_000 * S


@pytest.fixture
def meter() -> EnergyMeter:
    return EnergyMeter(EnergyMethod.COUNTER)


def read(
    meter: EnergyMeter, until_s: float, watts: Callable[[float], float], running: int = 1
) -> Callable[[float], float]:
    """Take a reading every 0.1 s from 0 to `until_s`. Returns the true energy from 0 to a time, in joules."""
    step_s = 0.001
    sums = [0.0]
    for n in range(int((until_s + 1) / step_s)):
        sums.append(sums[-1] + watts(n * step_s) * step_s)

    def joules(at_s: float) -> float:
        return sums[round(at_s / step_s)]

    for n in range(int(until_s / 0.1) + 1):
        at_s = n * 0.1
        value = joules(at_s) if meter.method is EnergyMethod.COUNTER else watts(at_s)
        meter.read(T0 + int(at_s * S), value, running)
    return joules


def measured(meter: EnergyMeter, start_s: float, finish_s: float, units: int = 1) -> tuple[float, float]:
    """The energy of a batch in joules, and its relative uncertainty."""
    energy = meter.measure(T0 + int(start_s * S), T0 + int(finish_s * S), units)
    assert energy is not None
    assert energy.method is meter.method
    return energy.joules_per_unit * units, energy.uncertainty


@pytest.mark.parametrize("method", EnergyMethod)
def test_constant_power_is_measured_exactly(method: EnergyMethod) -> None:
    meter = EnergyMeter(method)
    read(meter, 20.0, lambda _: 300.0)
    joules, uncertainty = measured(meter, 2.03, 14.77)
    assert joules == pytest.approx(300.0 * 12.74, rel=1e-3)
    assert SENSOR_ERROR < uncertainty < 0.2


@pytest.mark.parametrize(
    ("start_s", "finish_s", "tolerance"),
    [
        pytest.param(2.5, 3.06, 1e-3, id="after the last reading the mean power counts"),
        pytest.param(2.98, 2.99, 1e-2, id="a batch shorter than the lag counts at the mean power around it"),
    ],
)
def test_gaps_count_at_the_mean_power(meter: EnergyMeter, start_s: float, finish_s: float, tolerance: float) -> None:
    read(meter, 3.0, lambda _: 100.0)
    joules, uncertainty = measured(meter, start_s, finish_s)
    assert joules == pytest.approx(100.0 * (finish_s - start_s), rel=tolerance)
    assert uncertainty < 0.2


def test_tasks_share_the_energy_of_their_batch_and_concurrent_batches_all_of_it(meter: EnergyMeter) -> None:
    read(meter, 5.0, lambda _: 100.0)
    energy = meter.measure(T0 + S, T0 + 3 * S, 50)
    assert energy is not None
    assert energy.joules_per_unit == pytest.approx(200.0 / 50, rel=1e-3)
    meter.reset()
    read(meter, 5.0, lambda _: 100.0, running=2)
    first, second = (measured(meter, 1.0, 4.0)[0] for _ in range(2))
    assert first == second == pytest.approx(150.0, rel=1e-3)


def test_no_energy_without_a_usable_measurement(meter: EnergyMeter) -> None:
    assert meter.measure(T0, T0 + S, 1) is None, "no reading"
    meter.read(T0, 10.0, 1)
    assert meter.measure(T0, T0 + S, 1) is None, "one reading"
    meter.read(T0 + S // 10, 10.0, 1)
    assert meter.measure(T0, T0 + S // 10, 1) is None, "the counter has not moved"
    meter.read(T0 + S // 5, 11.0, 1)
    assert meter.measure(T0, T0 + S // 5, 1) is None, "the counter has moved once: the error may be all of it"
    read(meter, 3.0, lambda _: 100.0)
    assert meter.measure(T0 + S, T0 + S, 1) is None, "no time"
    assert meter.measure(T0 + S, T0 + 2 * S, 0) is None, "no work"
    meter.reset()
    assert meter.measure(T0 + S, T0 + 2 * S, 1) is None, "the device was idle since"


def test_two_close_readings_around_a_step_of_the_counter_are_no_burst(meter: EnergyMeter) -> None:
    """Heartbeats cause readings between the regular ones."""
    step_s = 0.02
    for at_s in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.598, 0.602, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2):
        meter.read(T0 + int(at_s * S), int(at_s / step_s + 1e-6) * step_s * 300.0, 1)
    joules, uncertainty = measured(meter, 0.1, 1.2)
    assert joules == pytest.approx(330.0, rel=0.1)
    assert uncertainty < 0.3


def test_a_counter_that_restarts_is_not_counted_backwards_nor_a_clock_that_is_set_back(meter: EnergyMeter) -> None:
    for n, value in enumerate((1e6, 1e6 + 100, 5.0)):
        meter.read(T0 + n * S, value, 1)
    assert meter.measure(T0, T0 + 2 * S, 1) is None
    for n in range(3, 8):
        meter.read(T0 + n * S, 5.0 + (n - 2) * 100.0, 1)
    assert measured(meter, 3, 6)[0] == pytest.approx(300.0)
    meter.reset()
    meter.read(T0 + 100 * S, 0.0, 1)
    for n in range(4):
        meter.read(T0 + n * S, 100.0 + n * 50.0, 1)
    assert measured(meter, 0, 3)[0] == pytest.approx(150.0)


def test_a_second_process_makes_any_share_possible(meter: EnergyMeter) -> None:
    meter.sharers = 2
    read(meter, 5.0, lambda _: 100.0)
    joules, uncertainty = measured(meter, 1.0, 4.0)
    assert joules == pytest.approx(150.0, rel=1e-3)
    assert joules * (1 - uncertainty) <= 0.0 and joules * (1 + uncertainty) >= 300.0


def test_other_processes_share_only_the_time_in_which_they_work(meter: EnergyMeter) -> None:
    for n in range(61):
        meter.sharers = 2 if 20 < n <= 40 else 1
        meter.read(T0 + n * S // 10, n * 10.0, 1)
    assert measured(meter, 0.0, 2.0)[0] == pytest.approx(200.0, rel=1e-3)
    assert measured(meter, 2.0, 4.0)[0] == pytest.approx(100.0, rel=1e-3)
    joules, uncertainty = measured(meter, 0.0, 6.0)
    assert joules == pytest.approx(500.0, rel=1e-3)
    assert joules * (1 - uncertainty) <= 400.0 and joules * (1 + uncertainty) >= 600.0


def test_the_number_of_readings_is_limited(meter: EnergyMeter) -> None:
    for n in range(20_000):
        meter.read(T0 + n * S // 10, n * 10.0, 1)
    assert len(meter._readings[0]) <= READINGS_MAX
    assert measured(meter, 3.0, 1990.0)[0] == pytest.approx(100.0 * 1987.0, rel=1e-3)


@pytest.mark.parametrize("seed", range(40))
def test_the_true_energy_is_within_the_uncertainty(meter: EnergyMeter, seed: int) -> None:
    """With random power, and batches of any start and length."""
    random_ = random.Random(seed)
    levels = [random_.uniform(80.0, 700.0) for _ in range(200)]
    pace_s = random_.choice([0.05, 0.2, 1.0, 3.0])
    joules = read(meter, 20.0, lambda at_s: levels[int(at_s / pace_s) % 200])
    found = missed = 0
    for _ in range(50):
        start_s = random_.uniform(0.0, 19.0)
        finish_s = min(20.0, start_s + random_.choice([0.02, 0.3, 1.5, 10.0]))
        energy = meter.measure(T0 + int(start_s * S), T0 + int(finish_s * S), 1)
        if energy is None:
            continue
        found += 1
        truth = joules(finish_s) - joules(start_s)
        missed += abs(truth - energy.joules_per_unit) > energy.uncertainty * energy.joules_per_unit + 1e-6
    assert missed <= 0.1 * found, f"{missed} of {found}"
