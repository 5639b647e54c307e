"""A trial: runs a checker on one mutation, or none, in a separate process, with seeds 0, 1, … until it fails."""

import os
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.mutations.checkers import checker, seeds_of
from tests.mutations.mutation import Mutation, plant

# A mutation may cause an endless loop, or a list without end: that counts as noticed.
SEED_CPU_S = 15
MEMORY_BYTES = 8 << 30


class EndlessError(BaseException):
    """A seed took far too much CPU. Not an Exception, so that no code in between handles it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a trial. `noticed`: the checker's error, "" if there was none after `seeds` seeds."""

    name: str
    noticed: str
    seeds: int
    cpu_s: float


def attempt(mutation: Mutation, seeds: int) -> Verdict:
    """Runs seeds 0, 1, ... on the mutated product. Only in a process that has not imported it yet."""
    plant(mutation)
    return _seeds(mutation.breaks, mutation.checker, seeds)


def baseline(name: str, seeds: int) -> Verdict:
    """Runs a checker on the unmutated product: it must notice nothing."""
    return _seeds(f"(none: {name})", name, seeds)


def _seeds(name: str, checker_name: str, seeds: int) -> Verdict:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the product's log of the faults that it meets
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _endless)
    check = checker(checker_name)  # not in `try`: what cannot be imported is no mutation
    seeds = seeds_of(checker_name, seeds)
    began_s = time.process_time()
    seed = 0
    try:
        for seed in range(seeds):
            signal.setitimer(signal.ITIMER_PROF, SEED_CPU_S)
            check(seed)
    except (Exception, EndlessError) as error:
        return Verdict(name=name, noticed=_described(error), seeds=seed + 1, cpu_s=time.process_time() - began_s)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Verdict(name=name, noticed="", seeds=seeds, cpu_s=time.process_time() - began_s)


def _endless(_signal: int, _frame: FrameType | None) -> None:
    raise EndlessError(f"a seed took more than {SEED_CPU_S} s of CPU")


def _described(error: BaseException) -> str:
    """Where the error was raised, its type and its message, in one line."""
    place = Path(traceback.extract_tb(error.__traceback__)[-1].filename).name
    return " ".join(f"{place}: {type(error).__name__}: {error}".split())[:160]
