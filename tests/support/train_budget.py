"""A program: 59 M parameters trained in bf16 under a budget of memory, every device left to the budget.

    python -m tests.support.train_budget BUDGET NVME_DIR

Prints one JSON line: sha256 over the masters and moments, where the states live, what is planned in memory, and the
most resident memory since before there was a model, above what the process had then.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.memory.tiers.pinned import trim
from infinity.plan.types import Kind, Tier


class Stack(nn.Module):
    """Residual layers of 4 M parameters each."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x.float().square().mean()


def train(budget: int, folder: str, *, width: int, layers: int, steps: int) -> dict[str, Any]:
    """Train a few steps and return the facts to print."""
    device = {"device": "auto", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "gradient_clipping": 1.0, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "memory": {"cpu": {"max_bytes": budget}},
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
    }  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Stack(width, layers)
    torch.set_default_dtype(torch.float32)
    engine, *_ = infinity.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(1)
    digest = hashlib.sha256()
    for _ in range(steps):
        loss = engine(torch.randn(2, width, generator=generator).bfloat16())
        engine.backward(loss)
        engine.step()
        digest.update(loss.detach().numpy().tobytes())
    held = engine.plan.nbytes_by_tier()
    result = {
        "numel": engine.plan.numel, "states": engine.plan.homes(Kind.STATES), "params": engine.plan.homes(Kind.PARAM),
        "planned": held[Tier.GPU] + held[Tier.CPU], "nvme": held[Tier.NVME], "peak": peak_nbytes(),
    }  # fmt: skip
    for param in model.parameters():
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            digest.update(getattr(state, kind).numpy())
    engine.close()
    return {**result, "sha256": digest.hexdigest()}


def peak_nbytes() -> int:
    """Return the peak resident memory in bytes since `forget_peak`."""
    return _status("VmHWM")


def forget_peak() -> int:
    """Reset the peak and return the resident memory in bytes."""
    trim()
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def main(budget: int, folder: str) -> None:
    torch.set_num_threads(1)
    # Memory that the libraries take once: their code, threads and rings.
    train(10**9, folder, width=64, layers=2, steps=1)
    before = forget_peak()
    result = train(budget, folder, width=1024, layers=14, steps=2)
    print(json.dumps({**result, "peak": result["peak"] - before}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
