"""Missing results, with a few seeds; `python -m tests.mutations` breaks the rule on purpose."""

import pytest

from tests.hostile import lost_results


@pytest.mark.parametrize("seed", range(12))
def test_a_missing_result_is_never_delivered_as_a_value(seed: int) -> None:
    lost_results.check(seed)
