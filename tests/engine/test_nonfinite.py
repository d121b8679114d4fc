"""A gradient that is not finite reaches no weight: the step is skipped and counted, and training goes on without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import StateError


def start(folder: Path, *, stage: int, tier: str, dtype: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(3)])
    home = {"device": tier, "nvme_path": str(folder)}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": home, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_param"] = home
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
    }
    if dtype != "fp32":
        config[dtype] = {"enabled": True, **({"initial_scale_power": 8, "hysteresis": 1} if dtype == "fp16" else {})}
    engine, *_ = infinity.initialize(model=model, config=config)
    return engine


def snapshot(engine: Any) -> list[Tensor]:
    states = [infinity.state(param) for param in engine.module.parameters()]
    return [value for state in states for value in (state.master, state.exp_avg, state.exp_avg_sq)]


def step(engine: Any, seed: int, poison: float | None = None) -> None:
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[engine.config.compute_dtype]
    loss = engine(inputs.to(dtype)).float().square().mean()
    engine.backward(loss if poison is None else loss * poison)
    engine.step()


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "nvme")])
def test_a_bad_step_leaves_no_trace(tmp_path: Path, stage: int, tier: str, dtype: str, poison: float) -> None:
    with start(tmp_path, stage=stage, tier=tier, dtype=dtype) as engine:
        step(engine, 1)
        before, rate = snapshot(engine), engine.get_lr()
        step(engine, 2, poison=poison)
        assert not engine.was_step_applied()
        assert engine.skipped_steps == 1
        assert engine.get_global_grad_norm() == float("inf")
        assert engine.get_lr() == rate
        assert all(map(torch.equal, before, snapshot(engine)))
        step(engine, 3)
        assert engine.was_step_applied()
        after = snapshot(engine)
    with start(tmp_path, stage=stage, tier=tier, dtype=dtype) as engine:
        step(engine, 1)
        step(engine, 3)
        # fp16 has halved its scale, a power of two: the same bits unless a gradient was denormal.
        assert all(map(torch.equal, after, snapshot(engine)))


def test_the_loss_scale_follows_the_table(tmp_path: Path) -> None:
    with start(tmp_path, stage=3, tier="cpu", dtype="fp16") as engine:
        seen = []
        for seed, poison in enumerate([None, float("inf"), None, float("nan"), float("inf"), None]):
            step(engine, seed, poison=poison)
            seen.append(engine.loss_scale)
        assert seen == [256, 128, 128, 64, 32, 32]
        assert engine.skipped_steps == 3


def test_fp16_refuses_a_backward_without_its_scale(tmp_path: Path) -> None:
    with start(tmp_path, stage=3, tier="cpu", dtype="fp16") as engine:
        engine(torch.randn(4, 16).half()).float().mean().backward()
        with pytest.raises(StateError, match=r"engine\.backward\(loss\)"):
            engine.step()
