"""Claim: hooks and coordinator cost at most 0.2 ms of host time a unit and step.

    python benchmarks/hooks.py [--units 100] [--rounds 30] [--folder DIR] [--profile PATH]

Trains a chain of tiny layers at stage 3 with a persistence threshold of 0, alternating with the same model in plain torch
(fused AdamW, clipping) in one process, and prints the difference a unit and step. Where a unit is never gathered (one
rank, no offload) that is hooks and stepper alone; with offload it includes the copies, at 2 ranks the two gathers and
the reduction of each unit, whose time alone is printed too.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

from support.hooks import PHASES
from support.launch import run_ranks
from support.machine import describe

LIMIT_US = 200.0


def _placements(folder: str) -> dict[str, dict[str, Any]]:
    nvme = {"device": "nvme", "nvme_path": folder}
    cpu = {"device": "cpu"}
    return {
        "no offload": {},
        "all on CPU": {"offload_param": cpu, "offload_optimizer": cpu},
        "all on NVMe": {"offload_param": nvme, "offload_optimizer": nvme, "sub_group_size": 1600},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--units", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--profile", help="also profile: one text file a case and rank, beginning with this path")
    options = parser.parse_args()
    print(describe())
    print(f"{options.units} units of 72 parameters, fp32, clipping on, {options.rounds} rounds, us a unit and step")
    print(f"{'':24s}{'gathers':>8s}{'plain':>8s}{'ours':>8s}{'beyond':>8s}  forward, backward, step      verdict")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for ranks in options.ranks:
            for name, zero in _placements(folder).items():
                profile = f"{options.profile}-{ranks}-{name.replace(' ', '-')}" if options.profile else None
                task = {"units": options.units, "rounds": options.rounds, "zero": zero, "profile": profile}
                _print(f"{ranks} rank{'s' * (ranks > 1)}, {name}", run_ranks("hooks", task, world_size=ranks)[0])


def _print(name: str, value: dict[str, Any]) -> None:
    medians, units = value["medians"], value["units"]
    plain, ours = (sum(medians[key]) / units * 1e6 for key in ("plain", "ours"))
    parts = [(b - a) / units * 1e6 for a, b in zip(medians["plain"], medians["ours"], strict=True)]
    assert len(parts) == len(PHASES)
    beyond = ours - plain
    line = f"{name:24s}{value['gathering']:8d}{plain:8.1f}{ours:8.1f}{beyond:8.1f}  "
    line += ", ".join(f"{part:6.1f}" for part in parts)
    if "collectives" in medians:
        alone = sum(medians["collectives"]) / units * 1e6
        beyond -= alone
        line += f"  collectives alone {alone:.1f}, beyond them {beyond:.1f}"
    print(f"{line}  {'<=' if beyond <= LIMIT_US else 'OVER'} {LIMIT_US:.0f}", flush=True)


if __name__ == "__main__":
    main()
