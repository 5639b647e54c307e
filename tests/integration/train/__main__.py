"""python -m tests.integration.train --rounds 50 --seed 1: a job of 200 steps, killed in each round at a random step.

The long form of test_a_killed_job_goes_on_from_its_last_checkpoint. Exits 1 if the weights of a round are not those of
the undisturbed job, or if more steps ran again than since the last checkpoint.
"""

import argparse
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import multigpu

from tests.fleet import Fleet, until
from tests.integration.train.jobs import VICTIMS, job_folder, kill, weights

STEPS, EVERY = 200, 20
# The checkpoint of the last EVERY steps may have been under way when the process died.
AGAIN_MAX = 2 * EVERY
ARGS = ("--steps", str(STEPS), "--every", str(EVERY))
SCRIPTS = Path(__file__).parent / "scripts"


def round_of(fleet: Fleet, client: multigpu.Client, number: int, rng: random.Random) -> str:
    """Runs and kills one job. Returns what is wrong; "" if nothing is."""
    name, victim, step = f"round-{number}", VICTIMS[number % len(VICTIMS)], rng.randrange(EVERY, STEPS - EVERY)
    print(f"round {number}: kill -9 of {victim} at step {step}: ", end="", flush=True)
    slower = [*ARGS, "--sleep", "0.02"]
    handle = client.train("steps.py", slower, name=name, world_size=2, backoff_initial_s=0.01)
    steps = job_folder(fleet, name) / "steps-0"
    until(lambda: steps.exists() and len(steps.read_text().split()) >= step, 120)
    kill(fleet, name, victim)
    outcome = handle.outcome()
    if not outcome.succeeded:
        return f"{outcome}"
    if weights(fleet, name) != weights(fleet, "undisturbed"):
        return "other weights than the undisturbed job's"
    again = len(steps.read_text().split()) - STEPS
    begins = re.findall(r"rank 0 of 2 begins at step (\d+)", outcome.log)
    print(f"began at {', '.join(begins)}; {again} steps again", flush=True)
    return "" if again <= AGAIN_MAX else f"{again} steps ran again, of at most {AGAIN_MAX}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.train", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the steps at which processes are killed")
    options = parser.parse_args()
    folder, rng, bad = Path(tempfile.mkdtemp(prefix="train-")), random.Random(options.seed), 0
    shutil.copytree(SCRIPTS, folder / "train")
    print(f"logs in {folder}", flush=True)
    with Fleet(folder, workers=3, worker_flags=["--train-dir", str(folder / "train")]) as fleet:
        fleet.wait_for_workers()
        with fleet.client() as client:
            client.train("steps.py", list(ARGS), name="undisturbed", world_size=2).result()
            for number in range(options.rounds):
                fleet.wait_for_workers()
                if wrong := round_of(fleet, client, number, rng):
                    bad += 1
                    print(wrong, flush=True)
    print(f"{options.rounds} rounds, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
