"""`python -m tests.sim --seeds N` runs seeds 0 to N-1 on every core; `--seed S --trace` tells the story of one."""

import argparse
import sys

from tests.sim.run import run_seed_list, run_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds to run")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="with --seed: print what happened")
    parser.add_argument("--keep-going", action="store_true", help="don't stop at the first failure")
    parser.add_argument("--processes", type=int, default=0, help="how many to run on (default: one a core)")
    parser.add_argument("--coverage", action="store_true", help="print how often each thing occurred")
    args = parser.parse_args()
    if args.seed is not None:
        tally = run_seed_list([args.seed], trace=args.trace)
    else:
        try:
            tally = run_seeds(args.first, args.seeds, processes=args.processes, keep_going=args.keep_going)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return 130
    print(tally.summary())
    if args.coverage:
        print(*(f"{name:60}  {count:>12,}" for name, count in sorted(tally.coverage.items())), sep="\n")
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
