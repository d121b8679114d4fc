"""Interrupts at random moments of forward, backward, step, save and load: each verb is whole, not begun, or refused.

    python -m tests.engine.interrupt_matrix [--interrupts 500] [--seed 0] [--ranks 1,2] [--json FILE]

Ways to interrupt: Ctrl-C (SIGINT with Python's own handler), twice at once, and a timer whose handler raises. Prints
what became of the interrupts, by tier, ranks and way; benchmarks/results/interrupts.json has it. AssertionError where
weights, moments, counters or rates are not those of an uninterrupted run after as many steps, or where a verb does not
refuse although another one does.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

import infinity
from infinity.engine import Engine
from infinity.errors import DesyncError, InfinityError, StateError
from tests.support.models import MLP
from tests.support.oracle import join
from tests.support.spawn import RankPool

TIERS: dict[str, dict[str, Any]] = {
    "device": {"stage": 3},
    "cpu, stage 1": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
    "nvme": {"stage": 3, "offload_param": {"device": "nvme"}, "offload_optimizer": {"device": "nvme"}},
    "nvme, in backward": {"stage": 3, "offload_optimizer": {"device": "nvme"}},
}
WAYS = ("SIGINT", "SIGINT twice", "timer")
STEPS, MICRO = 5, 2


class Late(Exception):
    """What the timer's handler raises."""


def make(folder: str, tier: str) -> Engine:
    """An engine of a small model, with a schedule and two micro-batches a step."""
    torch.manual_seed(0)
    zero = {
        key: {**value, "nvme_path": folder} if isinstance(value, dict) and value["device"] == "nvme" else value
        for key, value in TIERS[tier].items()
    }  # fmt: skip
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": MICRO, "log_level": "error",
        "gradient_clipping": 0.0 if "backward" in tier else 1.0, "watchdog_seconds": 30,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}, "zero_optimization": {**zero, "sub_group_size": 3000},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
    }  # fmt: skip
    return infinity.initialize(model=MLP(), config=config)[0]


def work(engine: Engine, rank: int, folder: str) -> None:
    """One optimizer step from where the engine stands, a checkpoint, and a load of it."""
    step = engine.global_steps
    for micro in range(MICRO):
        generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
        x, y = (torch.randn(2, 32, generator=generator) for _ in range(2))
        engine.backward(engine(x, y))
        engine.step()
    if step == 2:
        engine.save_checkpoint(folder, "saved")
        engine.load_checkpoint(folder, "saved")


def standing(engine: Engine) -> str:
    """A hash of what this rank has of the run: weights, moments, counters, step counts, rates."""
    found = hashlib.sha256()
    for param in engine.module.parameters():
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            found.update(infinity.state(param).local(kind).numpy().tobytes())
    told = (engine.micro_steps, engine.global_samples, engine.get_lr(), engine.optimizer.step_counts)
    found.update(repr((told, engine.lr_scheduler.state_dict())).encode())
    return found.hexdigest()


@contextlib.contextmanager
def interrupt(way: str, seconds: float) -> Iterator[None]:
    """A block that is interrupted after a time; what that raises passes through."""

    def on_timer(*_: object) -> None:
        if way == "timer":
            raise Late
        for _ in range(1 + (way == "SIGINT twice")):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGALRM, on_timer)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-4))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def verbs(engine: Engine, folder: str) -> dict[str, Callable[[], Any]]:
    """Every verb of the loop, and those about checkpoints."""
    x = torch.zeros(2, 32)
    return {
        "forward": lambda: engine(x, x), "backward": lambda: engine.backward(torch.zeros((), requires_grad=True)),
        "step": engine.step, "zero_grad": engine.zero_grad, "save": lambda: engine.save_checkpoint(folder, "refused"),
        "export": lambda: engine.export(folder), "offload": engine.offload_states, "synchronize": engine.synchronize,
        "load": lambda: engine.load_checkpoint(folder, "saved"), "resume": lambda: engine.resume(folder),
    }  # fmt: skip


def judge(engine: Engine, expected: list[str], before: int, folder: str) -> str:
    """What became of the verb that was interrupted. AssertionError where that is nothing of what it may be."""
    reason = engine._runtime.health.refusal
    if reason:
        for name, verb in verbs(engine, folder).items():
            if name in ("load", "resume") and not engine._runtime.health.under_way:
                continue
            said = "nothing"
            with contextlib.suppress(StateError):
                try:
                    verb()
                except StateError as error:
                    said = str(error)
                    raise
            assert reason in said and "engine." in said, f"{name}, where others refuse with {reason}: {said}"
        return "refused"
    engine.zero_grad()
    engine.store.check()
    assert standing(engine) == expected[engine.global_steps], f"other values after step {engine.global_steps}"
    return "whole" if engine.global_steps > before else "not begun"


def trial(
    rank: int, world: int, folder: str, tier: str, way: str, chosen: random.Random, expected: tuple[float, list[str]]
) -> str:  # fmt: skip
    """Interrupt one run; an engine that goes on is trained to its end. Returns what became of the interrupt."""
    (seconds, hashes), found, before = expected, "did not come", 0
    engine = make(folder, tier)
    try:
        try:
            with interrupt(way, chosen.random() * seconds):
                while engine.global_steps < STEPS:
                    before = engine.global_steps
                    work(engine, rank, folder)
        except (KeyboardInterrupt, Late):
            found = "came"
        except Exception as error:
            # Of a rank that the other one has left; or what follows from a verb that was cut short: Python has dropped
            # what came inside a finalizer, or something else is raised while that passes through.
            if not engine._runtime.health.refusal and not (world > 1 and isinstance(error, InfinityError)):
                raise
            found = "left by the other"
        if found == "came" or engine._runtime.health.refusal:
            try:
                found = judge(engine, hashes, before, folder)
            except DesyncError:
                assert world > 1
                found = "left by the other"
        if world == 1 and found != "refused":
            while engine.global_steps < STEPS:
                work(engine, rank, folder)
            assert standing(engine) == hashes[STEPS], "other values at the end"
    finally:
        engine._close(at_once=True)
    return found


def reference(rank: int, folder: str, tier: str) -> tuple[float, list[str]]:
    """The seconds of a run without interrupts, and where it stands after each step."""
    with make(folder, tier) as engine:
        hashes, began = [standing(engine)], time.perf_counter()
        for _ in range(STEPS):
            work(engine, rank, folder)
            hashes.append(standing(engine))
        return time.perf_counter() - began, hashes


def trials(rank: int, world: int, folder: str, tier: str, way: str, seed: int, count: int) -> Counter[str]:
    """Interrupt as many runs. With several ranks, both of them: each at a moment of its own."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if world > 1:
        join(world)
    expected, chosen = reference(rank, folder, tier), random.Random(1000 * seed + rank)
    return Counter(trial(rank, world, folder, tier, way, chosen, expected) for _ in range(count))


def main() -> None:
    """Run all; see the module's text."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--interrupts", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--json", type=Path, help="file for the rows")
    asked = parser.parse_args()
    worlds = [int(each) for each in asked.ranks.split(",")]
    rows, cells = [], len(TIERS) * len(WAYS) * len(worlds)
    for world in worlds:
        with RankPool(world) as pool:
            for tier, way in itertools.product(TIERS, WAYS):
                with tempfile.TemporaryDirectory() as folder:
                    count = -(-asked.interrupts // cells)
                    found = pool.run(trials, folder, tier, way, asked.seed, count, timeout=1800)
                rows.append({"tier": tier, "ranks": world, "way": way, "became": sum(found, Counter())})
                print(json.dumps(rows[-1]), flush=True)
    total = sum((row["became"] for row in rows), Counter())
    print(f"{total.total()} interrupts, none with wrong values: {dict(total)}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"measured": f"{datetime.now():%Y-%m-%d}", "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
