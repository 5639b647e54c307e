"""Every door, a little: by hypothesis, which shrinks what it finds, and by the long run's own means.

The long forms: `python -m tests.hostile --inputs 1000000`, `python -m tests.hostile coverage`.
"""

from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile import run
from tests.hostile.door import Door
from tests.hostile.inputs import Maker

INPUTS = 6_000


@pytest.fixture(scope="module")
def doors() -> Iterator[dict[str, Door]]:
    with run.all_doors() as doors:
        yield {door.name: door for door in doors}


def test_a_round_of_the_long_run_finds_nothing() -> None:
    tally = run.Tally()
    run.one_round("ci", 0, INPUTS, tally)
    assert tally.total == INPUTS
    assert [(f.door, f.what) for f in tally.found] == []


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.binary(max_size=200) | st.text(max_size=60).map(lambda t: t.encode("utf-8", "surrogatepass")))
def test_bytes_of_any_kind(doors: dict[str, Door], data: bytes) -> None:
    for door in doors.values():
        if "Watch" not in door.name:  # which waits with every input
            door.feed(data)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 1 << 62), pick=st.integers(0, 1 << 30))
def test_messages_of_any_kind(doors: dict[str, Door], seed: int, pick: int) -> None:
    chosen = [door for name, door in sorted(doors.items()) if "Watch" not in name]
    door = chosen[pick % len(chosen)]
    door.feed(door.make(Maker(Random(seed))))


def test_all_is_well_behind_the_doors(doors: dict[str, Door]) -> None:
    for check in {door.check for door in doors.values()}:
        check()
