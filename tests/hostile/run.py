"""Runs targets in rounds of thousands of inputs. Seed and number of a round reproduce it alone."""

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from tests.hostile.targets import files, gateway, kserve, master, repository, worker
from tests.hostile.targets.base import Crash, Target
from tests.hostile.targets.inputs import Maker

ROUND_INPUTS = 5_000
# Weights of targets whose name contains the key; others have 20. Slow targets get fewer inputs.
WEIGHTS = {"Watch": 1, "Run": 40, "Session": 40, "Submit": 40, "from the engine": 100, "row": 60, "repository": 4}


@dataclass(slots=True)
class Found:
    """A crash, its input and its target."""

    target: str
    what: str
    data: bytes
    round: int


@dataclass(slots=True)
class Tally:
    """The numbers of inputs by target, and the crashes found."""

    tried: Counter[str] = field(default_factory=Counter)
    found: list[Found] = field(default_factory=list)

    @property
    def total(self) -> int:
        return self.tried.total()


@contextmanager
def all_targets() -> Iterator[list[Target]]:
    """All targets in this process."""
    local, local_agent, folder = master.LocalMaster(), worker.LocalAgent(), files.Folder()
    models, behind = repository.Repository(), master.LocalMaster()
    http, inference = gateway.LocalGateway(behind), kserve.LocalInference(behind)
    try:
        yield [
            *master.targets(local),
            *worker.targets(local_agent),
            *files.targets(folder),
            *repository.targets(models),
            *gateway.targets(http),
            *kserve.targets(inference),
        ]
    finally:
        http.close()
        inference.close()
        behind.close()
        local.close()
        local_agent.close()
        models.close()


def weight(target: Target) -> int:
    return next((w for name, w in WEIGHTS.items() if name in target.name), 20)


def one_round(seed: str, number: int, inputs: int, tally: Tally) -> None:
    """Feeds one round of inputs to random targets, then runs the checks of all targets."""
    maker = Maker(Random(f"{seed}/{number}"))
    with all_targets() as targets:
        weights = [weight(target) for target in targets]
        for target in maker.rng.choices(targets, weights, k=inputs):
            data = target.make(maker)
            tally.tried[target.name] += 1
            _try(target.name, data, number, tally, lambda target=target, data=data: target.feed(data))  # type: ignore[misc]
        for check in {target.check for target in targets}:
            _try("checks", b"", number, tally, check)


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
    """Runs this many inputs in rounds. Reports progress after a round, at most every ten seconds."""
    began_s = said_s = time.monotonic()
    done = number = 0
    while done < inputs:
        size = min(ROUND_INPUTS, inputs - done)
        one_round(seed, number, size, tally)
        done, number = done + size, number + 1
        if time.monotonic() - said_s > 10:
            said_s = time.monotonic()
            say(f"{done:,} of {inputs:,} inputs, {done / (said_s - began_s):,.0f}/s, {len(tally.found)} crashes")
