"""`python -m tests.mutations` applies the mutations one at a time, and says after how many seeds each was noticed.

It fails when a mutation survives, when a checker fails on the unmutated product, or when a mutation or its test is
outdated.
"""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial

from tests.mutations import checkers
from tests.mutations.listed import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.rules.pytest_checkers import is_missing
from tests.mutations.trial import Verdict, attempt, baseline

Trial = Callable[[], Verdict]


def trials(mutations: Iterable[Mutation], seeds: int | None, baseline_seeds: int | None) -> list[Trial]:
    """The checkers on the unmutated product, then the mutations. None: as many seeds as are stated."""
    mutations = list(mutations)
    made: list[Trial] = []
    for name in dict.fromkeys(m.checker for m in mutations if "::" not in m.checker):  # tests run in every build
        stated = checkers.baseline_seeds(name)
        made.append(partial(baseline, name, stated if baseline_seeds is None else min(stated, baseline_seeds)))
    return made + [partial(attempt, m, m.seeds if seeds is None else seeds) for m in mutations]


def _run(trial: Trial) -> Verdict:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    return trial()


def run(todo: list[Trial], processes: int) -> list[Verdict]:
    """Runs each trial in a new process, and prints its verdict."""
    verdicts = []
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        for verdict in pool.imap_unordered(_run, todo, chunksize=1):
            verdicts.append(verdict)
            noticed = verdict.noticed or "-"
            print(f"[{len(verdicts)}/{len(todo)}] {verdict.name}: {noticed} ({verdict.seeds} seeds), "
                  f"{verdict.cpu_s:.1f} s", flush=True)  # fmt: skip
    return verdicts


def problems(mutations: Iterable[Mutation], verdicts: Iterable[Verdict]) -> list[str]:
    """The mutations that survived, and the checkers that fail on the unmutated product."""
    names = {m.breaks for m in mutations}
    wrong = [f"{v.name} survives {v.seeds} seeds" for v in verdicts if v.name in names and not v.noticed]
    return wrong + [f"{v.name}: {v.noticed}" for v in verdicts if v.name not in names and v.noticed]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "--only", metavar="BREAKS", action="append", help="the mutation that breaks this; may be given more than once"
    )
    parser.add_argument("--seeds", type=int, help="seeds for each mutation, instead of those stated in the list")
    parser.add_argument("--baseline", type=int, metavar="SEEDS", help="at most this many of the unmutated product")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="print what each breaks, run nothing")
    args = parser.parse_args()
    unknown = [name for name in args.only or () if name not in {m.breaks for m in MUTATIONS}]
    if unknown:
        parser.error(f"no mutation {', '.join(unknown)}; --list prints them")
    mutations = [m for m in MUTATIONS if not args.only or m.breaks in args.only]
    outdated = [
        f"{m.breaks}: its text occurs {m.found()} times in {m.path}, not once" for m in mutations if m.found() != 1
    ]
    outdated += [
        f"{m.breaks}: there is no test {m.checker}" for m in mutations if "::" in m.checker and is_missing(m.checker)
    ]
    if args.list or outdated:
        print(*(outdated or [f"{m.breaks} ({m.checker})" for m in mutations]), sep="\n")
        return 1 if outdated else 0
    try:
        verdicts = run(trials(mutations, args.seeds, args.baseline), args.processes)
    except KeyboardInterrupt:
        print("stopped")
        return 130
    wrong = problems(mutations, verdicts)
    print("", *wrong, sep="\n")
    cpu_s = sum(v.cpu_s for v in verdicts)
    print(f"{len(mutations)} mutations, {len(mutations) - len(wrong)} noticed, {cpu_s:.0f} s of CPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
