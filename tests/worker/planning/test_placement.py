"""Dividing parts among places: no place gets more than it has room for, and parts stay in order."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from multigpu_worker.engines.planning.placement import NoRoomError, divide, fewest, fill
from multigpu_worker.repository.model import STRATEGIES

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=9)
ROOMS = st.lists(st.integers(0, 120), min_size=1, max_size=4)


def loads(sizes: list[int], placed: list[int], count: int) -> list[int]:
    return [sum(size for size, place in zip(sizes, placed, strict=True) if place == at) for at in range(count)]


def divisions(sizes: list[int], rooms: list[int]) -> list[list[int]]:
    """Every division in order that fits."""
    every = itertools.combinations_with_replacement(range(len(rooms)), len(sizes))
    return [
        [*placed]
        for placed in every
        if all(load <= room for load, room in zip(loads(sizes, [*placed], len(rooms)), rooms, strict=True))
    ]


@given(sizes=SIZES, rooms=ROOMS, strategy=st.sampled_from(STRATEGIES))
def test_whatever_fits_in_order_is_placed_within_the_rooms(sizes: list[int], rooms: list[int], strategy: str) -> None:
    possible = divisions(sizes, rooms)
    if not possible:
        with pytest.raises(NoRoomError):
            divide(sizes, rooms, strategy)
        return
    placed = divide(sizes, rooms, strategy)
    assert placed in possible


@given(sizes=SIZES, rooms=ROOMS)
def test_balanced_loads_differ_least(sizes: list[int], rooms: list[int]) -> None:
    possible = divisions(sizes, rooms)
    if not possible:
        return

    def squares(placed: list[int]) -> int:
        return sum(load**2 for load in loads(sizes, placed, len(rooms)))

    assert squares(divide(sizes, rooms, "balanced")) == min(map(squares, possible))
    low = loads(sizes, divide(sizes, rooms, "balanced_low_0"), len(rooms))
    assert low[0] == min(loads(sizes, placed, len(rooms))[0] for placed in possible)


@given(sizes=SIZES, rooms=ROOMS)
def test_auto_uses_the_fewest_places_with_most_room(sizes: list[int], rooms: list[int]) -> None:
    if not divisions(sizes, rooms):
        return
    used = {place for place, load in enumerate(loads(sizes, divide(sizes, rooms, "auto"), len(rooms))) if load}
    by_room = sorted(rooms, reverse=True)
    for count in range(1, len(used)):
        chosen = sorted(sorted(range(len(rooms)), key=lambda place: -rooms[place])[:count])
        assert not divisions(sizes, [rooms[place] for place in chosen]), (by_room, count)


def test_places_are_filled_in_order() -> None:
    assert fill([3, 3, 3, 3], [7, 2, 6]) == [0, 0, 2, 2]
    assert divide([3, 3, 3, 3], [7, 100], "sequential") == [0, 0, 1, 1]
    assert divide([3, 3, 3, 3], [100, 100, 100, 100], "balanced") == [0, 1, 2, 3]
    assert divide([3, 3, 3, 3], [5, 12, 100], "auto") == [2, 2, 2, 2]


def test_the_fewest_equal_places() -> None:
    assert fewest([3, 3, 3, 3], 6, 10) == 2
    assert fewest([3, 3, 3, 3], 5, 10) == 4
    assert fewest([3, 3, 3, 3], 5, 3) is None
    assert fewest([7], 5, 10) is None
    assert fewest([], 5, 10) == 1
