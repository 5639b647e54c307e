"""The page of a worker that owns several GPUs."""

from collections.abc import Iterator

import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet, until
from tests.gateway.dashboard.conftest import Visitor


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    return SimulatedGpus(tmp_path_factory.mktemp("gpus") / "gpus", 2)


@pytest.fixture(scope="module")
def fleet(gpus: SimulatedGpus, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), workers=0, env=gpus.env()) as running:
        running.start_worker("pair", "--device", "cuda:0,cuda:1")
        running.wait_for_workers()
        yield running
        assert not running.faults()


@pytest.mark.slow
def test_the_page_of_a_worker_has_a_row_for_each_of_its_devices(visitor: Visitor, gpus: SimulatedGpus) -> None:
    gpus.heat(1, 66)
    until(lambda: "66 °C" in visitor.page("/ui/devices/pair").text, what="the temperature")
    page = visitor.page("/ui/devices/pair")
    assert "2 x Simulated H200" in page.text
    first, second = (row for row in page.rows if row.startswith("cuda:"))
    assert first.startswith("cuda:0 Simulated H200") and "66 °C" not in first
    assert second.startswith("cuda:1 Simulated H200") and "66 °C" in second
