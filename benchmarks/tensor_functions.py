"""Claim: the tensor axis costs at most 0.2 ms of host time a layer and step beside its collectives.

    python benchmarks/tensor_functions.py [--layers 16] [--rounds 30] [--json FILE]

Trains a small model (attention and gated MLP, fp32) that is divided over two ranks of gloo: by `infinity.parallel`, by
torch's DTensor (`parallelize_module`), and, as what the arithmetic alone takes, with the same shards and no sums. They
take turns in the same processes. Host time is that of a step whose collectives return at once, less the arithmetic's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from support.launch import run_ranks
from support.machine import describe
from support.table import Table, claim

COMMAND = "python benchmarks/tensor_functions.py"
LIMIT_US = 200.0


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", help="ignored: nothing is written to a drive")
    parser.add_argument("--json", type=Path, help="write the result into this file")
    options = parser.parse_args()
    print(describe())
    print(f"{options.layers} layers on 2 ranks, {options.rounds} rounds, us a layer and step")
    task = {"layers": options.layers, "rounds": options.rounds}
    ranks = run_ranks("tensor_functions", task, world_size=2)
    table = Table("wall:.0f", "beside:.0f", "CPU beside:.0f", "beyond:.0f", "CPU beyond:.0f", "collectives:.1f")
    beyond: dict[str, list[float]] = {}
    for name in ("shard", "ours", "dtensor"):
        cells = [_figures(value, name, options.layers) for value in ranks]
        table.row(name, *(max(column) for column in zip(*cells, strict=True)))
        beyond[name] = [cell[4] for cell in cells]
    claim(f"at most {LIMIT_US:.0f} us of the thread's CPU time a layer and step", max(beyond["ours"]) <= LIMIT_US)
    if ranks[0]["apart"] > 1e-5:
        raise SystemExit(f"the losses of the two differ by {ranks[0]['apart']}")
    if options.json:
        options.json.write_text(json.dumps(_topic(options, beyond), indent=1) + "\n")


def _figures(value: dict[str, Any], name: str, layers: int) -> list[float]:
    """Of one rank: wall clock, wall clock and CPU time beside collectives, both beyond the arithmetic, collectives."""
    mine, least = value["medians"][name], value["medians"]["shard"]
    us = 1e6 / layers
    beside, cpu = mine["wall beside"] * us, mine["cpu beside"] * us
    spent = beside - least["wall beside"] * us, cpu - least["cpu beside"] * us
    return [mine["wall"] * us, beside, cpu, *spent, value["calls"][name] / layers]


def _topic(options: argparse.Namespace, beyond: dict[str, list[float]]) -> dict[str, Any]:
    def row(what: str, figures: list[float], limit: str = "") -> dict[str, Any]:
        return {"what": what, "figures": [round(figure) for figure in figures], "limit": limit, "unit": "us"}

    limit = f"<= {LIMIT_US:.0f}"
    return {
        "topic": "Tensor axis",
        "claim": f"The tensor axis costs at most {LIMIT_US:.0f} us of host time a layer and step beside its sums.",
        "command": COMMAND,
        "machine": f"{describe().partition(', ')[2]}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": None,
        "how": (
            f"{options.layers} layers of attention and MLP, fp32, 2 ranks of gloo, {options.rounds} rounds; medians of "
            "the training thread's CPU time in a step whose collectives return at once, less those of the same shards "
            "without sums; each rank's. DTensor is torch's parallelize_module on the same model in the same run."
        ),
        "rows": [
            row("infinity", beyond["ours"], limit),
            row("DTensor", beyond["dtensor"]),
        ],
    }


if __name__ == "__main__":
    main()
