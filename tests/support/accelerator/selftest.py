"""`python -m tests.support.accelerator.selftest`: does the simulation find what it is for?

Every program of mutants.py runs with every seed in both versions. A mutant must be caught, by its name or by wrong
values, in 95 of 100 seeds; a healthy version must be clean in all.
"""

from __future__ import annotations

import argparse
import time

from tests.support import accelerator
from tests.support.accelerator.mutants import MUTANTS, outcome


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description="Test the simulated accelerator on programs with a missing edge.")
    parser.add_argument("--seeds", type=int, default=20)
    count = parser.parse_args().seeds
    accelerator.load()
    begin = time.perf_counter()
    failed = False
    print(f"{'mutant':44}{'caught':>8}{'named':>8}{'values':>8}{'healthy':>9}   of {count} seeds")
    for name in MUTANTS:
        mutant = [outcome(name, False, seed) for seed in range(count)]
        healthy = [outcome(name, True, seed) for seed in range(count)]
        caught, named, values, clean = (
            sum(each.caught for each in mutant), sum(each.named for each in mutant),
            sum(not each.values_right for each in mutant), sum(each.clean for each in healthy),
        )  # fmt: skip
        failed |= caught < 0.95 * count or clean < count
        print(f"{name:44}{caught:8}{named:8}{values:8}{clean:9}")
        for each in healthy:
            if not each.clean:
                print(f"    healthy, but: {each}")
    print(f"{time.perf_counter() - begin:.1f} s; {'FAILED' if failed else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
