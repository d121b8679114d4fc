"""Reading and setting a parameter's states: every stage, tier and world size against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.zero import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)

HYPER = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.01}
CASES = [(0, "none"), *((stage, tier) for stage in (1, 2, 3) for tier in ("none", "cpu", "nvme"))]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 7))
    model[2].bias.requires_grad_(False)
    return model


def loss_of(model: Any, step: int) -> Tensor:
    return model(torch.randn(5, 13, generator=torch.Generator().manual_seed(step))).square().mean()


def config(stage: int, tier: str, folder: str) -> dict[str, Any]:
    home = {"device": tier, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 100}
    if stage:
        zero["offload_optimizer"] = home
    if stage == 3:
        zero["offload_param"] = home
    return {
        "train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": HYPER}, "zero_optimization": zero,
    }  # fmt: skip


class Twin:
    """Plain torch, and the largest difference that was seen."""

    def __init__(self) -> None:
        self.model = build()
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], **HYPER)
        self.worst = 0.0

    def compare(self, ours: Tensor, theirs: Tensor) -> None:
        assert ours.shape == theirs.shape
        self.worst = max(self.worst, float((ours - theirs).abs().max()))


def visit(rank: int, world_size: int, stage: int, tier: str, folder: str) -> dict[str, Any]:
    twin = Twin()
    engine, *_ = infinity.initialize(model=build(), config=config(stage, tier, folder))
    with engine:
        for step in range(2):
            engine.backward(loss_of(engine, step))
            loss_of(twin.model, step).backward()
            pairs = list(zip(engine.module.parameters(), twin.model.parameters(), strict=True))
            trained = [(ours, theirs) for ours, theirs in pairs if theirs.requires_grad]
            for ours, theirs in trained:
                twin.compare(safe_get_full_grad(ours), theirs.grad)
            # A gradient that is set is the one that is stepped, whatever it was.
            ours, theirs = trained[step]
            theirs.grad.mul_(-2).add_(0.01)
            safe_set_full_grad(ours, theirs.grad)
            twin.compare(infinity.state(ours).grad, theirs.grad)
            safe_set_local_grad(ours, safe_get_local_grad(ours) * 0.5)
            theirs.grad.mul_(0.5)
            engine.step()
            twin.optimizer.step()
            twin.optimizer.zero_grad()
            for ours, theirs in trained:
                twin.compare(safe_get_full_fp32_param(ours), theirs.detach())
                for key in ("exp_avg", "exp_avg_sq"):
                    twin.compare(safe_get_full_optimizer_state(ours, key), twin.optimizer.state[theirs][key])
            for ours, theirs in pairs:
                with torch.no_grad():
                    theirs.add_(0.125)
                safe_set_full_fp32_param(ours, theirs.detach())
                safe_set_local_fp32_param(ours, safe_get_local_fp32_param(ours) * 2)
                with torch.no_grad():
                    theirs.mul_(2)
                with infinity.read(ours):
                    twin.compare(ours.detach().clone(), theirs.detach())
            for ours, theirs in trained:
                moments = twin.optimizer.state[theirs]
                for key in ("exp_avg", "exp_avg_sq"):
                    moments[key].mul_(3).add_(1e-3)
                    safe_set_full_optimizer_state(ours, moments[key], key)
                    safe_set_local_optimizer_state(ours, safe_get_local_optimizer_state(ours, key) * 0.5, key)
                    moments[key].mul_(0.5)
        weight = engine.module[2].weight
        frozen = engine.module[2].bias
        nothing = [safe_get_full_grad(frozen), safe_get_local_grad(frozen)]
        nothing.append(safe_get_full_optimizer_state(frozen, "exp_avg"))
        engine.store.check()
        return {
            "worst": twin.worst, "nothing": nothing, "whole": infinity.state(weight).master,
            "mine": safe_get_local_fp32_param(weight), "parts": engine.plan.placement.units[0].parts,
        }  # fmt: skip


@pytest.mark.parametrize(("stage", "tier"), CASES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_states_are_those_of_torch_and_what_is_set_is_stepped(
    world_size: int, stage: int, tier: str, tmp_path: Path, rank_pools: Any
) -> None:
    results = rank_pools[world_size].run(visit, stage, tier, str(tmp_path))
    for result in results:
        assert result["worst"] <= 1e-6
        assert result["nothing"] == [None, None, None]
        assert torch.equal(result["whole"], results[0]["whole"])
    own = [result["mine"] for result in results] if results[0]["parts"] > 1 else [results[0]["mine"]]
    assert torch.equal(torch.cat(own), results[0]["whole"].flatten())
    assert (results[0]["parts"] > 1) == (stage > 0 and world_size > 1)


def test_an_unknown_state_and_a_wrong_size_are_named(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=build(), config=config(3, "cpu", str(tmp_path)))
    with engine:
        weight = engine.module[0].weight
        with pytest.raises(ValueError, match=r"no 'momentum': .* its optimizer keeps exp_avg, exp_avg_sq"):
            safe_get_full_optimizer_state(weight, "momentum")
        with pytest.raises(ValueError, match=r"0\.weight: this rank has 390 elements, the new value 3"):
            safe_set_local_fp32_param(weight, torch.zeros(3))
        with pytest.raises(ValueError, match="has shape"):
            safe_set_full_grad(weight, torch.zeros(3))


def test_what_another_optimizer_keeps_has_its_own_name(tmp_path: Path) -> None:
    sgd = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
    engine, *_ = infinity.initialize(model=build(), config={**config(3, "nvme", str(tmp_path)), "optimizer": sgd})
    with engine:
        weight = engine.module[0].weight
        engine.backward(loss_of(engine, 0))
        grad = safe_get_full_grad(weight)
        engine.step()
        assert torch.equal(infinity.state(weight).momentum_buffer, grad), "the first momentum is the gradient"
        infinity.state(weight).momentum_buffer = torch.ones_like(grad)
        assert torch.equal(safe_get_full_optimizer_state(weight, "momentum_buffer"), torch.ones_like(grad))
        with pytest.raises(ValueError, match=r"no 'exp_avg': .* keeps momentum_buffer"):
            infinity.state(weight).exp_avg  # noqa: B018
