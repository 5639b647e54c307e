"""Ids: no id is given out twice, whatever becomes of the journal and of the clock. See test_incarnations.py, too."""

import pytest
from multigpu_master import ids
from multigpu_master.core.model import EPOCH_IDS
from multigpu_master.errors import JournalError

NOW_S = ids.FIRST_EPOCH_S + 60_000_000.0
TEN_YEARS_S = 10 * 365.25 * 86_400


def test_ids_end_where_numbers_of_javascript_do() -> None:
    assert ids.first_id(ids.EPOCHS_END) == 2**53


def test_ten_years_at_100_000_tasks_a_second_fit_even_if_the_clock_stands_still() -> None:
    # A task has an id and each of its attempts another; of a range at least half is used.
    epochs = TEN_YEARS_S * 100_000 * 2 / (EPOCH_IDS / 2)
    assert epochs < ids.EPOCHS_END
    assert NOW_S + TEN_YEARS_S - ids.FIRST_EPOCH_S < ids.EPOCHS_END
    # And they are used up more slowly than the clock brings new ones.
    assert epochs < TEN_YEARS_S


@pytest.mark.parametrize(
    ("last", "now_s", "epoch"),
    [
        (0, NOW_S, 60_000_000),
        (60_000_000, NOW_S, 60_000_001),  # a second start in that second
        (70_000_000, NOW_S, 70_000_001),  # the clock was set back
        (0, 0.0, 1),  # the host has no clock
    ],
)
def test_an_epoch_is_the_clocks_and_above_the_last(last: int, now_s: float, epoch: int) -> None:
    assert ids.next_epoch(last, now_s) == epoch


@pytest.mark.parametrize(("last", "now_s"), [(ids.EPOCHS_END - 1, NOW_S), (0, NOW_S + 1e9)])
def test_an_epoch_whose_ids_would_be_too_large_is_rejected(last: int, now_s: float) -> None:
    with pytest.raises(JournalError, match=r"used up.*Set the clock"):
        ids.next_epoch(last, now_s)
