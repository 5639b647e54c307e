"""`python -m tests.mutations` breaks the product's rules one at a time, and says which checker noticed, after how many
seeds. It fails when one of them survives, when an unbroken product is complained of, or when the list is out of date.
"""

import argparse
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tests.mutations.listed import MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.trial import Verdict, attempt, baseline

COMMAND = "python -m tests.mutations --markdown mutations.md"
PAGE = """# Mutations

Each line is one deliberate mutation of the product: a guard dropped, an order swapped, a requeue forgotten. The seeds
of its checker were run on the mutated product until one failed; "seeds" says how many that took, "of" within how many
it must. The checkers: `simulator` (the core, the worker's session and the master's journaling in simulated worlds),
`session` and `batches` (the worker's halves against models), `journal` (the real journal on files, against a model),
`cuts` (what embeddings compute),
`full` (the same, once it has filled up), `driver` (half of an event),
`known` (which requests the journal knows), `transport` (a master, and peers without a
token), `models` (models in too little room), `client` (a client's Run stream
against a model of a master), `stream` (a client's calls with options that no message can carry, and errors of the tasks
that serve its stream), `access` (every command of mgpuctl, on a fleet with TLS and tokens),
`results` (every call for what is left of a harmed journal),
`stories` (the stories of one rule each, for what seeds meet too seldom).
The product as it is passes all of them.

Made by `{command}`, which fails when a mutation survives and when one no
longer fits the product's text.

{table}
"""

Trial = Callable[[], Verdict]
# Seeds of the unbroken product for each checker.
BASELINE_SEEDS = {
    "driver": 1,
    "full": 1,
    "simulator": 300,
    "session": 300,
    "batches": 300,
    "cuts": 300,
    "stories": 1,
    "models": 100,
    "known": 30,
    "journal": 30,
    "results": 20,
    "stream": 20,
    "client": 300,
    "access": 1,
    "transport": 3,
}


def trials(mutations: Iterable[Mutation], seeds: int | None, baseline_seeds: int | None) -> list[Trial]:
    """The baselines of the checkers that are needed, then the mutations. None: as many seeds as are stated."""
    mutations = list(mutations)
    made: list[Trial] = []
    for name in dict.fromkeys(m.checker for m in mutations):
        stated = BASELINE_SEEDS[name]
        made.append(partial(baseline, name, stated if baseline_seeds is None else min(stated, baseline_seeds)))
    return made + [partial(attempt, m, m.seeds if seeds is None else seeds) for m in mutations]


def _run(trial: Trial) -> Verdict:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its children
    return trial()


def run(todo: list[Trial], processes: int) -> list[Verdict]:
    """Runs each trial in a fresh process; says how it goes."""
    verdicts = []
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=1) as pool:
        for verdict in pool.imap_unordered(_run, todo, chunksize=1):
            verdicts.append(verdict)
            told = f"{verdict.noticed} ({verdict.seeds} seeds)" if verdict.noticed else f"- ({verdict.seeds} seeds)"
            print(f"[{len(verdicts)}/{len(todo)}] {verdict.name}: {told}, {verdict.cpu_s:.1f} s", flush=True)
    return verdicts


def table(mutations: Iterable[Mutation], by_name: dict[str, Verdict]) -> str:
    """What the run showed, in Markdown."""
    lines = ["| mutation | where | what it breaks | noticed by | seeds | of | CPU s |", "|---|---|---|---|--:|--:|--:|"]
    for m in mutations:
        v = by_name[m.name]
        noticed = v.noticed.replace("|", "\\|") or "**nobody**"
        lines.append(
            f"| {m.name} | `{m.path.name}` | {m.breaks} | {m.checker}: {noticed} | {v.seeds} | {m.seeds} "
            f"| {v.cpu_s:.1f} |"
        )
    return "\n".join(lines)


def problems(mutations: Iterable[Mutation], verdicts: Iterable[Verdict]) -> list[str]:
    """What is wrong: survivors, and complaints about the product as it is."""
    names = {m.name for m in mutations}
    wrong = [f"{v.name} survives {v.seeds} seeds" for v in verdicts if v.name in names and not v.noticed]
    return wrong + [f"{v.name}: {v.noticed}" for v in verdicts if v.name not in names and v.noticed]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", metavar="NAME", action="append", help="this one; may be given more than once")
    parser.add_argument("--seeds", type=int, help="so many seeds for each, instead of those stated in the list")
    parser.add_argument("--baseline", type=int, metavar="SEEDS", help="at most so many of the unbroken product")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="how many at a time")
    parser.add_argument("--list", action="store_true", help="print the names, run nothing")
    parser.add_argument("--markdown", metavar="FILE", help="write the table there")
    args = parser.parse_args()
    unknown = [name for name in args.only or () if name not in {m.name for m in MUTATIONS}]
    if unknown:
        parser.error(f"no mutation {', '.join(unknown)}; --list prints their names")
    mutations = [m for m in MUTATIONS if not args.only or m.name in args.only]
    outdated = [
        f"{m.name}: its text occurs {m.found()} times in {m.path}, not once" for m in mutations if m.found() != 1
    ]
    if args.list or outdated:
        print(*(outdated or [f"{m.name}: {m.breaks}" for m in mutations]), sep="\n")
        return 1 if outdated else 0
    try:
        verdicts = run(trials(mutations, args.seeds, args.baseline), args.processes)
    except KeyboardInterrupt:
        print("stopped")
        return 130
    shown = table(mutations, {v.name: v for v in verdicts})
    if args.markdown:
        Path(args.markdown).write_text(PAGE.format(table=shown, command=COMMAND), "utf-8")
    wrong = problems(mutations, verdicts)
    print(shown, "", *wrong, sep="\n")
    cpu_s = sum(v.cpu_s for v in verdicts)
    print(f"{len(mutations)} mutations, {len(mutations) - len(wrong)} noticed, {cpu_s:.0f} s of CPU")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
