"""python -m tests.disk --rounds 100 --seed 1: power cuts under a real fleet, then --cuts thousands under the journal.

Exits 1 if something acknowledged was lost.
"""

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.disk.fleet_trial import FleetTrial
from tests.disk.journal_trial import JournalTrial
from tests.disk.layer import missing_requirement


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.disk", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100, help="power cuts under a real master")
    parser.add_argument("--cuts", type=int, default=2000, help="power cuts under the journal alone")
    parser.add_argument("--seed", type=int, default=None, help="default: any")
    arguments = parser.parse_args()
    if why := missing_requirement():
        parser.error(why)
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="disk-", dir=memory if memory.is_dir() else None))
    print(f"seed {seed}; in {folder}", flush=True)
    lost: list[str] = []
    try:
        for name, count in (("fleet", arguments.rounds), ("journal", arguments.cuts)):
            if not count:
                continue
            began_s = time.monotonic()
            (folder / name).mkdir()
            trial = (FleetTrial if name == "fleet" else JournalTrial)(folder / name, seed)
            figures = trial.run(count)
            print(f"{name}: {time.monotonic() - began_s:.0f} s, seed {seed}\n{figures.table()}", flush=True)
            lost += figures.lost
    except KeyboardInterrupt:
        print(f"ended by hand; seed {seed}")
        return 130
    finally:
        if not lost:
            shutil.rmtree(folder, ignore_errors=True)
    for line in lost:
        print(f"LOST: {line}")
    if lost:
        print(f"kept: {folder}")
    return 1 if lost else 0


if __name__ == "__main__":
    sys.exit(main())
