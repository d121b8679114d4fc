"""Does it show where gradients live? 20 steps of a difficult model, by homes of its gradients; one hash a setting.

    python -m tests.gradient_matrix [--ranks 1,2] [--json FILE]

The model has a tied embedding, a block that is used twice, recomputed blocks, and a layer without a gradient in every
other micro-batch. Gradients are read and assigned in between, and states are offloaded and reloaded. A setting is a
stage, a precision, an accumulation, a clipping and a number of ranks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.plan.types import Kind
from tests.support.models import token_batch
from tests.support.oracle import Access, Case, SmallModel, join, settings, train
from tests.support.spawn import RankPool

STEPS = 20
# Where everything else is on NVMe.
HOMES: dict[str, dict[str, Any]] = {
    "cpu": {"device": "cpu"}, "nvme": {"device": "nvme"}, "both": {"device": "nvme", "ratio": 0.5},
}  # fmt: skip
# Elements: there are several sub-groups, some of one unit, some of several.
TIGHT = {"stage3_max_live_parameters": 9000, "sub_group_size": 700}


@dataclass(frozen=True)
class Cell:
    """One training."""

    stage: int
    precision: str
    accumulation: int
    clip: float
    ranks: int
    home: str

    @property
    def setting(self) -> tuple[object, ...]:
        """What may show in the result."""
        return self.stage, self.precision, self.accumulation, self.clip, self.ranks


class Difficult(SmallModel):
    """See the module's text."""

    def __init__(self) -> None:
        super().__init__()
        self.resting = nn.Linear(16, 16)

    def forward(self, input_ids: Tensor, labels: Tensor, *, rests: bool = False) -> Tensor:
        first, last = self.blocks
        x = self.embedding(input_ids) + self.positions[: input_ids.shape[-1]]
        for block in (first, last, first):
            x = checkpoint(block, x, use_reentrant=False)
        x = x if rests else x + self.resting(x)
        logits = self.head(self.norm(x + self.fixed(x)))[:, :-1] * self.temperature
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels[:, 1:].flatten())


class Interrupted(Case):
    """A training in which gradients are looked at and changed, and states moved, between its steps."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return Difficult()

    def losses(self, call: nn.Module, rank: int, micro: int) -> Iterable[Tensor]:
        yield call(**token_batch(rank, micro, positions=8), rests=bool(micro % 2))

    def before_step(self, call: nn.Module, micro: int, access: Access) -> list[Tensor]:
        if micro % 7 != 3:
            return []
        params = access.params(call)
        seen = [access.get(params[name], "grad") for name in ("embedding.weight", "blocks.1.qkv.weight")]
        access.set(params["blocks.1.qkv.weight"], "grad", 0.5 * seen[1])
        return seen

    def after_step(self, call: Any, step: int, access: Access) -> list[Tensor]:
        if step % 8 == 5:
            call.offload_states()
            call.reload_states()
        return []


def run(rank: int, world: int, cell: Cell) -> tuple[str, list[float], int]:
    """Train a cell on a rank of a pool. Return a hash of weights and moments, the norms, and the number of gradient
    partitions on the drive.
    """
    join(world)
    on_drive = []
    with tempfile.TemporaryDirectory() as folder:
        config = settings(
            folder, stage=cell.stage, param="nvme" if cell.stage == 3 else "gpu", optimizer="nvme",
            dtype=cell.precision, accumulation=cell.accumulation, clip=cell.clip,
            zero={**TIGHT, "offload_gradients": HOMES[cell.home]}, check_grad_overflow=bool(cell.clip),
        )  # fmt: skip
        result = train(
            Interrupted(), config, rank=rank, steps=STEPS,
            look=lambda engine: on_drive.extend(
                spec for spec in engine.plan.partitions if spec.key.kind is Kind.GRAD and spec.home.on_drive
            ),
        )  # fmt: skip
    return result.digest, result.norms, len(on_drive)


def product(ranks: Sequence[int] = (1, 2)) -> list[Cell]:
    """Return all cells: stages 2 and 3 in full, 0 and 1 once."""
    axes = itertools.product((2, 3), ("fp32", "bf16"), (1, 4), (0.0, 1.0), ranks, HOMES)
    below = itertools.product((0, 1), ("bf16",), (4,), (1.0,), ranks, HOMES)
    return [Cell(*values) for values in (*axes, *below)]


def main() -> int:
    """The command line; the exit status is 1 if a setting has several hashes, or gradients lie elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--json", type=Path, help="file to record in")
    given = parser.parse_args()
    cells, began = product([int(each) for each in given.ranks.split(",")]), time.monotonic()
    found: dict[tuple[object, ...], dict[str, str]] = {}
    wrong = []
    with RankPool(1) as alone, RankPool(2) as several:
        for cell in cells:
            pool = alone if cell.ranks == 1 else several
            digests, norms, counts = zip(*pool.run(run, cell, timeout=300), strict=True)
            found.setdefault(cell.setting, {})[cell.home] = digests[0]
            moved = {"cpu": max(counts) == 0}.get(cell.home, min(counts) > 0)
            if len(set(digests)) > 1 or len(norms[0]) != STEPS or not moved:
                wrong.append(f"{cell}: hashes {set(digests)}, {len(norms[0])} steps, {counts} gradients on the drive")
    wrong += [f"{setting}: {hashes}" for setting, hashes in found.items() if len(set(hashes.values())) > 1]
    for line in wrong:
        print(line)
    seconds = round(time.monotonic() - began)
    print(f"{len(found)} settings, {len(cells)} cells, {len(wrong)} wrong, in {seconds} s")
    if given.json is not None:
        report = {
            "command": "python -m tests.gradient_matrix", "date": date.today().isoformat(), "torch": torch.__version__,
            "steps": STEPS, "cells": len(cells), "settings": len(found), "wrong": wrong, "seconds": seconds,
            "hashes": {" ".join(map(str, setting)): hashes for setting, hashes in found.items()},
        }  # fmt: skip
        given.json.write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
