"""Each abuse in a small size. Large sizes: `python -m tests.hostile abuse`."""

from collections.abc import Iterator

import pytest

from tests.fleet import Fleet
from tests.hostile.abuses.base import Abuse, abused, suffer
from tests.hostile.abuses.command import ABUSES


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with abused(tmp_path_factory.mktemp("abused")) as fleet:
        yield fleet


@pytest.mark.slow
@pytest.mark.parametrize("abuse", ABUSES, ids=lambda abuse: abuse.name)
def test_other_clients_are_served_and_memory_is_bounded(fleet: Fleet, abuse: Abuse) -> None:
    cost = suffer(fleet, abuse, abuse.short)
    assert cost.served > 1
