"""Claim: checkpoints on CPU memory or NVMe change no bit, free at least 80 % of their bytes, and cost at most 15 %.

    python benchmarks/activation_offload.py [--rounds 2] [--dtype fp32|bf16] [--folder DIR] [--small]

A stack of feed-forward blocks with dropout, every block computed again in backward, with the blocks' inputs on the
device ("gpu": plain checkpointing), in CPU memory and on NVMe; processes of their own, by turns.

- bits: a hash over all weights after the steps, and the norm of each step's gradients in full precision.
- memory: on NVMe the peak of resident memory against plain checkpointing's, in processes whose C library keeps no freed
  tensor in its heap, which scatters by more than all checkpoints. Without an accelerator CPU memory is
  resident all the same: there it is what of the blocks' inputs is alive on the device when forward has ended.
- time: forward and backward. The drive suffices where the checkpoints' bytes, over the rate that fio measures on it,
  take less than the computation.

Then the same bits at stages 0 and 3, fp32 and bf16, on one and two ranks. Ends with 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from typing import Any

from support.launch import run_ranks
from support.machine import MIB, describe, fio_rates, median
from support.table import Table, claim

HOMES = ("gpu", "cpu", "nvme")
FREED, SLOWER = 0.80, 1.15
# What is freed goes back to the system at once.
_NO_HEAP = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--small", action="store_true", help="few rows and one round: the bits only")
    given = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        held = [_bits(folder)]
        if not given.small:
            held += _measured(given, folder)
    sys.exit(0 if all(held) else 1)


def _measured(given: argparse.Namespace, folder: str) -> list[bool]:
    """Memory and time, with the computed share of the drive."""
    options = {
        "width": 128, "blocks": 48, "rows": 8192, "steps": 3, "stage": 0, "dtype": given.dtype, "folder": folder,
    }  # fmt: skip
    nbytes = 48 * 8192 * 128 * (2 if given.dtype == "bf16" else 4)
    rounds: dict[str, list[dict[str, Any]]] = {home: [] for home in HOMES}
    sizes: dict[str, list[dict[str, Any]]] = {home: [] for home in HOMES}
    for _ in range(given.rounds):
        for home in HOMES:
            rounds[home] += run_ranks("checkpoints", {**options, "home": home})
            sizes[home] += run_ranks("checkpoints", {**options, "home": home}, environment=_NO_HEAP)
    print(f"{given.dtype}: 48 checkpoints, {nbytes / MIB:.0f} MiB; medians of {given.rounds} processes x 3 steps")
    figures = {home: _figures(sizes[home], rounds[home]) for home in HOMES}
    plain = figures["gpu"]
    table = Table("peak MiB:.0f", "freed:.1%", "alive MiB:.1f", "s:.3f", "ratio:.3f", "moved MiB:.0f", name_width=8)
    for home, (peak, alive, seconds, moved) in figures.items():
        freed = (plain[0] - peak) / nbytes
        table.row(home, peak / MIB, freed, alive / MIB, seconds, seconds / plain[2], moved / MIB)
    freed = {"cpu": (plain[1] - figures["cpu"][1]) / nbytes, "nvme": (plain[0] - figures["nvme"][0]) / nbytes}
    held = []
    for home, share in freed.items():
        held.append(share >= FREED)
        claim(f"{home}: {share:.1%} of the checkpoints' bytes freed >= {FREED:.0%}", held[-1])
    held += _in_time(figures, nbytes, fio_rates(folder, gib=0.5, seconds=4))
    return held


def _in_time(
    figures: dict[str, tuple[float, ...]], nbytes: int, rates: dict[str, float] | None
) -> list[bool]:
    held = []
    for home in ("cpu", "nvme"):
        ratio = figures[home][2] / figures["gpu"][2]
        suffices = True
        if home == "nvme" and rates is not None:
            drive = nbytes / rates["write"] + nbytes / rates["read"]
            suffices = drive <= figures["gpu"][2]
            print(
                f"  the drive needs {drive:.2f} s ({nbytes / MIB:.0f} MiB each way at fio's {rates['write'] / 1e9:.2f} "
                f"and {rates['read'] / 1e9:.2f} GB/s), forward and backward {figures['gpu'][2]:.2f} s: it "
                f"{'suffices' if suffices else 'does not suffice, and nothing is claimed'}"
            )
        held.append(ratio <= SLOWER or not suffices)
        if suffices:
            claim(f"{home}: time of plain checkpointing x {ratio:.3f} <= {SLOWER}", held[-1])
    return held


def _figures(sizes: list[dict[str, Any]], times: list[dict[str, Any]]) -> tuple[float, float, float, float]:
    """(peak, bytes of the blocks' inputs alive after forward, seconds, bytes that the drive moved a step)."""
    every = lambda values, name: median(each for value in values for each in value[name])  # noqa: E731
    alive = median(value["alive"] for value in times)
    return every(sizes, "peaks"), alive, every(times, "seconds"), every(times, "moved")


def _bits(folder: str) -> bool:
    """Whether the three homes give the same bits in every cell."""
    cells = 0
    wrong = []
    for world, stage, dtype in itertools.product((1, 2), (0, 3), ("fp32", "bf16")):
        options = {
            "width": 64, "blocks": 6, "rows": 256, "steps": 2, "stage": stage, "dtype": dtype, "folder": folder,
        }  # fmt: skip
        found = {}
        for home in HOMES:
            values = run_ranks("checkpoints", {**options, "home": home}, world_size=world)
            found[home] = [(value["digest"], value["norms"]) for value in values]
            cells += 1
        if any(each != found["gpu"] for each in found.values()):
            wrong.append(f"{world} ranks, stage {stage}, {dtype}")
    claim(f"the same bits in {cells} runs (3 homes, stages 0 and 3, fp32 and bf16, 1 and 2 ranks) {wrong}", not wrong)
    return not wrong


if __name__ == "__main__":
    main()
