"""The rule for results, for a few seeds; `python -m tests.mutations` breaks it on purpose."""

import pytest

from tests.hostile import lost_results


@pytest.mark.parametrize("seed", range(12))
def test_a_result_that_is_not_there_is_never_delivered_as_a_value(seed: int) -> None:
    lost_results.check(seed)
