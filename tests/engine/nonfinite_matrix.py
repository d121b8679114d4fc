"""Two ranks of which one has a gradient that is not finite, in every precision, stage and tier: both skip alike.

    python -m tests.engine.nonfinite_matrix

Prints a row a cell and ends with 1 where one fails; `test_nonfinite` runs some of the cells. In each the second rank's
loss is NaN in one step, infinite in the next, and in a third a single element of one gradient is NaN. Every rank has to
skip the three, with the weights, moments and step counts of before, and to go on as if they had not been.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from typing import Any

import torch

from tests.engine.test_nonfinite import snapshot, start, step
from tests.support.oracle import join
from tests.support.spawn import RankPool

STAGES, TIERS, DTYPES = (0, 1, 2, 3), ("none", "cpu", "nvme"), ("fp32", "bf16", "fp16")
Cell = tuple[int, str, str]
CELLS: list[Cell] = [*itertools.product(STAGES, TIERS, DTYPES)]


def run(rank: int, world: int, folder: str, cells: list[Cell]) -> list[list[str]]:
    """What is wrong in each cell, as words; nothing is as it should be."""
    join(world)
    return [_wrong(rank, folder, *cell) for cell in cells]


def _wrong(rank: int, folder: str, stage: int, tier: str, dtype: str) -> list[str]:
    options: dict[str, Any] = {"stage": stage, "tier": tier, "dtype": dtype, "log_level": "error"}
    if dtype == "fp16":
        options["fp16"] = {"enabled": True, "initial_scale_power": 12, "hysteresis": 1}
    found = []
    with start(folder, **options) as engine:
        step(engine, rank)
        before = snapshot(engine)
        for poison in (math.nan, math.inf, None):
            engine.module[1].on = rank == 1 and poison is None
            step(engine, 2 + rank, poison=poison if rank == 1 else None)
            engine.module[1].on = False
            if engine.was_step_applied() or engine.get_global_grad_norm() != math.inf:
                found.append(f"{poison or 'an element'} was not skipped")
            if not all(map(torch.equal, before, snapshot(engine))):
                found.append(f"{poison or 'an element'} changed weights or moments")
        scale = 2.0**9 if dtype == "fp16" else 1.0
        if (engine.skipped_steps, engine.global_steps, engine.loss_scale) != (3, 4, scale):
            found.append(f"{engine.skipped_steps} of {engine.global_steps} skipped, scale {engine.loss_scale}")
        step(engine, 4 + rank)
        after = snapshot(engine)
    with start(folder, **options) as engine:
        step(engine, rank)
        step(engine, 4 + rank)
        if not all(map(torch.equal, after, snapshot(engine))):
            found.append("the next step differs from a run without the bad ones")
    return found


def main() -> int:
    """Run every cell; 1 where one fails."""
    with tempfile.TemporaryDirectory() as folder, RankPool(2) as pool:
        ranks = pool.run(run, folder, CELLS, timeout=600)
    failed = 0
    for cell, *wrong in zip(CELLS, *ranks, strict=True):
        words = [f"rank {rank}: {text}" for rank, texts in enumerate(wrong) for text in texts]
        failed += bool(words)
        sys.stdout.write(f"stage {cell[0]}, {cell[1]:4s} {cell[2]}: {'; '.join(words) or 'both ranks skip alike'}\n")
    sys.stdout.write(f"{len(CELLS) - failed} of {len(CELLS)} cells hold\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
