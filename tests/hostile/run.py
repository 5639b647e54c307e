"""Tries doors by the thousand. Inputs come in rounds, each from a seed of its own: a round can be run again alone."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from tests.hostile import file_doors, master_doors, worker_doors
from tests.hostile.door import Crash, Door
from tests.hostile.inputs import Maker

ROUND_INPUTS = 5_000
# Doors that wait a little with each input, or do a lot for it, get fewer of them.
WEIGHTS = {"Watch": 1, "WatchWorkers": 1, "Run": 40, "Session": 40, "Submit": 40, "from the engine": 100, "row": 60}


@dataclass(slots=True)
class Found:
    """A crash, its input, and where it came up."""

    door: str
    what: str
    data: bytes
    round: int


@dataclass(slots=True)
class Tally:
    """What was tried and what was found."""

    tried: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.tried.total()


@contextmanager
def all_doors() -> Iterator[list[Door]]:
    """Every door that is in this process, with what is behind it."""
    house, post, folder = master_doors.House(), worker_doors.Post(), file_doors.Folder()
    try:
        yield [*master_doors.doors(house), *worker_doors.doors(post), *file_doors.doors(folder)]
    finally:
        house.close()
        post.close()


def weight(door: Door) -> int:
    return next((w for name, w in WEIGHTS.items() if name in door.name), 20)


def one_round(seed: str, number: int, inputs: int, tally: Tally) -> None:
    """One round at all doors, in any order, and then a look behind them."""
    maker = Maker(Random(f"{seed}/{number}"))
    with all_doors() as doors:
        weights = [weight(door) for door in doors]
        for door in maker.rng.choices(doors, weights, k=inputs):
            data = door.make(maker)
            tally.tried[door.name] += 1
            _try(door.name, data, number, tally, lambda door=door, data=data: door.feed(data))  # type: ignore[misc]
        for check in {door.check for door in doors}:
            _try("behind the doors", b"", number, tally, check)


def _try(name: str, data: bytes, number: int, tally: Tally, call: Callable[[], None]) -> None:
    try:
        call()
    except KeyboardInterrupt:
        raise
    except Crash as crash:
        tally.found.append(Found(name, str(crash), data, number))
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        tally.found.append(Found(name, f"{error!r} at {place.filename}:{place.lineno}", data, number))


def rounds(seed: str, inputs: int, tally: Tally, say: Callable[[str], None]) -> None:
    """So many inputs, in rounds. Says how far it is each ten seconds."""
    began_s = said_s = time.monotonic()
    done = number = 0
    while done < inputs:
        size = min(ROUND_INPUTS, inputs - done)
        one_round(seed, number, size, tally)
        done, number = done + size, number + 1
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            say(f"{done:,} of {inputs:,} inputs, {done / (said_s - began_s):,.0f}/s, {len(tally.found)} crashes")
