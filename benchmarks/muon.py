"""Claim: a step of Muon from NVMe takes what is longer, the drive or torch's products alone, and moves at most 18.5
bytes a parameter.

    python benchmarks/muon.py [--sides 256,2048] [--million 128] [--rounds 5] [--folder DIR] [--json FILE]

A model of square matrices in bf16 with everything on NVMe, each of them in a process of its own, by turns: Muon's step;
the step of SGD with momentum, which moves the same bytes and computes nearly nothing; and torch's iteration alone on as
many matrices, with as many threads. A step is timed from the end of backward until the drive has everything. Bytes are
those of a whole step with its forward and backward (/proc/self/io).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from support.machine import describe, io_nbytes, median
from support.table import Table

RUNS = ("Muon", "SGD", "torch")
LIMIT, BYTES = 1.15, 18.5


def child(run: str, side: int, million: int, folder: str, steps: int) -> None:
    """Print the seconds of each step, and bytes a parameter and step."""
    import torch
    from torch import Tensor, nn

    count = max(round(million * 1e6 / side**2), 1)
    if run == "torch":
        zeropower = torch.optim._muon._zeropower_via_newtonschulz  # type: ignore[attr-defined]
        matrices = [torch.randn(side, side) for _ in range(min(count, 32))]
        seconds = []
        for _ in range(2):
            began = time.perf_counter()
            for each in matrices:
                zeropower(each, (3.4445, -4.7750, 2.0315), 5, 1e-7)
            seconds.append((time.perf_counter() - began) * count / len(matrices))
        print(json.dumps([seconds, 0.0]))
        return
    import infinity

    class Block(nn.Module):
        def __init__(self, matrices: int) -> None:
            super().__init__()
            self.inner = nn.ModuleList(nn.Linear(side, side, bias=False) for _ in range(matrices))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.inner:
                x = x + torch.tanh(layer(x))
            return x

    torch.manual_seed(0)
    each = max(count // 32, 1)
    model = nn.Sequential(*(Block(each) for _ in range(count // each))).bfloat16()
    device = {"device": "nvme", "nvme_path": folder}
    params = {"lr": 1e-3} if run == "Muon" else {"lr": 1e-3, "momentum": 0.95}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "optimizer": {"type": run, "params": params},
        "zero_optimization": {
            "stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 4_200_000, "offload_param": device,
            "offload_optimizer": device,
        },
    }  # fmt: skip
    engine = infinity.initialize(model=model, config=config)[0]
    x, seconds, moved = torch.randn(1, side).bfloat16(), [], []
    for _ in range(steps):
        before = sum(io_nbytes())
        engine.backward(engine(x).float().square().mean())
        began = time.perf_counter()
        engine.step()
        engine.synchronize()
        engine.store.settle()
        seconds.append(time.perf_counter() - began)
        moved.append((sum(io_nbytes()) - before) / engine.plan.numel)
    engine.close()
    print(json.dumps([seconds[1:], median(moved[1:])]))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", default="256,2048")
    parser.add_argument("--million", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--json", type=Path, help="file to record in")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        run, side, folder = given.child
        child(run, int(side), given.million, folder, given.steps)
        return
    print(describe())
    table = Table(*(f"{run}:.2f" for run in RUNS), "of the longer:.3f", "bytes:.2f")
    rows = []
    for side in map(int, given.sides.split(",")):
        found: dict[str, list[float]] = {run: [] for run in RUNS}
        moved: list[float] = []
        for _ in range(given.rounds):
            for run in RUNS:
                with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                    command = [sys.executable, __file__, "--child", run, str(side), folder, "--million",
                               str(given.million), "--steps", str(given.steps)]  # fmt: skip
                    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                seconds, nbytes = json.loads(said.splitlines()[-1])
                found[run].append(median(seconds))
                moved += [nbytes] if run == "Muon" else []
        ratios = [one / max(*others) for one, *others in zip(*(found[run] for run in RUNS), strict=True)]
        table.row(f"{side} x {side}", *(median(found[run]) for run in RUNS), median(ratios), median(moved))
        what = f"{given.million} M parameters in matrices of {side}"
        rows += [
            {"what": f"{what}: of the longer of drive and products", "figures": [round(median(ratios), 3)],
             "limit": f"<= {LIMIT}"},
            {"what": f"{what}: bytes a parameter and step", "figures": [round(median(moved), 2)],
             "limit": f"<= {BYTES}"},
            {"what": f"{what}: s of Muon, the drive, torch's products",
             "figures": [round(median(found[run]), 2) for run in RUNS]},
        ]  # fmt: skip
    if given.json is not None:
        given.json.write_text(
            json.dumps({
                "topic": "Muon from NVMe",
                "claim": "A step of Muon takes what is longer, drive or products, and moves 18.5 bytes a parameter.",
                "command": "python benchmarks/muon.py --json benchmarks/results/muon.json",
                "machine": describe(), "date": f"{date.today()}",
                "how": f"bf16, everything on NVMe, two threads; medians of {given.rounds} rounds by turns.",
                "rows": rows,
            }, indent=1) + "\n"
        )  # fmt: skip


if __name__ == "__main__":
    main()
