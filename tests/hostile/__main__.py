"""The command for long runs. See the package, and `--help`."""

import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from tests.hostile import abuse, coverage, run
from tests.hostile.real_targets import hostile_fleet, random_master
from tests.hostile.target import Crash

KEPT = Path(tempfile.gettempdir()) / "multigpu-hostile"
REAL_BATCH = 1_000


@click.group(invoke_without_command=True)
@click.option("--inputs", default=1_000_000, help="Inputs of the targets in this process.")
@click.option("--real", "real_inputs", default=30_000, help="Calls to a real master over gRPC.")
@click.option("--frames", default=3_000, help="Frames from a random master to a real worker.")
@click.option("--seed", default=0, help="0: by the clock.")
@click.option("--round", "round_", default=-1, help="Only this round of the seed.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def main(
    context: click.Context, inputs: int, real_inputs: int, frames: int, seed: int, round_: int, *, as_json: bool
) -> None:
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
            if real_inputs or frames:
                real(real_inputs, frames, seed, tally)
    except KeyboardInterrupt:
        say("interrupted; this is what there is")
    print_tally(tally, seed, time.monotonic() - began_s, as_json=as_json)
    sys.exit(1 if tally.found else 0)


def real(inputs: int, frames: int, seed: int, tally: run.Tally) -> None:
    """Hostile calls to real daemons."""
    with (
        tempfile.TemporaryDirectory(prefix="multigpu-hostile-") as folder,
        hostile_fleet(Path(folder), seed) as callers,
    ):
        done = 0
        while done < inputs:
            size = min(REAL_BATCH, inputs - done)
            try:
                callers.batch(size)
            except Crash as crash:
                tally.found.append(run.Found("real master", str(crash), b"", done // REAL_BATCH))
            done += size
            say(f"{done:,} of {inputs:,} calls over gRPC, {len(tally.found)} crashes")
        try:
            if frames:
                tally.tried["real worker, from a random master"] += random_master(callers.fleet, frames, seed)
                callers.check()
        except Crash as crash:
            tally.found.append(run.Found("real worker", str(crash), b"", 0))
        tally.tried.update(callers.tried)


def print_tally(tally: run.Tally, seed: int, took_s: float, *, as_json: bool) -> None:
    kinds = Counter((f.target, f.what) for f in tally.found)
    for number, found in enumerate(tally.found[:100]):
        KEPT.mkdir(exist_ok=True)
        (KEPT / f"{seed}-{number}").write_bytes(found.data)
    if as_json:
        crashes = [{"target": target, "what": what, "times": n} for (target, what), n in kinds.items()]
        told = {"seed": seed, "seconds": round(took_s, 1), "inputs": tally.total, "targets": tally.tried}
        print(json.dumps({**told, "crashes": crashes}, indent=1))
        return
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


main.add_command(abuse.command)
main.add_command(coverage.command)

if __name__ == "__main__":
    main()
