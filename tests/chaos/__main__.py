"""python -m tests.chaos --rounds 50 --seed 1: the long form. Exits 1 if a promise was broken; keeps the history."""

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.checker import check
from tests.chaos.rounds import Chaos


def main() -> int:
    """Runs the rounds, checks the history, says what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=2000, help="in each round")
    parser.add_argument("--seed", type=int, default=None, help="of the kills and of the traffic; default: any")
    parser.add_argument("--folder", type=Path, default=None, help="where logs and the history go; default: a new one")
    arguments = parser.parse_args()
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty: the outcomes of another run in it would be taken for this one's")
    print(f"seed {seed}; logs in {folder}", flush=True)
    chaos = Chaos(folder, seed, arguments.tasks)
    began_s = time.monotonic()
    standstill = False
    try:
        chaos.run(arguments.rounds, lambda line: print(line, flush=True))
    except Exception:
        standstill = True
        traceback.print_exc()
    chaos.history.save(folder / "history.jsonl")
    findings = check(chaos.history.records())
    print(f"{arguments.rounds} rounds in {time.monotonic() - began_s:.0f} s; seed {seed}")
    for name, figure in findings.figures.items():
        print(f"  {name}: {figure}")
    for line in findings.broken[:50]:
        print(f"BROKEN: {line}")
    print(f"promises broken: {len(findings.broken)}")
    return 1 if findings.broken or standstill else 0


if __name__ == "__main__":
    sys.exit(main())
