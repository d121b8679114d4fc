"""Does placement, timing or the device show in the result? The engine on the simulated accelerator, in a matrix.

    python -m tests.accelerator_matrix --full [--ranks 1,2] [--workers 2] [--json FILE]
    python -m tests.accelerator_matrix --delays [--cells 100] [--workers 4] [--json FILE]

A cell is a precision, an accumulation, a clipping, a number of ranks, a stage, a placement, a ratio and a seed of the
accelerator. It trains a model whose operators are the same on the accelerator and on the CPU, and is right if

- its weights, moments and 16-bit parameters have the hash of the same training on the CPU, without an accelerator;
- no two accesses to memory are without an edge between them, those of the host included; and
- the host never touched device memory, which ends the process.

`--full` runs every cell once without delays; `--delays` a pairwise cover and `--cells` random cells, with delays, and
a cover in which two ranks have collectives on the device's streams in place of those that are staged through the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support import accelerator
from tests.support.cells import cover
from tests.support.host_accesses import host_accesses_are_declared
from tests.support.models import Block
from tests.support.oracle import CLIP, Case, OnDevice, SmallModel, join, settings, train
from tests.support.simulated_device import Communicating, SimulatedDevice, engines_use
from tests.support.spawn import RankError, RankPool

STEPS = 3
# Elements: units are released and fetched again, pools hold a part of the model, and there are several sub-groups.
TIGHT = {"stage3_max_live_parameters": 4000, "stage3_prefetch_bucket_size": 2500, "sub_group_size": 1500}
TIERS = ("gpu", "cpu", "nvme")
# Seconds. A step of the states that stay on the accelerator has some thousand operators, because it has no kernel
# for it, so their delays are shorter there.
DELAYS = accelerator.Delays(copy=0.02, event=0.02, operator=0.001)
DELAYS_OF_A_RATIO = replace(DELAYS, operator=0.00005)
CELL_SECONDS = 300.0


@dataclass(frozen=True)
class Cell:
    """One training. Tiers by their names in the plan; below stage 3 parameters stay on the device."""

    precision: str
    accumulation: int
    clip: float
    ranks: int
    stage: int
    param: str
    optimizer: str
    ratio: float = 1.0
    # Of gradients whose states are not on the device.
    gradients: str = "cpu"
    seed: int = 0
    delays: accelerator.Delays | None = None
    own_collectives: bool = False

    @property
    def setting(self) -> tuple[object, ...]:
        """What may show in the result."""
        return self.stage, self.precision, self.accumulation, self.clip, self.ranks

    @property
    def placement(self) -> tuple[object, ...]:
        """What must not."""
        return self.param, self.optimizer, self.ratio, self.gradients, self.own_collectives

    def axes(self) -> tuple[object, ...]:
        """The value on each axis of the matrix."""
        return *self.setting, *self.placement

    def __str__(self) -> str:
        return (
            f"stage {self.stage} {self.precision} accumulation {self.accumulation} clip {self.clip:g} {self.ranks} "
            f"ranks, {self.param} {self.optimizer} ratio {self.ratio:g}, gradients {self.gradients}, seed {self.seed}"
            f"{', own collectives' if self.own_collectives else ''}"
        )


def product(ranks: Sequence[int] = (1, 2)) -> list[Cell]:
    """Every cell without delays, with one seed."""
    placements = [(3, param, optimizer) for param in TIERS for optimizer in TIERS]
    placements += [(stage, "gpu", optimizer) for stage in (0, 1, 2) for optimizer in TIERS]
    return [
        Cell(precision, accumulation, clip, world, stage, param, optimizer, ratio, gradients)
        for world in ranks
        for precision in ("fp32", "bf16", "fp16")
        for accumulation in (1, 2)
        for clip in (0.0, CLIP)
        for stage, param, optimizer in placements
        # All states are on the device already where the optimizer is.
        for ratio in ((1.0,) if optimizer == "gpu" else (1.0, 0.5))
        for gradients in (("cpu", "nvme") if optimizer == "nvme" else ("cpu",))
    ]


def delayed(cells: Iterable[Cell], first_seed: int = 1) -> list[Cell]:
    """The cells with delays, each with a seed of its own."""
    return [
        replace(cell, seed=first_seed + at, delays=DELAYS if cell.ratio == 1 else DELAYS_OF_A_RATIO)
        for at, cell in enumerate(cells)
    ]


@dataclass
class Outcome:
    """What a cell gave. why: of a failure; empty for a cell that is right."""

    cell: Cell
    digest: str = ""
    races: int = 0
    why: str = ""
    seconds: float = 0.0


class PlainBlock(Block):
    """A block whose attention is matrix products and a softmax: SDPA takes another path on each type of device."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=-1) @ value
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        inner = self.norm2(x)
        return x + self.down(F.silu(self.gate(inner)) * self.up(inner))


class PlainCase(OnDevice):
    """The oracle's small model, with tied, frozen and empty parameters, of blocks that give the CPU's bits."""

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        model = SmallModel()
        model.blocks = nn.ModuleList(PlainBlock(16, 2, 24) for _ in range(2))
        return model


def run_on_cpu(rank: int, world: int, cell: Cell) -> str:
    """Train a cell without an accelerator, on a rank of a pool; return the hash."""
    join(world)
    return _train(rank, cell)


def run_on_accelerator(rank: int, world: int, cell: Cell, case: Case | None = None) -> tuple[str, list[str]]:
    """Train a cell on the simulated accelerator, on a rank of a pool; return the hash and what the checker found."""
    accelerator.load()
    accelerator.configure(seed=world * cell.seed + rank, delays=cell.delays or False)
    accelerator.reset()
    join(world)
    device = Communicating if cell.own_collectives else SimulatedDevice
    with engines_use(device), host_accesses_are_declared():
        digest = _train(rank, cell, case)
    return digest, [str(race) for race in accelerator.races()]


def _train(rank: int, cell: Cell, case: Case | None = None) -> str:
    with tempfile.TemporaryDirectory() as folder:
        gradients = {"offload_gradients": {"device": cell.gradients}} if cell.optimizer != "gpu" else {}
        config = settings(
            folder, stage=cell.stage, param=cell.param, optimizer=cell.optimizer, dtype=cell.precision,
            accumulation=cell.accumulation, clip=cell.clip, zero={**TIGHT, **gradients},
        )  # fmt: skip
        if cell.ratio != 1:
            config["zero_optimization"]["offload_optimizer"]["ratio"] = cell.ratio
        return train(case or PlainCase(), config, rank=rank, steps=STEPS).digest


class Matrix:
    """Pools of ranks that live for all cells, and the hashes of the CPU. Each thread has pools of its own."""

    def __init__(self) -> None:
        self._mine = threading.local()
        self._pools = ExitStack()
        self._expected: dict[tuple[object, ...], str] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *_: object) -> None:
        self._pools.close()

    def run(self, cell: Cell, run: Any = run_on_accelerator) -> Outcome:
        """Run a cell; a failure is in the outcome."""
        outcome, began = Outcome(cell), time.monotonic()
        try:
            expected = self.expected(cell)
            found = self._pool(cell.ranks, "accelerator").run(run, cell, timeout=CELL_SECONDS)
        except RankError as error:
            outcome.why = str(error)[-3000:]
        else:
            digests, races = zip(*found, strict=True)
            outcome.digest, outcome.races = digests[0], sum(map(len, races))
            if set(digests) != {expected}:
                outcome.why = f"hashes {[each[:12] for each in digests]}, on the CPU {expected[:12]}"
            if outcome.races:
                named = [f"rank {rank}: {race}" for rank, each in enumerate(races) for race in each[:3]]
                outcome.why = "\n".join([outcome.why, *named]).strip()
        outcome.seconds = round(time.monotonic() - began, 2)
        return outcome

    def expected(self, cell: Cell) -> str:
        """The hash of a cell's setting on the CPU, with everything in memory."""
        if cell.setting not in self._expected:
            plain = replace(cell, param="gpu", optimizer="gpu", ratio=1.0, seed=0, delays=None, own_collectives=False)
            (digest,) = set(self._pool(cell.ranks, "cpu").run(run_on_cpu, plain))
            self._expected[cell.setting] = digest
        return self._expected[cell.setting]

    def _pool(self, ranks: int, kind: str) -> RankPool:
        pools: dict[tuple[int, str], RankPool] = self._mine.__dict__.setdefault("pools", {})
        if (ranks, kind) not in pools:
            pools[ranks, kind] = pool = RankPool(ranks)
            with self._lock:
                self._pools.enter_context(pool)
        return pools[ranks, kind]


def run_all(cells: Sequence[Cell], *, workers: int) -> list[Outcome]:
    """Run cells and print each one."""
    outcomes = []
    with Matrix() as matrix, ThreadPoolExecutor(workers) as threads:
        for done in as_completed([threads.submit(matrix.run, cell) for cell in cells]):
            outcome = done.result()
            outcomes.append(outcome)
            print(
                f"{len(outcomes):4} of {len(cells)}  {outcome.cell}: {outcome.digest[:12]} {outcome.seconds:.1f} s"
                f"{'  FAILED: ' + outcome.why if outcome.why else ''}",
                flush=True,
            )
    return outcomes


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """The figures of a run."""
    hashes: dict[tuple[object, ...], set[str]] = {}
    for outcome in outcomes:
        hashes.setdefault(outcome.cell.setting, set()).add(outcome.digest)
    return {
        "cells": len(outcomes), "settings": len(hashes), "hashes_of_a_setting_max": max(map(len, hashes.values())),
        "races": sum(outcome.races for outcome in outcomes),
        "failed": sum(bool(outcome.why) for outcome in outcomes), "seconds": round(seconds),
    }  # fmt: skip


def main() -> int:
    """The command line; the exit status is 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every cell, without delays")
    parser.add_argument("--delays", action="store_true", help="a pairwise cover and random cells, with delays")
    parser.add_argument("--cells", type=int, default=100, help="number of the random cells")
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--workers", type=int, default=2, help="cells at a time; one with delays mostly sleeps")
    parser.add_argument("--json", type=Path, help="file to record in, beside the runs that it has")
    given = parser.parse_args()
    ranks = [int(each) for each in given.ranks.split(",")]
    every = product(ranks)
    parts: dict[str, list[Cell]] = {}
    if given.full:
        parts["full product"] = every
    if given.delays:
        parts["pairwise cover with delays"] = covering = delayed(cover(every, Cell.axes))
        drawn = random.Random(0).choices(every, k=given.cells)
        parts["random cells with delays"] = delayed(drawn, 1 + len(covering))
        several = [replace(cell, own_collectives=True) for cell in every if cell.ranks > 1]
        parts["pairwise cover with delays and collectives of the device"] = delayed(cover(several, Cell.axes))
    failed = 0
    for name, cells in parts.items():
        if not cells:
            continue
        print(f"{name}: {len(cells)} cells", flush=True)
        began = time.monotonic()
        outcomes = run_all(cells, workers=given.workers)
        figures = summary(outcomes, time.monotonic() - began)
        print(f"{name}: {figures}", flush=True)
        failed += figures["failed"]
        if given.json is not None:
            _record(given.json, f"{name}, {given.ranks} ranks", figures, outcomes)
    return int(failed > 0)


def _record(path: Path, name: str, figures: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    """Write a run into the file, in place of one of the same name."""
    runs = json.loads(path.read_text())["runs"] if path.exists() else {}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent
    )
    runs[name] = {
        "command": f"python -m tests.accelerator_matrix {' '.join(sys.argv[1:])}",
        "commit": commit.stdout.strip(), "date": date.today().isoformat(),
        "machine": f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, no accelerator",
        "torch": torch.__version__, "steps": STEPS, **figures,
        "hashes": {
            " ".join(map(str, outcome.cell.setting)): outcome.digest
            for outcome in sorted(outcomes, key=lambda each: str(each.cell)) if not outcome.why
        },
        "failures": [asdict(outcome) for outcome in outcomes if outcome.why],
    }  # fmt: skip
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
