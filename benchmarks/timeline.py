"""Claim: recording a timeline costs at most 2 % of a step, and nothing when it is off.

    python benchmarks/timeline.py [--model llama] [--steps 20] [--batch 2] [--positions 128] [--keep PATH]

Trains a Llama (134 M parameters, bf16) with everything on NVMe; every second step is recorded. Prints the median step
of both, how much of the recorded time the program's lane explains, and what a call costs while nobody records. --keep
writes the last step's page and, beside it, its Chrome trace.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from support import models
from support.machine import describe, median
from support.table import claim
from support.training import ADAM, CLIP
from support.with_infinity import build

from infinity.base import trace
from infinity.observability.timeline import Timeline

LIMIT = 0.02


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("llama", "tiny"), default="llama")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--positions", type=int, default=128)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--keep", help="where to write the last step's page")
    given = parser.parse_args()
    print(describe())
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        options = {
            "contender": "infinity:nvme", "dtype": "bf16", "model": given.model, "batch": given.batch,
            "positions": given.positions, "folder": folder, "clip": CLIP, "adam": ADAM,
        }  # fmt: skip
        report(*measure(build(options)._engine, options, given.steps), given.keep)


def measure(engine: Any, options: dict[str, Any], steps: int) -> tuple[dict[str, list[float]], list[Timeline]]:
    """Seconds of steps with and without a recording, in turns, and the recordings. The first steps warm up."""
    seconds: dict[str, list[float]] = {"off": [], "on": []}
    timelines: list[Timeline] = []

    def step(index: int) -> None:
        loss = models.loss_of(engine(**models.batch(options, 0, index)))
        engine.backward(loss)
        engine.step()

    with engine:
        for index in range(5):
            step(index)
        for index in range(2 * steps):
            began = time.perf_counter()
            if index % 2:
                with engine.timeline() as timeline:
                    step(index)
                timelines.append(timeline)
            else:
                step(index)
            seconds["on" if index % 2 else "off"].append(time.perf_counter() - began)
    return seconds, timelines


def report(seconds: dict[str, list[float]], timelines: list[Timeline], keep: str | None) -> None:
    """The figures, the claims, and the last step in words."""
    off, on = median(seconds["off"]), median(seconds["on"])
    print(f"a step: {off * 1e3:.1f} ms, recorded {on * 1e3:.1f} ms ({on / off - 1:+.2%}), {len(timelines)} of each")
    claim(f"a recording costs at most {LIMIT:.0%}", on / off - 1 <= LIMIT)
    bars = median(float(sum(len(lane.bars) for lane in timeline.lanes)) for timeline in timelines)
    print(f"bars in a step: {bars:.0f}; a call while nobody records: {idle_ns():.0f} ns")
    explained = []
    for timeline in timelines:
        found = timeline.summary()
        explained.append((found["compute"] + found["copy"] + sum(found["waits"].values())) / found["seconds"])
    print(f"computing, copying and waiting explain {median(explained):.1%} of a step, at least {min(explained):.1%}")
    claim("within 5 % of the step", min(explained) >= 0.95)
    print(timelines[-1])
    if keep is not None:
        timelines[-1].save(Path(keep).with_suffix(".html"))
        timelines[-1].save(Path(keep).with_suffix(".json"))


def idle_ns(count: int = 200_000) -> float:
    """Nanoseconds of a span that nobody records, the loop around it included."""
    began = time.perf_counter_ns()
    for _ in range(count):
        with trace.span(trace.WAIT, "nothing"):
            pass
    return (time.perf_counter_ns() - began) / count


if __name__ == "__main__":
    main()
