"""`python -m tests.sim --seeds N` runs seeds 0 to N-1; `--seed S --trace` tells the story of one."""

import argparse
import sys
import time
import traceback

from tests.sim.sim import Simulation


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="print what happened")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first failure")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds) if args.seed is None else [args.seed]
    began, events, checks, failed = time.process_time(), 0, 0, 0
    for seed in seeds:
        simulation = Simulation(seed, trace=args.trace)
        try:
            result = simulation.run()
        except Exception as error:
            failed += 1
            if args.trace:
                print(*simulation.world.lines, sep="\n")
            if args.seed is not None:
                traceback.print_exc()
            print(f"seed {seed}: {type(error).__name__}: {error}; see: python -m tests.sim --seed {seed} --trace")
            if not args.keep_going:
                break
        else:
            events += result.events
            checks += result.checks
            if args.trace:
                print(*simulation.world.lines, sep="\n")
    took = time.process_time() - began
    print(f"{len(seeds)} seeds, {failed} failed, {events} events, {checks} checks in {took:.1f} s of CPU: "
          f"{len(seeds) / took:.0f} seeds/s, {events / took:.0f} events/s")  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
