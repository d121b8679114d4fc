"""Claim: a linear layer of four times the gather budget trains in tiles, with the same result, within the budget.

    python benchmarks/tiling.py [--width 1024] [--rows 32768] [--folder DIR]

One or two ranks, weights and states in CPU memory or on NVMe, fp32 and bf16, each in processes of its own; `whole` is
the same run with tiles switched off. A row shows the largest difference of a master weight after the last step from
plain torch in fp32 (of `tiled` in bf16: from `whole` in bf16, where products are rounded in another order); the most
that was gathered by the ledger, in budgets; and resident memory above the baseline in forward and backward, beside what
the plan says of it. Exit code 1 when a claim fails.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from typing import Any

from support.launch import run_ranks
from support.machine import MIB, describe
from support.table import Table, claim

# In fp32; and in bf16 the norm of all differences, as a share of what bf16 itself changes.
APART, ROUNDED = 1e-6, 0.1
# Resident memory is some beyond the plan, for heaps and what libraries take: with tiles by no more than so many budgets
# more than without.
RESIDENT = 0.5


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, default=32768)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--tiers", default="cpu,nvme")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="folder on the drive")
    given = parser.parse_args()
    print(describe())
    print(f"a linear layer of {given.width} x {given.rows}, {given.width * given.rows / 1e6:.1f} M elements")
    table = Table("tiles:d", "apart:.1e", "budgets:.2f", "resident:.0f", "planned:.0f", name_width=28)
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for world in map(int, given.ranks.split(",")):
            shape = {"width": given.width, "rows": given.rows, "tokens": 32, "steps": given.steps}
            options = {**shape, "folder": folder, "world": world}
            run_ranks("wide", {**options, "how": "torch", "dtype": "fp32"})
            for dtype in given.dtypes.split(","):
                options |= {"dtype": dtype}
                for tier in given.tiers.split(","):
                    for how in ("whole", "tiled"):
                        ranks = run_ranks("wide", {**options, "tier": tier, "how": how}, world_size=world)
                        worst = max(ranks, key=lambda each: each["resident"] - each["planned"])
                        name = f"{world} ranks, {tier}, {dtype}"
                        found.setdefault(name, {})[how] = worst
                        table.row(
                            f"{name}, {how}", worst["tiles"], worst["apart"], worst["gathered"] / worst["budget"],
                            worst["resident"] / MIB, worst["planned"] / MIB,
                        )  # fmt: skip
    return _claims(found)


def _claims(found: dict[str, dict[str, dict[str, Any]]]) -> int:
    tiled = [row["tiled"] for row in found.values()]
    apart = max((row["tiled"]["apart"] for name, row in found.items() if "fp32" in name), default=0.0)
    norms = [(row["tiled"]["norm"], row["whole"]["norm"]) for name, row in found.items() if "bf16" in name]
    rounded = max((tiled_norm / norm for tiled_norm, norm in norms), default=0.0)
    gathered = max(row["gathered"] / row["budget"] for row in tiled)
    beyond = max((_beyond(row["tiled"]) - _beyond(row["whole"])) / row["tiled"]["budget"] for row in found.values())
    # Three of four budgets are never there, nor is more than a tile's gradient.
    saved = min(
        (row["whole"]["resident"] - row["tiled"]["resident"]) / row["tiled"]["budget"] for row in found.values()
    )
    claims = {
        "every cell is in tiles, its twin in none": all(
            row["tiled"]["tiles"] >= 16 and row["whole"]["tiles"] == 0 for row in found.values()
        ),
        f"fp32: masters are within {apart:.1e} <= {APART:.0e}": apart <= APART,
        f"bf16: tiles change masters by {rounded:.1%} <= {ROUNDED:.0%} of what bf16 does": rounded <= ROUNDED,
        f"gathered are {gathered:.2f} <= 1 budgets": gathered <= 1,
        f"resident memory is beyond the plan by {beyond:+.2f} <= {RESIDENT} budgets more": beyond <= RESIDENT,
        f"it is lower than without tiles by {saved:.1f} >= 5 budgets": saved >= 5,
    }
    for text, holds in claims.items():
        claim(text, holds)
    return 0 if all(claims.values()) else 1


def _beyond(row: dict[str, Any]) -> int:
    return row["resident"] - row["planned"]


if __name__ == "__main__":
    sys.exit(main())
