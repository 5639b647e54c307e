"""Optimisation profiles cover every shape within the limits."""

import itertools
import random
from collections.abc import Sequence

import pytest
from multigpu_worker.engines.tensorrt.profiles import PROFILES_MAX, Limits, Profile, choose, profiles_for

LIMITS = Limits(rows_max=256, width_max=256, tokens_max=16_384)


def chosen(profiles: Sequence[Profile], rows: int, width: int) -> int | None:
    shapes = ("rows", "width")
    ranges = [{"x": (tuple(p[size][0] for size in shapes), tuple(p[size][2] for size in shapes))} for p in profiles]
    return choose(ranges, {"x": (rows, width)})


def check(profiles: Sequence[Profile], limits: Limits) -> None:
    """In order, without gaps, complete, and tuned for a shape within each."""
    assert 1 <= len(profiles) <= PROFILES_MAX
    assert profiles[0]["width"][0] == 1
    assert profiles[-1]["width"][2] == limits.width_max
    for profile in profiles:
        assert all(1 <= least <= best <= most for least, best, most in profile.values())
    for one, next_one in itertools.pairwise(profiles):
        assert next_one["width"][0] == one["width"][2] + 1
    for width in range(1, limits.width_max + 1):
        for rows in {1, limits.rows_at(width)}:
            assert chosen(profiles, rows, width) is not None


def test_widths_are_divided_by_four_and_a_shape_has_its_profile() -> None:
    profiles = profiles_for(LIMITS)
    check(profiles, LIMITS)
    assert [profile["width"][2] for profile in profiles] == [16, 64, 256]
    assert profiles[1] == {"rows": (1, 256, 256), "width": (17, 64, 64)}
    assert [chosen(profiles, 1, width) for width in (1, 16, 17, 64, 65, 256)] == [0, 0, 1, 1, 2, 2]
    assert chosen(profiles, 1, 257) is None
    assert chosen(profiles, 257, 1) is None
    assert choose([{"x": ((1, 3), (4, 3)), "y": ((1,), (2,))}], {"x": (2, 3), "y": (2,)}) == 0
    assert choose([{"x": ((1, 3), (4, 3)), "y": ((1,), (2,))}], {"x": (2, 3), "y": (3,)}) is None
    assert choose([{"x": ((1, 3), (4, 3))}], {"x": (2, 3, 1)}) is None


@pytest.mark.parametrize("seed", range(30))
def test_every_shape_is_covered(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(
        rows_max=rng.choice([1, 7, 256]),
        width_max=rng.choice([1, 5, 16, 100, 512]),
        tokens_max=rng.choice([1, 512, 16_384]),
    )
    check(profiles_for(limits), limits)
