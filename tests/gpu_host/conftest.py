"""A fleet on eight simulated GPUs that the tests of a module share."""

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
    """All eight are healthy, and the breaker is closed."""
    running.make_good()
    return running
