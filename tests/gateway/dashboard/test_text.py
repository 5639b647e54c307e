"""Numbers as the dashboard writes them."""

import pytest
from multigpu_gateway.dashboard import text


@pytest.mark.parametrize(
    ("seconds", "written"),
    [(0.0, "0 ms"), (0.012, "12 ms"), (0.9996, "1.0 s"), (3.4, "3.4 s"), (59.97, "1 min"), (310, "5 min 10 s")],
)
def test_durations_change_their_unit_where_they_are_rounded_to_it(seconds: float, written: str) -> None:
    assert text.duration(seconds) == written


@pytest.mark.parametrize(("joules", "written"), [(3.4, "3.4 J"), (3599.9, "1 Wh"), (3.59999e6, "1 kWh")])
def test_energy_does_too(joules: float, written: str) -> None:
    assert text.energy(joules) == written
