"""The fixtures of the tests of the deploy script."""

from pathlib import Path

import pytest

from tests.deploy.deployment import checkout as checkout  # noqa: PLC0414  pytest finds it here
from tests.fakes.gpus import SimulatedGpus


@pytest.fixture
def gpus(tmp_path: Path) -> SimulatedGpus:
    return SimulatedGpus(tmp_path / "gpus", n=8)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where services are installed: --root."""
    return tmp_path / "root"
