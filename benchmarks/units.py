"""Claim: a step costs the same a unit in a model of 3,200 units as in one of 200; `initialize` grows as the units do.

    python benchmarks/units.py [--folder DIR] [--units 200,800,3200] [--rounds N] [--json FILE] [--profile PATH]

A chain of tiny layers at stage 3, one rank, everything on NVMe, a persistence threshold of 0: every layer is a unit
that is gathered and released. Three cases: `kept` has room for all gathered units, from forward to backward; `bounded`
has room for 16 and gathers twice; `early` is `bounded` without clipping, so that the step begins in backward. Each size
runs in a process of its own. Prints the time a unit and step, by wall clock and of CPU, and the time of `initialize` in
all and a unit. `initialize` is compared between the two largest sizes: below some 1,000 units Python's garbage
collector, which has 40 % of its time above, hardly ever collects all objects.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from support.launch import run_ranks
from support.machine import describe
from support.table import Table, claim

LIMIT = 1.3
# Parameters of one layer; see `support.hooks.Chain`.
_NUMEL = 72
# Parameters gathered at once, and gathered ahead of use, and the norm that gradients are clipped at, by case.
_BOUNDS = {"stage3_max_live_parameters": 16 * _NUMEL, "stage3_prefetch_bucket_size": 4 * _NUMEL}
_CASES: dict[str, tuple[dict[str, int], float]] = {
    "kept": ({}, 1.0), "bounded": (_BOUNDS, 1.0), "early": (_BOUNDS, 0.0)
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--units", default="200,800,3200")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=[*_CASES], nargs="+", default=[*_CASES])
    parser.add_argument("--json", help="file that the figures are written to")
    parser.add_argument("--profile", help="also profile: one text file a case, beginning with this path")
    given = parser.parse_args()
    print(describe())
    counts = [int(count) for count in given.units.split(",")]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    table = Table("us a unit:.0f", "CPU us a unit:.0f", "initialize s:.2f", "us a unit:.0f")
    for name in given.only:
        found[name] = {}
        for count in counts:
            figures = found[name][count] = _measure(count, name, given)
            step, cpu, initialize = (figures[key] / count * 1e6 for key in ("step", "cpu", "initialize"))
            table.row(f"{name}, {count} units", step, cpu, figures["initialize"], initialize)
    for name, by_count in found.items():
        for key in ("step", "cpu", "initialize"):
            *smaller, most = sorted(counts)
            fewer = smaller[-1 if key == "initialize" else 0]
            small, large = (by_count[count][key] / count for count in (fewer, most))
            text = f"{name}, {key}: a unit of {most} costs {large / small:.2f} of one of {fewer}"
            claim(f"{text}, at most {LIMIT}", large <= LIMIT * small)
    if given.json:
        figures = {"machine": describe(), "limit": LIMIT, "rounds": given.rounds, "cases": found}
        Path(given.json).write_text(json.dumps(figures, indent=1) + "\n")


def _measure(count: int, name: str, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        drive = {"device": "nvme", "nvme_path": folder}
        bounds, clip = _CASES[name]
        zero = {"offload_param": drive, "offload_optimizer": drive, "sub_group_size": 1600, **bounds}
        profile = f"{given.profile}-{name}-{count}" if given.profile else None
        task = {"units": count, "rounds": given.rounds, "zero": zero, "clip": clip, "profile": profile}
        return run_ranks("units", task)[0]


if __name__ == "__main__":
    main()
