"""python -m tests.chaos --rounds 50 --seed 1: the long form. Exits 1 if a promise was broken; keeps the history."""

import argparse
import functools
import random
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.chaos.failpoints import usable
from tests.chaos.records.checker import check
from tests.chaos.records.report import report
from tests.chaos.rounds import Chaos


def main() -> int:
    """Runs the rounds, checks the history, prints the report."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--sweep", action="store_true", help="and before the rounds each failpoint once")
    parser.add_argument("--seed", type=int, default=None, help="of the faults and of the traffic; default: random")
    arguments = parser.parse_args()
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    tell = functools.partial(print, flush=True)
    tell(f"seed {seed}; logs and history in {folder}")
    began_s = time.monotonic()
    chaos = Chaos(folder, seed, tasks=1000)
    if chaos.no_network:
        tell(f"without faults of the network: {chaos.no_network}")
    standstill = False
    try:
        with chaos:
            if arguments.sweep:
                chaos.sweep(usable(), tell)
            chaos.random_rounds(arguments.rounds, tell)
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
