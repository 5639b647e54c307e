"""A trial: one mutation, or none, in a process of its own, and seed after seed until somebody notices."""

import os
import re
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.mutations.checkers import checker
from tests.mutations.mutation import ROOMS, Mutation, plant

# A mutation may well make an endless loop, or a list without end: that counts as noticed.
SEED_CPU_S = 15
MEMORY_BYTES = 8 << 30


class EndlessError(BaseException):
    """A seed took far too much CPU. Not an Exception, so that nothing in between takes it for one of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a trial. `noticed`: by what, "" if by nothing. `seeds`: how many it took, or all of them."""

    name: str
    noticed: str
    seeds: int
    cpu_s: float


def attempt(mutation: Mutation, seeds: int) -> Verdict:
    """Runs seeds 0, 1, ... on the mutated product. Only in a process that has not imported it yet."""
    plant(mutation)
    return _seeds(mutation.name, mutation.checker, seeds)


def baseline(name: str, seeds: int) -> Verdict:
    """Runs a checker on the product as it is: it must notice nothing."""
    return _seeds(f"(none: {name})", name, seeds)


def _seeds(name: str, checker_name: str, seeds: int) -> Verdict:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the product's log of what goes wrong, as it should
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    signal.signal(signal.SIGPROF, _endless)
    check = checker(checker_name)  # what can't even be loaded is no mutation, and nobody's merit
    began_s = time.process_time()
    seed = 0
    try:
        for seed in range(seeds):
            signal.setitimer(signal.ITIMER_PROF, SEED_CPU_S)
            check(seed)
    except (Exception, EndlessError) as error:  # whatever it is, it was noticed
        return Verdict(name=name, noticed=_what(error), seeds=seed + 1, cpu_s=time.process_time() - began_s)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return Verdict(name=name, noticed="", seeds=seeds, cpu_s=time.process_time() - began_s)


def _endless(_signal: int, _frame: FrameType | None) -> None:
    raise EndlessError(f"a seed took more than {SEED_CPU_S} s of CPU")


def _what(error: BaseException) -> str:
    """Who noticed and what, without the numbers of the case."""
    if str(error).startswith("test_"):
        return f"stories: {error}"
    said = re.sub(r"\s+", " ", str(error)) or type(error).__name__
    said = re.sub(r"/tmp/\S+", "…", said)
    said = re.sub(r"b?'[^']*'|\{.*\}|\[.*\]", "…", said)
    said = re.sub(r"\d+(\.\d+)?", "#", said)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/importlib/" not in f.filename]
    place = Path(frames[-1].filename)
    inner = next((f.name.strip("_") for f in reversed(frames) if f.name not in {"check", "_check"}), "")
    if any(room in place.parents for room in ROOMS.values()):
        return f"{place.name}, {inner}: {type(error).__name__}: {said}"[:160]
    return f"{place.stem if place.stem != 'invariants' else inner}: {said}"[:160]
