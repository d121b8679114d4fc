"""Does it show whether steps begin in backward before their norm is known? 20 steps by guess and by verdict.

    python -m tests.speculation_matrix [--ranks 1,2] [--json FILE]

The gradients of a step are clipped or not, or are not finite, in a pattern of steps; that decides whether a guess is
right. A setting is a precision, an accumulation, a number of ranks, a device, recomputed blocks or not, and a pattern:
it must have one hash of weights and moments, on NVMe and in CPU memory, whether steps are speculative, at all times or
with rests. Of those that are at all times, every sub-group of a step that is not clipped must have been committed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.accelerator_matrix import DELAYS_OF_A_RATIO, PlainCase
from tests.support import accelerator
from tests.support.host_accesses import host_accesses_are_declared
from tests.support.models import token_batch
from tests.support.oracle import join, settings, train
from tests.support.simulated_device import engines_use
from tests.support.spawn import RankPool

STEPS = 20
CLIP = 1.0
GUESSES: tuple[Any, ...] = (False, "auto", True)
_CHOICES = random.Random(7).choices([True, False], k=STEPS)
# By name: whether each step's gradients are below the limit; None: they are not finite.
PATTERNS: dict[str, list[bool | None]] = {
    "all right": [True] * STEPS, "in turn": [at % 2 == 0 for at in range(STEPS)], "random": [*_CHOICES],
    "all wrong": [False] * STEPS, "not finite": [None if at in (3, 10) else at % 4 != 1 for at in range(STEPS)],
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One training."""

    precision: str
    accumulation: int
    ranks: int
    accelerator: bool
    recomputed: bool
    pattern: str
    guess: Any
    # Of parameters and states; gradients are in CPU memory.
    home: str = "nvme"
    # Of the delays of an accelerator's copies and events; 0: none.
    seed: int = 0

    @property
    def setting(self) -> tuple[object, ...]:
        """What may show in the result."""
        return self.precision, self.accumulation, self.ranks, self.accelerator, self.recomputed, self.pattern


class Pulled(nn.Module):
    """A model with a loss of its own on what its blocks are given: only the first unit's gradients are large, which
    come last, when the others have been stepped.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor, *, pull: float) -> Tensor:
        given: list[Tensor] = []
        with self.model.blocks[0].register_forward_pre_hook(lambda _, args: given.extend(args)):
            loss = self.model(input_ids, labels)
        return 1e-2 * loss + pull * given[0].square().sum()


class Scaled(PlainCase):
    """A training with the pattern of its steps."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self._cell = cell

    def model(self) -> nn.Module:
        return Pulled(super().model())

    def losses(self, call: Any, rank: int, micro: int) -> Iterable[Tensor]:
        right = PATTERNS[self._cell.pattern][micro // self._cell.accumulation]
        batch = {name: ids.to(call.device) for name, ids in token_batch(rank, micro, positions=8).items()}
        yield call(**batch, pull=math.inf if right is None else 0.0 if right else 1e2)


def run(rank: int, world: int, cell: Cell) -> tuple[str, int, tuple[int, int, int]]:
    """Train a cell on a rank of a pool. Return a hash of weights and moments, how many sub-groups may begin in
    backward, and how many were committed, wrong and forgotten.
    """
    found: list[tuple[int, Any]] = []
    with ExitStack() as stack:
        if cell.accelerator:
            accelerator.load()
            accelerator.configure(seed=cell.seed, delays=DELAYS_OF_A_RATIO if cell.seed else False)
            accelerator.reset()
            stack.enter_context(engines_use())
            stack.enter_context(host_accesses_are_declared())
        join(world)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = settings(
            folder, param=cell.home, optimizer=cell.home, dtype=cell.precision, accumulation=cell.accumulation,
            clip=CLIP, zero={"sub_group_size": 1280 // cell.ranks}, speculative_step=cell.guess,
            **({"activation_checkpointing": {"every": 1}} if cell.recomputed else {}),
        )  # fmt: skip
        result = train(
            Scaled(cell), config, rank=rank, steps=STEPS,
            look=lambda engine: found.append((len(engine.plan.step_parts().in_backward), engine.early_groups)),
        )  # fmt: skip
        assert not cell.accelerator or not accelerator.races(), accelerator.races()[0]
    ((groups, counts),) = found
    return result.digest, groups, (counts.committed, counts.wrong, counts.forgotten)


def wrong(cell: Cell, groups: int, counts: tuple[int, int, int]) -> str:
    """What is wrong with the counts of a cell on one rank, in words."""
    committed, missed, forgotten = counts
    pattern = PATTERNS[cell.pattern]
    right = pattern.count(True) * groups
    if cell.guess is False or (cell.guess == "auto" and not (cell.accelerator and cell.home == "nvme")):
        return "" if counts == (0, 0, 0) else f"{counts} without a guess"
    if cell.guess == "auto":
        return "" if committed <= right and bool(committed) == bool(right) else f"{counts} of {right}"
    # A wrong one ends as soon as it is known to be; one step measures transfers, which forgets what has begun.
    most = (STEPS - pattern.count(True)) * groups
    fits = committed + forgotten == right and forgotten in (0, groups) and missed <= most and missed >= most // 2
    return "" if fits and groups > 2 else f"{counts} of {right} committed and at most {most} wrong"


def product(ranks: Sequence[int] = (1, 2)) -> list[Cell]:
    """Return all cells: blocks are recomputed in half of the settings."""
    axes = itertools.product(("fp32", "bf16", "fp16"), (1, 4), ranks, (False, True))
    return [
        Cell(precision, accumulation, count, accelerator, (at + (precision == "bf16")) % 2 == 1, pattern, guess, home)
        for at, (precision, accumulation, count, accelerator) in enumerate(axes)
        for pattern in PATTERNS for guess in GUESSES for home in ("nvme", "cpu")
    ]  # fmt: skip


def judged(
    cells: Sequence[Cell], pools: Mapping[tuple[int, bool], RankPool]
) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Train the cells. Return a hash by setting and guess, and what is wrong."""
    found: dict[str, dict[str, str]] = {}
    faults = []
    for cell in cells:
        answers = pools[cell.ranks, cell.accelerator].run(run, cell, timeout=300)
        found.setdefault(str(cell.setting), {})[f"{cell.guess} {cell.home} {cell.seed}"] = answers[0][0]
        faults += [f"{cell}: {said}" for _, groups, counts in answers if (said := wrong(cell, groups, counts))]
    faults += [f"{setting}: {by_guess}" for setting, by_guess in found.items() if len({*by_guess.values()}) != 1]
    return found, faults


def main() -> int:
    """The command line; the exit status is 1 if a setting has several hashes, or a count is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--json", type=Path, help="file to record in")
    given = parser.parse_args()
    ranks, began = [int(each) for each in given.ranks.split(",")], time.monotonic()
    cells = product(ranks)
    with ExitStack() as stack:
        kinds = itertools.product(ranks, (False, True))
        pools = {(count, kind): stack.enter_context(RankPool(count)) for count, kind in kinds}
        found, faults = judged(cells, pools)
    print(f"{len(cells)} cells of {len(found)} settings in {time.monotonic() - began:.0f} s; {len(faults)} wrong")
    print("\n".join(faults))
    if given.json is not None:
        command = f"python -m tests.speculation_matrix --ranks {given.ranks}"
        record = {"date": f"{date.today()}", "command": command, "steps": STEPS,
                  "cells": len(cells), "settings": len(found), "wrong": faults, "torch": torch.__version__}  # fmt: skip
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
