"""python -m benchmarks.training [--rounds N] [--steps N]: a script by torchrun and as a training job, in turns.

The script trains a model of a few million weights with DistributedDataParallel over Gloo on two ranks. Compared are the
time from the command to the end of the first step, steps a second after that, and the same with a checkpoint every 20
steps. The fleet has run a job before, as a fleet in use has.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import multigpu

from benchmarks.fleet import Fleet
from benchmarks.measure import median

SCRIPT = Path(__file__).with_name("training_script.py")
RANKS = 2


def read(file: Path, begin_s: float) -> dict[str, float]:
    """Seconds to the first step, and steps a second after it. The script has written the time of each step."""
    times = [float(line) for line in file.read_text().split()]
    return {"first step, s": times[0] - begin_s, "steps/s": (len(times) - 1) / (times[-1] - times[0])}


def by_torchrun(folder: Path, args: list[str]) -> dict[str, float]:
    out = folder / "torchrun-steps"
    begin_s = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    subprocess.run([*command, str(folder / SCRIPT.name), "--out", str(out), *args], check=True, cwd=folder)
    return read(out, begin_s)


def as_job(client: multigpu.Client, folder: Path, args: list[str]) -> dict[str, float]:
    out = folder / "job-steps"
    begin_s = time.time()
    client.train(folder / SCRIPT.name, ["--out", str(out), *args], world_size=RANKS).result(timeout=600)
    return read(out, begin_s)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    steps = ["--steps", str(options.steps)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SCRIPT, folder)
        with (
            Fleet(workers=RANKS, worker_flags=("--train-dir", name)) as fleet,
            multigpu.Client(fleet.address) as client,
        ):
            as_job(client, folder, ["--steps", "2"])
            for _ in range(options.rounds):
                torchrun, job = by_torchrun(folder, steps), as_job(client, folder, steps)
                saving = as_job(client, folder, [*steps, "--checkpoint-every", "20"])
                rows.append(
                    {
                        "torchrun first step, s": torchrun["first step, s"],
                        "job first step, s": job["first step, s"],
                        "later by, s": job["first step, s"] - torchrun["first step, s"],
                        "torchrun steps/s": torchrun["steps/s"],
                        "job steps/s": job["steps/s"],
                        "job / torchrun": job["steps/s"] / torchrun["steps/s"],
                        "with checkpoints / without": saving["steps/s"] / job["steps/s"],
                    }
                )
                print(json.dumps({key: round(value, 3) for key, value in rows[-1].items()}), flush=True)
    print("median", json.dumps({key: round(median([row[key] for row in rows]), 3) for key in rows[0]}))


if __name__ == "__main__":
    main()
