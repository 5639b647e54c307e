"""Sizes, energy and durations, as mgpuctl and the dashboard write them."""

import pytest
from multigpu._units import format_duration, format_energy, format_size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"), (0.0, "0 s"), (6.2e-5, "62 µs"), (0.9996e-3, "1 ms"), (0.0035, "3.5 ms"), (0.25, "250 ms"),
        (0.9996, "1 s"), (2.54, "2.5 s"), (9.97, "10 s"), (42, "42 s"), (59.97, "1 min"), (185, "3 min 5 s"),
        (7_800, "2 h 10 min"), (97_200, "1 d 3 h"), (4 * 86_400 + 60, "4 d"),
    ],
)  # fmt: skip
def test_a_duration_has_the_unit_of_what_it_is_rounded_to(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("joules", "text"),
    [
        (8e-5, "80 µJ"), (0.012, "12 mJ"), (-7.44, "-7.44 J"), (0.0, "0 J"), (3599.9, "1 Wh"), (43_200.0, "12 Wh"),
        (3.599e6, "1 kWh"), (5.4e6, "1.5 kWh"), (3.6e10, "10,000 kWh"),
    ],
)  # fmt: skip
def test_energy_does_too(joules: float, text: str) -> None:
    assert format_energy(joules) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (102_399, "100 KiB"), (150 * 1024, "150 KiB"), (1_048_575, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 42, "12.0 TiB"),
    ],
)  # fmt: skip
def test_a_size_has_its_largest_unit(count: float, text: str) -> None:
    assert format_size(count) == text
