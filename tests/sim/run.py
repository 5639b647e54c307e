"""Runs many seeds, on every core. Each process takes portions in order, so that a failing seed is found about as early
as in a sequential run, and the first that fails is reported.
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
    """What came of some seeds."""

    seeds: int = 0
    events: int = 0
    checks: int = 0
    cpu_s: float = 0.0
    wall_s: float = 0.0
    failures: list[tuple[int, str]] = field(default_factory=list)  # (seed, what was wrong), in order of seeds
    coverage: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Tally") -> None:
        self.seeds += other.seeds
        self.events += other.events
        self.checks += other.checks
        self.cpu_s += other.cpu_s
        self.failures = sorted(self.failures + other.failures)
        self.coverage.update(other.coverage)

    def summary(self) -> str:
        """In a line or a few."""
        lines = [f"seed {seed}: {why}; see: python -m tests.sim --seed {seed} --trace" for seed, why in self.failures]
        cpu_s, wall_s = max(self.cpu_s, 1e-9), max(self.wall_s, 1e-9)
        lines.append(
            f"{self.seeds:,} seeds, {len(self.failures)} failed, {self.events:,} events, {self.checks:,} of the core, "
            f"in {self.wall_s:.1f} s ({self.seeds / wall_s:,.0f} seeds/s) and {self.cpu_s:.1f} s of CPU: "
            f"{self.seeds / cpu_s:,.0f} seeds, {self.events / cpu_s:,.0f} events a CPU second"
        )
        return "\n".join(lines)


def silence_log() -> None:
    """The master's log says nothing that a trace doesn't."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def run_portion(seeds: Iterable[int], *, keep_going: bool = True) -> Tally:
    """Runs these in this process."""
    silence_log()
    tally = Tally()
    began = time.process_time()
    # A world is a net of objects that refer to each other: let a few worlds become garbage before it is swept.
    gc.collect()
    gc.freeze()
    before = gc.get_threshold()
    gc.set_threshold(50_000, 5, 5)
    for seed in seeds:
        simulation = Simulation(seed)
        tally.seeds += 1
        try:
            result = simulation.run()
        except Exception as error:
            tally.failures.append((seed, f"{type(error).__name__}: {error}"))
            if not keep_going:
                break
        else:
            tally.events += result.events
            tally.checks += result.checks
        tally.coverage.update(simulation.world.coverage)
    gc.set_threshold(*before)
    gc.unfreeze()
    tally.cpu_s = time.process_time() - began
    return tally


def run_one(seed: int, *, trace: bool) -> Tally:
    """Runs one, and tells its story."""
    silence_log()
    simulation = Simulation(seed, trace=trace)
    tally = Tally(seeds=1)
    began = time.process_time()
    try:
        result = simulation.run()
    except Exception as error:
        tally.failures.append((seed, f"{type(error).__name__}: {error}"))
        print(*simulation.world.lines, sep="\n")
        traceback.print_exc()
    else:
        print(*simulation.world.lines, sep="\n")
        tally.events, tally.checks = result.events, result.checks
    tally.cpu_s = tally.wall_s = time.process_time() - began
    tally.coverage = simulation.world.coverage
    return tally


def run_seeds(first: int, count: int, *, processes: int = 0, keep_going: bool = False, quiet: bool = False) -> Tally:
    """Runs count seeds from the first. Stops at the first failure unless told to keep going."""
    total = Tally()
    began = printed_s = time.monotonic()
    for tally in _portions(first, count, processes or os.cpu_count() or 1):
        total.add(tally)
        total.wall_s = time.monotonic() - began
        if not quiet and time.monotonic() - printed_s > PROGRESS_S:
            printed_s = time.monotonic()
            left_s = total.wall_s / total.seeds * (count - total.seeds)
            print(f"{total.seeds:,} of {count:,} seeds, {len(total.failures)} failed, {left_s:.0f} s to go",
                  file=sys.stderr, flush=True)  # fmt: skip
        if total.failures and not keep_going:
            break
    return total


def _portions(first: int, count: int, processes: int) -> Iterator[Tally]:
    """What came of each portion, in order of seeds."""
    ranges = [range(at, min(at + PORTION, first + count)) for at in range(first, first + count, PORTION)]
    if processes == 1 or len(ranges) <= 1:
        yield from map(run_portion, ranges)
        return
    with get_context("fork").Pool(processes, _begin) as pool:
        # Leaving this block, by a failure or Ctrl-C too, ends the processes.
        yield from pool.imap(run_portion, ranges)


def _begin() -> None:
    """Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
