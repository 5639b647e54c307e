"""Fleets for the security tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.secured import SecuredFleet


@pytest.fixture(scope="session")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredFleet]:
    """Shared by all tests: they undo their changes, or use different names."""
    with SecuredFleet(tmp_path_factory.mktemp("secured")) as it:
        yield it


@pytest.fixture
def own_secured(tmp_path: Path) -> Iterator[SecuredFleet]:
    """For a test that restarts the master, or reads all of its files."""
    with SecuredFleet(tmp_path) as it:
        yield it
