"""Claim: seeing a run costs at most 2 % of a step: the breakdown of its time, a monitor, norms by parameter.

    python benchmarks/seeing.py [--model llama] [--steps 8] [--batch 2] [--positions 128] [--folder DIR]

Trains a Llama (134 M parameters, bf16) with everything on NVMe. Steps take turns: with nothing, with the breakdown and
a CSV monitor that writes every step, and with engine.get_grad_norms() asked for after the step. Medians of whole steps
scatter by more than the limit on a shared machine, so that what the calls themselves take is measured beside them and
is what the claim is about; a span's cost is counted for every span of a step. Ends with 1 where a claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from support import models
from support.machine import describe, median
from support.table import Table, claim
from support.training import ADAM, CLIP
from support.with_infinity import build

from infinity.base import trace
from infinity.config import load_config
from infinity.observability.progress import StepProgress, WallClock

LIMIT = 0.02
MODES = ("nothing", "breakdown and CSV", "norms by parameter")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--folder", help="folder on the drive")
    given = parser.parse_args()
    print(describe())
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = {
            "contender": "infinity:nvme", "dtype": "bf16", "model": given.model, "batch": given.batch,
            "positions": given.positions, "folder": folder, "clip": CLIP, "adam": ADAM,
        }  # fmt: skip
        sys.exit(report(*measure(build(options)._engine, options, given.steps, Path(folder))))


def measure(
    engine: Any, options: dict[str, Any], steps: int, folder: Path
) -> tuple[dict[str, list[float]], dict[str, list[float]], int]:
    """By mode, seconds of steps and of the calls that the mode adds to them; and the spans of a step, at most."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    calls: dict[str, list[float]] = {mode: [] for mode in MODES}

    def step(index: int) -> None:
        loss = models.loss_of(engine(**models.batch(options, 0, index)))
        engine.backward(loss)
        engine.step()

    with engine:
        for index in range(5):
            step(index)
        for index in range(steps * len(MODES)):
            mode = MODES[index % len(MODES)]
            with seen(engine, folder, calls[mode]) if mode == MODES[1] else nullcontext():
                began = time.perf_counter()
                step(index)
                if mode == MODES[2]:
                    timed(engine.get_grad_norms, calls[mode])()
                seconds[mode].append(time.perf_counter() - began)
        with engine.timeline() as timeline:
            step(0)
    return seconds, calls, sum(len(lane.bars) for lane in timeline.lanes if lane.flat)


@contextmanager
def seen(engine: Any, folder: Path, into: list[float]) -> Iterator[None]:
    """The engine as one whose configuration asks for the breakdown and for CSV files at every step."""
    csv = {"enabled": True, "output_path": str(folder), "job_name": "run"}
    config = load_config({"csv_monitor": csv, "steps_per_print": 1, "wall_clock_breakdown": True})
    progress = StepProgress(
        config, engine._runtime.store.ledger, rank=0, data_size=1, accelerator=engine._runtime.device.is_accelerator
    )
    progress.stepped = timed(progress.stepped, into)  # type: ignore[method-assign]
    try:
        with patch.object(engine, "_runtime", replace(engine._runtime, progress=progress)):
            yield
            print(f"  {engine.step_times()}")
    finally:
        progress.close()


def timed(call: Any, into: list[float]) -> Any:
    """The same call, whose seconds are noted."""

    def run(*arguments: Any, **named: Any) -> Any:
        began = time.perf_counter()
        value = call(*arguments, **named)
        into.append(time.perf_counter() - began)
        return value

    return run


def span_seconds(count: int = 100_000) -> float:
    """What a span costs while somebody counts."""
    clock = WallClock()
    began = time.perf_counter()
    for _ in range(count):
        with trace.span(trace.WAIT, "nothing"):
            pass
    seconds = time.perf_counter() - began
    clock.close()
    return seconds / count


def report(seconds: dict[str, list[float]], calls: dict[str, list[float]], spans: int) -> int:
    """The figures and the claims; 1 where one does not hold."""
    plain, each = median(seconds[MODES[0]]), span_seconds()
    print(f"a step has at most {spans} spans, each {each * 1e9:.0f} ns while the tally runs")
    table = Table("step ms:.1f", "against nothing:+.2%", "calls ms:.2f", "cost:.3%")
    cost = {mode: (median(found) if found else 0.0) / plain for mode, found in calls.items()}
    cost[MODES[1]] += spans * each / plain
    for mode in MODES:
        whole = median(seconds[mode])
        table.row(mode, whole * 1e3, whole / plain - 1, cost[mode] * plain * 1e3, cost[mode])
    for mode in MODES[1:]:
        claim(f"{mode}: at most {LIMIT:.0%} of a step", cost[mode] <= LIMIT)
    return int(max(cost.values()) > LIMIT)


if __name__ == "__main__":
    main()
