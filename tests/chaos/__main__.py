"""python -m tests.chaos --rounds 50 --seed 1: the long form. Exits 1 if a promise was broken; keeps the history."""

import argparse
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.failpoints import FAILPOINTS
from tests.chaos.faults import KINDS
from tests.chaos.records.checker import check
from tests.chaos.records.report import report
from tests.chaos.rounds import Chaos


def main() -> int:
    """Runs the rounds, checks the history, prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--tasks", type=int, default=1000, help="in each round, about")
    parser.add_argument("--faults", default="", help=f"kinds, with commas; default: all of {','.join(KINDS)}")
    parser.add_argument("--sweep", action="store_true", help="and before the rounds each failpoint once")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of the traffic; default: random")
    parser.add_argument("--time-limit-s", type=float, default=1500.0, help="no round begins after this time")
    parser.add_argument("--folder", type=Path, default=None, help="where logs and the history go; default: a new one")
    arguments = parser.parse_args()
    kinds = arguments.faults.split(",") if arguments.faults else None
    if unknown := set(kinds or ()) - set(KINDS):
        parser.error(f"no faults {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}")
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty; name a new folder")

    def tell(line: str) -> None:
        print(line, flush=True)

    tell(f"seed {seed}; logs and history in {folder}")
    began_s = time.monotonic()
    chaos = Chaos(folder, seed, tasks=arguments.tasks, kinds=kinds)
    if chaos.no_network:
        tell(f"without faults of the network: {chaos.no_network}")
    standstill = False
    try:
        with chaos:
            if arguments.sweep:
                chaos.sweep(FAILPOINTS, tell)
            for _ in range(arguments.rounds):
                if time.monotonic() - began_s > arguments.time_limit_s:
                    tell("the time is over")
                    break
                chaos.random_rounds(1, tell)
    except KeyboardInterrupt:
        tell("interrupted")
        return 130
    except Exception:
        standstill = True
        tell(traceback.format_exc())
    records = chaos.records()
    result = report(records, check(records))
    tell(f"{time.monotonic() - began_s:.0f} s; seed {seed}")
    tell("\n".join(f"  {line}" for line in result.lines()))
    return 1 if result.broken or standstill else 0


if __name__ == "__main__":
    sys.exit(main())
