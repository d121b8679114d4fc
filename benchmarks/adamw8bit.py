"""Claim: with moments in 8 bits a drive-bound step moves at most 14.5 bytes a parameter, is 1.6 times as fast as with
fp32 moments, and after 300 steps of the demo's model the held-out loss is the same to 0.01.

    python benchmarks/adamw8bit.py [--limits 0,1] [--rounds 5] [--loss-steps 300] [--folder DIR] [--json FILE]

The drive is used as it is, and held to 1 GB/s of reads and as many of writes (root and cgroup v1), which a consumer's
drive keeps up: one of 3 GB/s beside two cores is not what bounds the step with 8 bits alone.

A model of square matrices in bf16 with everything on NVMe and a tiny batch, AdamW8bit and AdamW each in a process of
its own, by turns. A step is a whole one, until the drive has everything; its bytes are those of /proc/self/io. Then
examples/train_lm.py with either, from the same weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from support.machine import describe, io_nbytes, median
from support.table import Table

RUNS = ("AdamW8bit", "AdamW")
FASTER, BYTES, APART = 1.6, 14.5, 0.01
SIDE = 2048
ROOT = Path(__file__).parents[1]


def child(run: str, million: int, folder: str, steps: int) -> None:
    """Print the seconds of each step, and bytes a parameter and step."""
    import torch
    from torch import Tensor, nn

    import infinity

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(SIDE, SIDE, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.inner(x))

    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(max(round(million * 1e6 / SIDE**2), 1)))).bfloat16()
    device = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "optimizer": {"type": run, "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "offload_param": device, "offload_optimizer": device,
        },
    }  # fmt: skip
    engine = infinity.initialize(model=model, config=config)[0]
    x, seconds, moved = torch.randn(1, SIDE).bfloat16(), [], []
    for _ in range(steps):
        before, began = sum(io_nbytes()), time.perf_counter()
        engine.backward(engine(x).float().square().mean())
        engine.step()
        engine.synchronize()
        engine.store.settle()
        seconds.append(time.perf_counter() - began)
        moved.append((sum(io_nbytes()) - before) / engine.plan.numel)
    engine.close()
    print(json.dumps([seconds[1:], median(moved[1:])]))


@contextmanager
def limited(rate: float, folder: str) -> Iterator[list[str]]:
    """The beginning of a command that runs where the drive of a folder is held to `rate` GB/s; nothing for 0."""
    if not rate:
        yield []
        return
    device = os.stat(folder).st_dev
    group = Path("/sys/fs/cgroup/blkio") / f"infinity-{os.getpid()}"
    group.mkdir()
    try:
        for way in ("read", "write"):
            line = f"{os.major(device)}:{os.minor(device)} {int(rate * 1e9)}"
            (group / f"blkio.throttle.{way}_bps_device").write_text(line)
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
    finally:
        group.rmdir()


def held_out(run: str, steps: int, folder: str) -> float:
    """The held-out loss of the demo's model after `steps` steps."""
    config = json.loads((ROOT / "examples" / "configs" / "demo.json").read_text())
    config["optimizer"] = {"type": run, "params": {**config["optimizer"]["params"], "weight_decay": 0.01}}
    file = Path(folder) / f"{run}.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, str(ROOT / "examples" / "train_lm.py"), "--config", str(file), "--steps", str(steps),
               "--nvme-path", folder, "--run-dir", f"{folder}/{run}"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, text=True)
    (result,) = Path(f"{folder}/{run}").glob("*.json")
    return float(json.loads(result.read_text())["held_out_after"])


def _losses(steps: int, parent: str | None) -> list[dict[str, Any]]:
    """The rows of the held-out losses."""
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        losses = [held_out(run, steps, folder) for run in RUNS]
    print(f"held-out loss after {steps} steps: {losses[0]:.4f} and {losses[1]:.4f} nats per byte")
    return [
        {"what": f"held-out loss of the demo's model after {steps} steps: apart",
         "figures": [round(abs(losses[0] - losses[1]), 4)], "limit": f"<= {APART}"},
        {"what": f"held-out loss after {steps} steps, 8 bits and fp32", "figures": [round(loss, 4) for loss in losses]},
    ]  # fmt: skip


def _steps(given: argparse.Namespace, limit: float) -> list[dict[str, Any]]:
    """The rows of steps on a drive that is held to so many GB/s, or (0) not at all."""
    seconds: dict[str, list[float]] = {run: [] for run in RUNS}
    moved: dict[str, list[float]] = {run: [] for run in RUNS}
    for _ in range(given.rounds):
        for run in RUNS:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder, limited(limit, folder) as within:
                command = [*within, sys.executable, __file__, "--child", run, folder, "--million", str(given.million),
                           "--steps", str(given.steps)]  # fmt: skip
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            each, nbytes = json.loads(said.splitlines()[-1])
            seconds[run].append(median(each))
            moved[run].append(nbytes)
    faster = median([slow / fast for fast, slow in zip(*(seconds[run] for run in RUNS), strict=True)])
    drive = f" held to {limit:g} GB/s" if limit else ""
    print(f"drive{drive}: {faster:.3f} times as fast")
    table = Table("seconds a step:.2f", "bytes a parameter:.2f")
    for run in RUNS:
        table.row(run, median(seconds[run]), median(moved[run]))
    what = f"{given.million} M parameters, bf16, everything on NVMe{drive}"
    rows: list[dict[str, Any]] = [
        {"what": f"{what}: times as fast as fp32 moments", "figures": [round(faster, 3)]},
        {"what": f"{what}: s a step of 8 bits, fp32", "figures": [round(median(seconds[run]), 2) for run in RUNS]},
    ]  # fmt: skip
    if limit:
        rows[0]["limit"] = f">= {FASTER}"
        return rows
    return [
        *rows,
        {"what": f"{what}: bytes a parameter and step, 8 bits", "figures": [round(median(moved[RUNS[0]]), 2)],
         "limit": f"<= {BYTES}"},
        {"what": f"{what}: bytes a parameter and step, fp32", "figures": [round(median(moved[RUNS[1]]), 2)]},
    ]  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--loss-steps", type=int, default=300, help="0: leave the losses out")
    parser.add_argument("--limits", default="0,1", help="GB/s that the drive may move; 0: what it can")
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--json", type=Path, help="file to record in")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        child(given.child[0], given.million, given.child[1], given.steps)
        return
    print(describe())
    rows = [row for limit in map(float, given.limits.split(",")) for row in _steps(given, limit)]
    rows += _losses(given.loss_steps, given.folder) if given.loss_steps else []
    if given.json is not None:
        given.json.write_text(
            json.dumps({
                "topic": "Moments in 8 bits",
                "claim": "Moments in 8 bits move 14.5 bytes a parameter and step, and train as fp32 ones do.",
                "command": "python benchmarks/adamw8bit.py --json benchmarks/results/adamw8bit.json",
                "machine": describe(), "date": f"{date.today()}",
                "how": f"bf16, everything on NVMe, a batch of one; medians of {given.rounds} rounds by turns.",
                "rows": rows,
            }, indent=1) + "\n"
        )  # fmt: skip


if __name__ == "__main__":
    main()
