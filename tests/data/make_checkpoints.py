"""Small checkpoints of a tied model, as the present code writes them: `python -m tests.data.make_checkpoints FOLDER`.

What stands in `tests/data/checkpoints/v1` was written by the last commit whose format is version 1, and is never
written again: a later version has a folder of its own beside it.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import infinity
from tests.support.spawn import run_ranks

CELLS = [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]


class Tied(nn.Module):
    """An embedding whose weight is the head's too, a layer between, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(24, 8)
        self.inner = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = torch.tanh(self.inner(self.words(ids)))
        return nn.functional.cross_entropy(self.head(x).float(), ids)


def config(dtype: str, world: int, **zero: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 4 * world, "train_micro_batch_size_per_gpu": 4, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}},
        "bf16": {"enabled": dtype == "bf16"},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }  # fmt: skip


def batch(rank: int, step: int) -> Tensor:
    return torch.randint(24, (4,), generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, rank: int, first: int, last: int) -> float:
    loss = torch.zeros(())
    for step in range(first, last):
        loss = engine(batch(rank, step))
        engine.backward(loss)
        engine.step()
    return float(loss.detach())


def digests(engine: Any) -> dict[str, str]:
    """Of masters and moments in full, by name."""
    found: dict[str, str] = {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            value = getattr(state, kind).contiguous().numpy()
            found[f"{name} {kind}"] = hashlib.sha256(value.tobytes()).hexdigest()[:16]
    return found


def write(rank: int, world: int, dtype: str, folder: str) -> None:
    engine, *_ = infinity.initialize(model=Tied(), config=config(dtype, world))
    with engine:
        train(engine, rank, 0, 3)
        engine.save_checkpoint(folder, tag="step3", client_state={"epoch": 1, "best": 0.5})
        expected = digests(engine)
        loss = train(engine, rank, 3, 5)
        if rank == 0:
            Path(folder, "expected.json").write_text(json.dumps({"digests": expected, "loss": loss}, indent=1) + "\n")


if __name__ == "__main__":
    for dtype, world in CELLS:
        run_ranks(write, world, dtype, str(Path(sys.argv[1]) / f"{dtype}-{world}"))
