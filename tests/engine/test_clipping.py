"""Clipping by value is torch's, on the averaged gradient and behind clipping by the norm, the same everywhere."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity import log
from infinity.step.norms import clip_factor
from tests.support.oracle import CLIP, Case, difference, reference, settings, train

# Of the averaged gradients, which reach 0.5, some hundred elements lie above it; of the clipped ones too, with NORM.
BOUND = 0.02
NORM = 0.5
STEPS = 4


def compare(rank: int, world: int, folder: str, cells: list[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """(max |dp|, error of the norm, hash) of every cell against clip_grad_norm_ and then clip_grad_value_."""
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    found = []
    for cell in cells:
        clip, accumulation = cell.get("clip", 0.0), cell.get("accumulation", 1)
        config = settings(folder, gradient_clipping_value=BOUND, **cell)
        result = train(Case(), config, rank=rank, steps=STEPS)
        fits = {"world": world, "accumulation": accumulation, "clip": clip, "steps": STEPS}
        weights, norms, _ = difference(result, reference(Case(), bound=BOUND, **fits))
        found.append((weights, norms, result.digest))
    unbounded, *_ = difference(result, reference(Case(), **fits))
    assert unbounded > 1e-4, "the bound bites"
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_bound_is_torchs_on_every_stage_and_tier(rank_pools: Any, tmp_path: Path, world: int) -> None:
    cells: list[dict[str, Any]] = [
        {"stage": 0},
        {"stage": 1, "optimizer": "nvme", "accumulation": 2},
        {"stage": 2, "optimizer": "cpu", "clip": NORM},
        {"stage": 3, "param": "nvme", "optimizer": "nvme", "clip": NORM, "accumulation": 2},
    ]
    for ranks in rank_pools[world].run(compare, str(tmp_path), cells):
        assert all(weights <= 1e-6 and norms <= 1e-5 for weights, norms, _ in ranks), ranks


def digest(folder: Path, tier: str, **options: Any) -> str:
    config = settings(folder, param=tier, optimizer=tier, gradient_clipping_value=BOUND / 8, **options)
    return train(Case(), config, steps=STEPS).digest


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_a_bound_gives_the_same_bits_on_every_tier(tmp_path: Path, dtype: str) -> None:
    seen = {tier: digest(tmp_path, tier, dtype=dtype, clip=CLIP) for tier in ("gpu", "cpu", "nvme")}
    assert len(set(seen.values())) == 1, seen


def test_a_step_that_begins_in_backward_bounds_the_same_elements(tmp_path: Path) -> None:
    early = digest(tmp_path, "nvme", bf16={"enabled": True, "check_grad_overflow": False})
    assert early == digest(tmp_path, "nvme", dtype="bf16")


def test_an_optimizer_of_torchs_takes_bounded_gradients() -> None:
    """Plain SGD with a rate of 1 shows them."""
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    twin, batch = copy.deepcopy(model), torch.randn(4, 16)
    twin(batch).square().mean().backward()
    assert torch.nn.utils.clip_grad_norm_(twin.parameters(), NORM) > NORM
    torch.nn.utils.clip_grad_value_(twin.parameters(), BOUND)
    config = {
        "train_micro_batch_size_per_gpu": 4, "gradient_clipping": NORM, "gradient_clipping_value": BOUND,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }  # fmt: skip
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.backward(engine(batch).square().mean())
        engine.step()
        for param, other in zip(engine.module.parameters(), twin.parameters(), strict=True):
            assert other.grad is not None and float(other.grad.abs().max()) == pytest.approx(BOUND)
            assert (param - (other - other.grad)).abs().max() <= 1e-6


CLIPPERS = {
    "norm": lambda params: nn.utils.clip_grad_norm_(params, 1.0),
    "total norm": lambda params: nn.utils.clip_grad_norm_(list(params), 1.0, foreach=False),
}


@pytest.mark.parametrize("clipper", CLIPPERS)
def test_torchs_clipping_of_partitioned_parameters_is_told_that_the_engine_clips(clipper, monkeypatch, caplog) -> None:
    """Once; whoever else asks for a gradient gets None without a word."""
    monkeypatch.setattr(log, "_said", set())
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    with infinity.initialize(model=model, config={"zero_optimization": zero})[0] as engine:
        caplog.clear()
        engine.backward(engine(torch.randn(4, 8)).mean())
        assert all(param.grad is None for param in model.parameters())
        model.zero_grad()
        assert not caplog.messages
        for _ in range(2):
            CLIPPERS[clipper](model.parameters())
        (said,) = caplog.messages
        assert '"gradient_clipping"' in said and "engine.get_global_grad_norm()" in said
        engine.step()
        assert engine.get_global_grad_norm() > 0


@pytest.mark.parametrize(("norm", "factor"), [(0.5, 1.0), (4.0, 0.5)])
def test_a_norm_within_the_limit_scales_nothing_up(norm: float, factor: float) -> None:
    assert clip_factor(norm, 2.0) == pytest.approx(factor)
