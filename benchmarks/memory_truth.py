"""Claim: the plan is the truth: resident memory of each phase is within 5 % of what it predicts, NVMe within 1 %.

    python benchmarks/memory_truth.py [--models llama,gpt2,mlp] [--configurations memory,nvme] [--folder DIR]

Three models of about 60 M parameters by seven configurations that mix tiers, stages, precisions and accumulation, two
ranks over gloo, each case in two processes of its own. A row shows what the rank that is further off takes in each
phase, above the baseline, and its error against `estimators.phases.bytes_by_phase`; activations are those of
`infinity.measure_activations`. See `support.truth` for the baseline.

A phase occurs in every micro-batch; its figure is the median, for the C library's heap scatters from one to the next;
the largest of all is behind it. Free memory of that heap is given back before each phase, so that no phase pays for the
one before.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from support.launch import run_ranks
from support.machine import MIB, describe, median
from support.table import Table, claim
from support.truth import CONFIGURATIONS, PHASES, SHAPES

from estimators.phases import OVERHEAD_NBYTES, OVERHEAD_WITH_CUDA_NBYTES

LIMIT, NVME_LIMIT = 0.05, 0.01


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--configurations", default=",".join(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="folder on the drive")
    given = parser.parse_args()
    print(describe())
    print("MiB above the baseline by phase, and the error of the prediction; NVMe: error of the file against du")
    columns = [column for phase in PHASES for column in (f"{phase}:.0f", "error:+.1%")]
    table = Table(*columns, "worst:+.1%", "NVMe:+.2%", "fixed:.0f", name_width=16)
    worst = {"median": 0.0, "largest": 0.0, "nvme": 0.0, "fixed": 0.0}
    for model in given.models.split(","):
        for configuration in given.configurations.split(","):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                options = {
                    "model": model, "configuration": configuration, "positions": 64, "steps": given.steps,
                    "folder": folder,
                }  # fmt: skip
                _row(table, f"{model}, {configuration}", run_ranks("truth", options, world_size=2), worst)
    text = f"resident memory of each phase: largest error {worst['median']:.1%} <= {LIMIT:.0%}"
    claim(text, worst["median"] <= LIMIT)
    print(f"  largest error of any single micro-batch's phase {worst['largest']:.1%}")
    claim(f"NVMe: largest error {worst['nvme']:.2%} <= {NVME_LIMIT:.0%}", worst["nvme"] <= NVME_LIMIT)
    bound = OVERHEAD_NBYTES if torch.version.cuda is None else OVERHEAD_WITH_CUDA_NBYTES
    claim(f"fixed overhead of a process: {worst['fixed'] / MIB:.0f} MiB <= {bound / MIB:.0f}", worst["fixed"] <= bound)


def _row(table: Table, name: str, ranks: list[dict[str, Any]], worst: dict[str, float]) -> None:
    cells: list[float] = []
    largest = 0.0
    for phase in PHASES:
        peaks = [(each["measured"][phase], each["predicted"][phase]) for each in ranks]
        middle = [(median(_steady(phase, found)), predicted) for found, predicted in peaks]
        error, nbytes = max(((found / said - 1, found) for found, said in middle), key=lambda pair: abs(pair[0]))
        cells += [nbytes / MIB, error]
        worst["median"] = max(worst["median"], abs(error))
        largest = max(largest, *(abs(max(found) / predicted - 1) for found, predicted in peaks))
    nvme = max((abs(each["used"] / each["planned_nvme"] - 1) for each in ranks if each["planned_nvme"]), default=0.0)
    fixed = max(each["fixed"] for each in ranks)
    worst.update(
        largest=max(worst["largest"], largest), nvme=max(worst["nvme"], nvme), fixed=max(worst["fixed"], fixed)
    )
    table.row(name, *cells, largest, nvme if ranks[0]["planned_nvme"] else None, fixed / MIB)


def _steady(phase: str, peaks: list[int]) -> list[int]:
    """Without the first micro-batch, in which gradients have no memory yet: what is predicted is the steady state."""
    return peaks if phase in ("initialise", "save") else peaks[1:]


if __name__ == "__main__":
    main()
