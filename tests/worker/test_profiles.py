"""Profiles from the shapes that were seen: every shape that may come is covered, whatever came before."""

import itertools
import random

import pytest
from multigpu_worker.engines.tensorrt.profiles import (
    BATCHES_MIN,
    PROFILES_MAX,
    Limits,
    Profile,
    Range,
    ShapeHistogram,
    Watch,
    choose,
    first_profiles,
    profiles_for,
)

LIMITS = Limits(rows_max=256, width_max=256, tokens_max=16_384)


def chosen(profiles: tuple[Profile, ...], rows: int, width: int) -> int | None:
    ranges = [{"x": ((p.rows.least, p.width.least), (p.rows.most, p.width.most))} for p in profiles]
    return choose(ranges, {"x": (rows, width)})


def check(profiles: tuple[Profile, ...], limits: Limits) -> None:
    """In order, without gaps, and none missing."""
    assert 1 <= len(profiles) <= PROFILES_MAX
    assert profiles[0].width.least == 1
    assert profiles[-1].width.most == limits.width_max
    for one, next_one in itertools.pairwise(profiles):
        assert next_one.width.least == one.width.most + 1
    for width in range(1, limits.width_max + 1):
        for rows in {1, limits.rows_at(width)}:
            assert chosen(profiles, rows, width) is not None


def test_before_anything_was_seen() -> None:
    profiles = first_profiles(LIMITS)
    check(profiles, LIMITS)
    assert [profile.width.most for profile in profiles] == [16, 64, 256]


@pytest.mark.parametrize("seed", range(30))
def test_whatever_came_every_shape_is_covered(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(
        rows_max=rng.choice([1, 7, 256]),
        width_max=rng.choice([1, 5, 16, 100, 512]),
        tokens_max=rng.choice([1, 512, 16_384]),
    )
    check(first_profiles(limits), limits)
    seen = ShapeHistogram()
    for _ in range(rng.randint(1, 50)):
        width = min(limits.width_max, int(rng.expovariate(1 / 40)) + 1)
        seen.add(rng.randint(1, limits.rows_at(width)), width)
    check(profiles_for(seen, limits), limits)


def test_profiles_are_tuned_for_what_came() -> None:
    seen = ShapeHistogram()
    for _ in range(900):
        seen.add(64, 24)
    for _ in range(10):
        seen.add(2, 200)
    profiles = profiles_for(seen, LIMITS)
    assert profiles[0].width == Range(least=1, best=24, most=24)
    assert profiles[0].rows.best == 64
    assert profiles[-1].width == Range(least=25, best=200, most=256)
    assert profiles[-1].rows.best == 2


def test_a_new_plan_is_asked_for_when_the_mix_has_moved_and_seldom() -> None:
    watch = Watch.begin(LIMITS)
    answers: list[tuple[Profile, ...]] = []

    def feed(batches: int, rows: int, width: int) -> None:
        answers.extend(profiles for _ in range(batches) if (profiles := watch.add(rows, width)) is not None)

    feed(BATCHES_MIN - 1, 64, 24)
    assert answers == []
    feed(1, 64, 24)
    assert len(answers) == 1
    feed(20 * BATCHES_MIN, 64, 24)
    assert len(answers) == 1
    # The load goes round for ever: each time twice as much has to be seen.
    for _ in range(40):
        feed(4 * BATCHES_MIN, 4, 200)
        feed(4 * BATCHES_MIN, 64, 24)
    assert 2 <= len(answers) <= 9
    for profiles in answers:
        check(profiles, LIMITS)


def test_a_small_change_is_not_worth_a_plan() -> None:
    watch = Watch.begin(LIMITS)
    for _ in range(BATCHES_MIN):
        watch.add(64, 24)
    for i in range(10 * BATCHES_MIN):
        assert watch.add(64, 24) is None if i % 100 else watch.add(16, 24) is None


def test_the_profile_for_a_shape() -> None:
    profiles = first_profiles(LIMITS)
    assert [chosen(profiles, 1, width) for width in (1, 16, 17, 64, 65, 256)] == [0, 0, 1, 1, 2, 2]
    assert chosen(profiles, 1, 257) is None
    assert chosen(profiles, 257, 1) is None
    assert choose([{"x": ((1, 3), (4, 3)), "y": ((1,), (2,))}], {"x": (2, 3), "y": (2,)}) == 0
    assert choose([{"x": ((1, 3), (4, 3)), "y": ((1,), (2,))}], {"x": (2, 3), "y": (3,)}) is None
    assert choose([{"x": ((1, 3), (4, 3))}], {"x": (2, 3, 1)}) is None
