"""Claim: a step that begins in backward hides behind a program that waits for its accelerator, clipped or not.

    python benchmarks/early_step.py [--numel 134217728] [--rounds 5] [--folder DIR] [--json FILE]

Blocks whose forward and backward (1 : 2) only wait, as a program does for its accelerator; everything on NVMe, bf16,
gradients in memory. The drive's time for the step is that of a step alone, with nothing to compute, with everything in
flight waited for before and after it. Then blocks wait for half of that time together, for all of it, and for twice as
long, and whole training steps run freely:

    serial      clipping that clips nothing; the step waits for the norm (speculative_step: false)
    guessed     the same, begun in backward (speculative_step: true)
    unclipped   nothing to wait for
    wrong       clipped a little, so that every guess is found to be wrong with the last gradients, and without a rest
    program     forward and backward of the same blocks with everything in memory: what waits, and the host's own work

Contenders alternate, each in a process of its own; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from support import compare
from support.machine import describe, median
from support.models import BLOCK_NUMEL
from support.table import Table

SHARES = (0.5, 1.0, 2.0)
LIMITS = {"guessed": 1.10, "unclipped": 1.05}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=8 * BLOCK_NUMEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--json", type=Path, help="file to record in")
    given = parser.parse_args()
    given.ranks = 1
    print(describe())
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = {
            "dtype": "bf16", "model": "blocks", "numel": given.numel, "batch": 1, "positions": 1, "folder": folder,
            "warmup": 6, "steps": given.steps, "zero": {"sub_group_size": BLOCK_NUMEL}, "speculative": False,
        }  # fmt: skip

        def seconds(**changed: Any) -> list[dict[str, Any]]:
            return compare.measure("infinity:nvme", {**options, **changed}, given)

        alone = [seconds(settle=True) for _ in range(given.rounds)]
        drive, norm = compare.step_seconds(alone, 1), alone[0][0]["norm"]
        print(f"{given.numel / 1e6:.0f} M parameters; the step alone takes {drive:.2f} s, its norm is {norm:.3g}")
        contenders: dict[str, dict[str, Any]] = {
            "serial": {"clip": 2 * norm}, "guessed": {"clip": 2 * norm, "speculative": True},
            "unclipped": {"clip": 0.0, "checked": False},
            "wrong": {"speculative": True, "clip": 0.999 * norm},
        }  # fmt: skip
        names = (*contenders, "program")
        table = Table("waits:.2f", *(f"{name}:.2f" for name in names), "guessed/serial:.3f", "wrong/serial:.3f")
        rows = []
        for share in SHARES:
            found: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(given.rounds):
                for name, changed in contenders.items():
                    found[name].append(compare.step_seconds([seconds(wait=share * drive, **changed)]))
                program = {**options, "wait": share * drive, **contenders["unclipped"]}
                found["program"].append(compare.step_seconds([compare.measure("infinity:memory", program, given)], 0))
            times = {name: median(each) for name, each in found.items()}
            ratios = {
                name: median(one / other for one, other in zip(found[name], found["serial"], strict=True))
                for name in ("guessed", "wrong")
            }  # fmt: skip
            table.row(f"{share:g} of the drive's", share * drive, *times.values(), *ratios.values())
            rows += [
                {"what": f"blocks wait {share:g} of the drive's time: {name}, step / the longer of both",
                 "figures": [round(times[name] / (max(share, 1.0) * drive), 3)],
                 **({"limit": f"<= {LIMITS[name]}"} if name in LIMITS and share == 1 else {})}
                for name in times
            ]  # fmt: skip
            rows += [
                {"what": f"blocks wait {share:g} of the drive's time: {name} / serial", "figures": [round(ratio, 3)]}
                for name, ratio in ratios.items()
            ]  # fmt: skip
    if given.json is not None:
        record(given, drive, rows)


def record(given: argparse.Namespace, drive: float, rows: list[dict[str, Any]]) -> None:
    """Write the rows as a topic of the page of benchmarks."""
    assert given.json is not None
    given.json.write_text(
        json.dumps({
            "topic": "A step that begins in backward",
            "claim": "Where a program waits for its accelerator as long as the drive needs for the step, a clipped "
            "step that is guessed takes at most 1.10 times that, an unclipped one 1.05.",
            "command": "python benchmarks/early_step.py --json benchmarks/results/early_step.json",
            "machine": describe(), "date": f"{date.today()}",
            "how": f"{given.numel / 1e6:.0f} M parameters, bf16, AdamW, everything on NVMe, gradients in memory; "
            f"blocks only wait, forward : backward 1 : 2. The step alone took {drive:.2f} s. Medians of {given.rounds} "
            "rounds by turns. A whole step also gathers parameters twice: it moves 24.9 bytes a parameter where the "
            "step alone moves 23.0, so that 1.08 is the least. `program` is forward and backward alone with everything "
            "in memory: what blocks wait, and what the host copies there. The first block's step, an eighth, lies "
            "between its gradient and the next forward, and nothing hides it.",
            "rows": rows,
        }, indent=1) + "\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
