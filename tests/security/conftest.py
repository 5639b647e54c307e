"""One master for the tests of security, and one for those who restart theirs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.house import House


@pytest.fixture(scope="session")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One for all tests: what they do is undone, or does not meet."""
    it = House(tmp_path_factory.mktemp("house"))
    yield it
    it.close()


@pytest.fixture
def own_house(tmp_path: Path) -> Iterator[House]:
    """For a test that restarts it, or looks at everything that it wrote."""
    it = House(tmp_path)
    yield it
    it.close()
