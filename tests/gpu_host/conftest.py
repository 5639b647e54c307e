"""A host of eight simulated GPUs: a master, and a worker for each GPU, for all scenarios of a module."""

from collections.abc import Iterator

import pytest

from tests.gpu_host.host import Host


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with Host(tmp_path_factory.mktemp("host")) as host:
        yield host
        assert not host.fleet.faults()


@pytest.fixture
def host(running: Host) -> Host:
    """All eight are healthy, the breaker is closed, and nothing is known against anybody."""
    running.make_good()
    return running
