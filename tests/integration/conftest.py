"""The fleets of the integration tests: real processes, one fleet a module where its tests leave it as they found it."""

from collections.abc import Iterator

import pytest

from tests.fakes.gpus import SimulatedGpus
from tests.fleet import Fleet


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> SimulatedGpus:
    gpus = SimulatedGpus(tmp_path_factory.mktemp("gpus") / "state", n=2)
    gpus.env()  # skips where there is no compiler
    return gpus


@pytest.fixture(scope="module")
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A master and two workers, for all tests of a module. FLEET in the module: keyword arguments for it."""
    options = getattr(request.module, "FLEET", {})
    with Fleet(tmp_path_factory.mktemp("fleet"), **options) as running:
        yield running
        assert not running.faults()
