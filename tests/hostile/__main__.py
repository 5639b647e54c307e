"""The command for long runs. See the package, and `--help`."""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.hostile import run
from tests.hostile.abuses.command import command as abuse_command

KEPT = Path(tempfile.gettempdir()) / "multigpu-hostile"


@click.group(invoke_without_command=True)
@click.option("--inputs", default=1_000_000, help="Inputs of the targets.")
@click.option("--seed", default=0, help="0: by the clock.")
@click.option("--round", "round_", default=-1, help="Only this round of the seed.")
@click.pass_context
def main(context: click.Context, inputs: int, seed: int, round_: int) -> None:
    """Runs every target with hostile input. Exit code 1: something crashed; the inputs are kept in files."""
    if context.invoked_subcommand is not None:
        return
    seed = seed or time.time_ns() % 1_000_000
    say(f"seed {seed}")
    tally, began_s = run.Tally(), time.monotonic()
    try:
        if round_ >= 0:
            run.one_round(str(seed), round_, min(inputs, run.ROUND_INPUTS), tally)
        else:
            run.rounds(str(seed), inputs, tally, say)
    except KeyboardInterrupt:
        say("interrupted; the results so far:")
    print_tally(tally, seed, time.monotonic() - began_s)
    sys.exit(1 if tally.found else 0)


def print_tally(tally: run.Tally, seed: int, took_s: float) -> None:
    kinds = Counter((f.target, f.what) for f in tally.found)
    for number, found in enumerate(tally.found[:100]):
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{seed}-{number}").write_bytes(found.data)
    for name, count in sorted(tally.tried.items()):
        print(f"{count:>10,}  {name}")
    print(f"{tally.total:>10,}  in all, seed {seed}, in {took_s:.0f} s; crashes: {len(tally.found)}")
    for (target, what), times in kinds.most_common():
        numbers = sorted({f.round for f in tally.found if (f.target, f.what) == (target, what)})
        print(f"{times} times at {target} (rounds {numbers[:5]}): {what[:500]}")
    if tally.found:
        print(f"the inputs are in {KEPT}; again: python -m tests.hostile --seed {seed} --round N")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


main.add_command(abuse_command)

if __name__ == "__main__":
    main()
