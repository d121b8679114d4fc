"""Claim: comparing a sample of every page that comes back from NVMe costs less than 1 % of the time that it takes.

    python benchmarks/swap_checks.py [--folder DIR] [--megabytes 512] [--rounds 9]

The same extents are written and read back without checksums, with those of one line a page (the default) and with
those of all bytes, in turns, through the engine's own tier. Figures are medians over the rounds: "more time" is that of
the transfers, "more work" the processor's time that checksums take, as a part of one core.
"""

from __future__ import annotations

import argparse
import tempfile
import time

from support.machine import MIB, describe, median
from support.table import Table, claim

from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.base import QueueOptions
from infinity.memory.tiers.nvme import NvmeTier
from infinity.plan.types import Extent

EXTENT_NBYTES = 16 << 20
MODES = {"none": False, "one line a page": "sampled", "all bytes": True}
LIMIT = 0.01


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    print(describe())
    nbytes = max(given.megabytes * MIB // EXTENT_NBYTES, 1) * EXTENT_NBYTES
    buffer = page_aligned(nbytes).random_()
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    cpu: dict[str, list[float]] = {name: [] for name in MODES}
    for _ in range(given.rounds):
        for name, checksum in MODES.items():
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                tier = NvmeTier.open(folder, nbytes=nbytes, rank=0, options=QueueOptions(checksum=checksum))
                try:
                    began, worked = time.perf_counter(), time.process_time()
                    for move in (tier.write, tier.read):
                        moves = [
                            move(Extent(at, EXTENT_NBYTES), buffer[at : at + EXTENT_NBYTES])
                            for at in range(0, nbytes, EXTENT_NBYTES)
                        ]
                        for each in moves:
                            each.wait()
                    seconds[name].append(time.perf_counter() - began)
                    cpu[name].append(time.process_time() - worked)
                finally:
                    tier.close()
    print(f"{nbytes / 1e6:.0f} MB written and read, {given.rounds} rounds")
    table = Table("GB/s:.2f", "cores busy:.3f", "more time:+.1%", "more work:+.2%", name_width=18)
    plain, work = median(seconds["none"]), median(cpu["none"])
    for name in MODES:
        took, worked = median(seconds[name]), median(cpu[name])
        table.row(name, 2 * nbytes / took / 1e9, worked / took, took / plain - 1, (worked - work) / plain)
    more = median(seconds["one line a page"]) / plain - 1
    claim(f"more time with a line of every page compared: {more:+.2%} <= {LIMIT:.0%}", more <= LIMIT)
    if more > LIMIT:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
