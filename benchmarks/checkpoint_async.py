"""Claim: training hardly notices a checkpoint that is saved behind it.

    python benchmarks/checkpoint_async.py [--folder DIR] [--numel N] [--tokens T] [--tier cpu] [--rounds 18]

Perceptrons of 700 M parameters in bf16 on one rank, 12 bytes a parameter. A round is three steps without a save, an
asynchronous save with the steps that run until it is complete, and a save in the foreground. The stall of a save is the
time of its call plus what the steps beside it take beyond the median of the steps without a save; the median over the
rounds is compared with the median save in the foreground. A step's forward and backward must last about as long as the
drive needs for the checkpoint, because the optimizer step changes every byte and waits for what is not saved by then.
The save computes its checksums as it writes: about 0.08 s of one core for a GB, which slows the steps down where all
cores compute.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checkpoint import WIDTH, Layers
from support.machine import describe, median
from support.table import Table, claim

import infinity
from infinity.checkpoint.format import complete

SLOWEST_MAX = 1.5
STALL_MAX = 0.10
# Steps without a save in a round.
PLAIN_STEPS = 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--numel", type=int, default=700_000_000)
    parser.add_argument("--tokens", type=int, default=1408)
    parser.add_argument("--rounds", type=int, default=18)
    parser.add_argument("--tier", default="cpu", help="where parameters and states live")
    parser.add_argument("--threads", type=int, help="that compute forward and backward; by default all cores")
    parser.add_argument("--share", type=float, default=1.0, help="checkpoint.bandwidth_share")
    given = parser.parse_args()
    print(describe())
    if given.threads:
        torch.set_num_threads(given.threads)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, _engine(given, folder) as engine:
        found = _measure(engine, Path(folder), given)
    table = Table("GB:.2f", "median s:.4f", "slowest s:.4f", "call s:.3f", "stall s:.2f", "at once s:.3f", name_width=8)
    usual, at_once = median(found["plain"]), median(found["at_once"])
    slowest, stall = max(found["saving"]), median(found["stalls"])
    table.row(given.tier, found["nbytes"] / 1e9, usual, slowest, median(found["calls"]), stall, at_once)
    for name in ("plain", "saving", "stalls", "at_once"):
        print(f"  {name}: " + " ".join(f"{seconds:.2f}" for seconds in found[name]))
    claims = {
        f"slowest step {slowest / usual:.2f} <= {SLOWEST_MAX} of the median": slowest <= SLOWEST_MAX * usual,
        f"stall {stall / at_once:.1%} <= {STALL_MAX:.0%} of a save in the foreground": stall <= STALL_MAX * at_once,
    }
    for text, holds in claims.items():
        claim(text, holds)


def _engine(given: argparse.Namespace, folder: str) -> Any:
    width = WIDTH
    while width > 64 and given.numel < 4 * width * width:
        width //= 2
    place = {"device": given.tier, "pin_memory": False, **({"nvme_path": folder} if given.tier == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "checkpoint": {"bandwidth_share": given.share},
        "zero_optimization": {
            "stage": 3, "offload_param": place, "offload_optimizer": place, "stage3_max_live_parameters": 60_000_000,
            "stage3_prefetch_bucket_size": 20_000_000,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    with infinity.Init(config=config):
        model = Layers(max(round(given.numel / width / width), 1), width)
    given.width = width
    return infinity.initialize(model=model, config=config)[0]


def _measure(engine: Any, folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    batch = torch.randn(given.tokens, given.width, dtype=torch.bfloat16)
    found: dict[str, Any] = {"plain": [], "calls": [], "at_once": []}

    def step() -> float:
        began = time.perf_counter()
        engine.backward(engine(batch))
        engine.step()
        engine.synchronize()
        return time.perf_counter() - began

    def save(name: str, asynchronous: bool) -> float:
        began = time.perf_counter()
        engine.save_checkpoint(folder / name, asynchronous=asynchronous)
        return time.perf_counter() - began

    beside: list[list[float]] = []
    for _ in range(given.rounds + 1):
        found["plain"] += [step() for _ in range(PLAIN_STEPS)]
        found["calls"].append(save("behind", True))
        beside.append([step()])
        while not complete(folder / "behind"):
            beside[-1].append(step())
        engine.finish_saving()
        shutil.rmtree(folder / "behind")
        found["at_once"].append(save("at once", False))
        shutil.rmtree(folder / "at once")
    # The first round warms up.
    beside = beside[1:]
    found = {name: values[1 if name != "plain" else PLAIN_STEPS :] for name, values in found.items()}
    usual = median(found["plain"])
    found["saving"] = [seconds for steps in beside for seconds in steps]
    found["stalls"] = [
        call + sum(seconds - usual for seconds in steps) for call, steps in zip(found["calls"], beside, strict=True)
    ]
    found["nbytes"] = sum(spec.nbytes for spec in engine.plan.partitions if spec.key.kind.value != "grad")
    return found


if __name__ == "__main__":
    main()
