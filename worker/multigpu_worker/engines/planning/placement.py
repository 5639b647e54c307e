"""Divides a list of parts among places, of which each takes consecutive parts. Values in, values out.

Parts are in the order in which a model runs them, so data goes from one place to the next once. Sizes and rooms are in
bytes.
"""

from collections.abc import Sequence


class NoRoomError(Exception):
    """The parts do not fit."""


def divide(sizes: Sequence[int], rooms: Sequence[int], strategy: str) -> list[int]:
    """The place of each part. Raises NoRoomError.

    auto: balanced over the fewest places, those with most room. balanced: the loads differ as little as possible.
    balanced_low_0: balanced, and as little as possible on the first place. sequential: fills one place after the other.
    """
    if strategy == "sequential":
        return fill(sizes, rooms)
    if strategy == "balanced":
        return _balance(sizes, rooms)
    if strategy == "balanced_low_0":
        return _low_first(sizes, rooms)
    assert strategy == "auto", strategy
    by_room = sorted(range(len(rooms)), key=lambda place: -rooms[place])
    for count in range(1, len(rooms) + 1):
        chosen = sorted(by_room[:count])
        try:
            placed = _balance(sizes, [rooms[place] for place in chosen])
        except NoRoomError:
            continue
        return [chosen[place] for place in placed]
    raise NoRoomError


def fill(sizes: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Each part in the first place that has room and is not before that of an earlier part. Raises NoRoomError."""
    placed, place, left = [], 0, rooms[0] if rooms else 0
    for size in sizes:
        while place < len(rooms) and size > left:
            place += 1
            left = rooms[place] if place < len(rooms) else 0
        if place == len(rooms):
            raise NoRoomError
        left -= size
        placed.append(place)
    return placed


def _low_first(sizes: Sequence[int], rooms: Sequence[int]) -> list[int]:
    if len(rooms) == 1:
        return fill(sizes, rooms)
    for first in range(len(sizes) + 1):
        if sum(sizes[:first]) > rooms[0]:
            break
        try:
            return [0] * first + [1 + place for place in _balance(sizes[first:], rooms[1:])]
        except NoRoomError:
            continue
    raise NoRoomError


def _balance(sizes: Sequence[int], rooms: Sequence[int]) -> list[int]:
    """Minimises the sum of the squares of the loads: for each number of places, the best division of the first parts.

    Raises NoRoomError.
    """
    ends = [0]
    for size in sizes:
        ends.append(ends[-1] + size)
    parts = len(sizes)
    infinite = float("inf")
    best: list[float] = [0.0] + [infinite] * parts
    cuts: list[list[int]] = []
    for room in rooms:
        cost, cut = [infinite] * (parts + 1), [0] * (parts + 1)
        for end in range(parts + 1):
            for begin in range(end, -1, -1):
                load = ends[end] - ends[begin]
                if load > room:
                    break
                if best[begin] + float(load) ** 2 < cost[end]:
                    cost[end], cut[end] = best[begin] + float(load) ** 2, begin
        best = cost
        cuts.append(cut)
    if best[parts] == infinite:
        raise NoRoomError
    placed: list[int] = []
    end = parts
    for place in range(len(rooms) - 1, -1, -1):
        begin = cuts[place][end]
        placed = [place] * (end - begin) + placed
        end = begin
    return placed


def fewest(sizes: Sequence[int], room: int, most: int) -> int | None:
    """The fewest places of this room that hold the parts; None: more than `most`."""
    try:
        placed = fill(sizes, [room] * most)
    except NoRoomError:
        return None
    return placed[-1] + 1 if placed else 1
