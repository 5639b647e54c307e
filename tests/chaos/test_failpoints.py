"""The failpoints name functions that are there."""

import pytest

from tests.chaos.failpoints import FAILPOINTS, Failpoint


@pytest.mark.parametrize("point", FAILPOINTS, ids=lambda point: point.name)
def test_the_function_of_a_failpoint_is_there(point: Failpoint) -> None:
    owner, name = point.owner()
    assert callable(getattr(owner, name))
