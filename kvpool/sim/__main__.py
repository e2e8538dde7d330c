"""`python -m kvpool.sim --seeds N | --seed S`: the simulation of a whole pool, judged."""

from __future__ import annotations

import argparse
import sys

from kvpool.sim.run import jobs_for, main, print_out


def parse(arguments: list[str]) -> range:
    """The seeds to run."""
    parser = argparse.ArgumentParser(prog="kvpool.sim", description="Runs a simulated pool from seeds and judges its promises.")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--seeds", type=int, metavar="N", help="seeds 0..N-1")
    which.add_argument("--seed", type=int, metavar="S", help="this one, exactly as it was")
    options = parser.parse_args(arguments)
    return range(options.seeds) if options.seed is None else range(options.seed, options.seed + 1)


if __name__ == "__main__":
    which = parse(sys.argv[1:])
    sys.exit(main(which, say=print_out, jobs=jobs_for(which)))
