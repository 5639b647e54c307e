"""Runs many seeds, on every CPU core. The processes take portions of the seeds in order, and the results are read in
that order: the first failing seed is reported, about as early as in a sequential run.
"""

import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context

import structlog

from tests.sim.sim import Simulation

PORTION = 200  # seeds that a process takes at a time
PROGRESS_S = 5.0


@dataclass(slots=True)
class Tally:
    """The results of some seeds."""

    seeds: int = 0
    events: int = 0
    checks: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)  # (seed, error), in order of seeds
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.checks += other.checks
        self.cpu_s += other.cpu_s
        self.failures = sorted(self.failures + other.failures)
        self.coverage.update(other.coverage)

    def summary(self) -> str:
        lines = [f"seed {seed}: {why}; see: python -m tests.sim --seed {seed} --trace" for seed, why in self.failures]
        lines.append(
            f"{self.seeds:,} seeds, {len(self.failures)} failed, {self.events:,} events, {self.checks:,} of the core, "
            f"in {self.wall_s:.1f} s, {self.cpu_s:.1f} s of CPU"
        )
        return "\n".join(lines)


def silence_log() -> None:
    """The trace has everything that the master logs."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_seed_list(seeds: Iterable[int], *, trace: bool = False) -> Tally:
    """Runs seeds in this process. With `trace`, prints the events of each."""
    silence_log()
    tally = Tally()
    began = time.process_time()
    # The objects of a world refer to each other, so only the garbage collector frees them: after every few worlds.
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(50_000, 5, 5)
    for seed in seeds:
        simulation = Simulation(seed, trace=trace)
        tally.seeds += 1
        try:
            result = simulation.run()
        except Exception as error:
            tally.failures.append((seed, f"{type(error).__name__}: {error}"))
            if trace:
                traceback.print_exc()
        else:
            tally.events += result.events
            tally.checks += result.checks
        print(*simulation.world.lines, sep="\n", end="\n" if trace else "")
        tally.coverage.update(simulation.world.coverage)
    gc.set_threshold(*before)
    gc.unfreeze()
    tally.cpu_s = tally.wall_s = time.process_time() - began
    return tally


def run_seeds(first: int, count: int, *, processes: int = 0, keep_going: bool = False) -> Tally:
    """Runs `count` seeds from `first`. Stops at the first portion with a failure unless `keep_going`."""
    total = Tally()
    began = printed_s = time.monotonic()
    for tally in _portions(first, count, processes or os.cpu_count() or 1):
        total.add(tally)
        total.wall_s = time.monotonic() - began
        if time.monotonic() - printed_s > PROGRESS_S:
            printed_s = time.monotonic()
            print(f"{total.seeds:,} of {count:,} seeds, {len(total.failures)} failed", file=sys.stderr, flush=True)
        if total.failures and not keep_going:
            break
    return total


def _portions(first: int, count: int, processes: int) -> Iterator[Tally]:
    """The tally of each portion, in order of seeds."""
    ranges = [range(at, min(at + PORTION, first + count)) for at in range(first, first + count, PORTION)]
    if processes == 1 or len(ranges) <= 1:
        yield from map(run_seed_list, ranges)
        return
    with get_context("fork").Pool(processes, _begin) as pool:
        yield from pool.imap(run_seed_list, ranges)  # leaving the block, also by Ctrl-C, ends the processes


def _begin() -> None:
    """The parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
