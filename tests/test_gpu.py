"""What only an accelerator can show: placements on a real device, and pinned memory of exact size."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine"),
]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(nn.Embedding(50, 64), *blocks, nn.Linear(64, 50))


def train(param: str, optimizer: str, folder: Path, steps: int = 5) -> tuple[str, Any]:
    """sha256 over masters and moments after some steps in bf16, and the engine's memory report."""
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": str(folder)},
            "offload_optimizer": {"device": optimizer, "nvme_path": str(folder)},
            "stage3_param_persistence_threshold": 0,
        },
    }
    engine, *_ = infinity.initialize(model=build(), config=config)
    generator = torch.Generator().manual_seed(1)
    with engine:
        for _ in range(steps):
            tokens = torch.randint(0, 50, (4, 32), generator=generator).to(engine.device)
            loss = nn.functional.cross_entropy(engine(tokens).float().view(-1, 50), tokens.view(-1))
            engine.backward(loss)
            engine.step()
        digest = hashlib.sha256()
        for weight in engine.module.parameters():
            state = infinity.state(weight)
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                digest.update(getattr(state, kind).numpy())
        return digest.hexdigest(), engine.memory()


def test_nine_placements_give_one_result(tmp_path: Path) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    tiers = ("none", "cpu", "nvme")
    digests = {train(param, optimizer, tmp_path)[0] for param in tiers for optimizer in tiers}
    assert len(digests) == 1


def test_cpu_memory_is_pinned_to_the_byte(tmp_path: Path) -> None:
    _, report = train("cpu", "cpu", tmp_path, steps=1)
    held = sum(report.now["cpu"].values())
    assert held <= report.pinned <= 1.02 * held + (2 << 20)
