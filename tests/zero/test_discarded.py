"""Forwards whose backward never comes: what follows is as lean and as well scheduled as without them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.engine import Engine
from tests.support.oracle import join, settings

LAYERS = 6


def stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(LAYERS)])


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))


def engine_of(folder: Path | str, model: nn.Module, **options: Any) -> Engine:
    zero = {"stage3_max_live_parameters": 200, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 100}
    engine, *_ = infinity.initialize(model=model, config=settings(folder, zero=zero, **options))
    assert len(engine.units) == LAYERS
    return engine


def most_gradients(engine: Engine) -> list[int]:
    """In its only element the most units that had gradients at once, as seen when one is collected."""
    most, collect = [0], engine._runtime.gradients._collect

    def counted(unit: Any) -> None:
        alive = sum(any(param.grad is not None for param in other.params) for other in engine.units)
        most[0] = max(most[0], alive)
        collect(unit)

    engine._runtime.gradients._collect = counted  # type: ignore[method-assign]
    return most


def discard(rank: int, world: int, folder: str) -> list[int]:
    """Most units with gradients in a backward, by what became of a forward before it."""
    join(world)
    found = []
    with engine_of(folder, stack(), param="cpu", optimizer="cpu") as engine:
        most = most_gradients(engine)
        for habit in ("none", "loss", "outputs", "kept"):
            most[0] = 0
            if habit == "loss":
                assert float(engine(inputs(1)).sum().detach())
            kept = [engine(inputs(seed)) for seed in (2, 3)] if habit in ("outputs", "kept") else []
            if habit == "outputs" or rank:
                # With "kept" a second rank drops its graphs all the same, as a collector that runs there might.
                kept.clear()
            engine.backward(engine(inputs(4 + rank)).square().sum())
            found.append(most[0])
            engine.step()
            del kept
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_are_collected_unit_by_unit_after_a_discarded_forward(
    rank_pools: Any, tmp_path: Path, world: int
) -> None:
    for found in rank_pools[world].run(discard, str(tmp_path)):
        # A graph that is still there, on any rank, may see its backward yet.
        assert found == [found[0], found[0], found[0], LAYERS]
        assert found[0] <= 2


def test_what_is_kept_may_still_be_used(tmp_path: Path) -> None:
    plain = stack()
    model = copy.deepcopy(plain)
    with engine_of(tmp_path, model, param="cpu", optimizer="cpu") as engine:
        for call, backward in ((plain, Tensor.backward), (engine, engine.backward)):
            first, second = call(inputs(1)).sum(), call(inputs(2)).square().sum()
            call(inputs(3))
            backward(second)
            backward(first)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.state(ours).grad, theirs.grad)


@pytest.mark.parametrize("habit", ["evaluation with gradients", "nothing requires a gradient"])
def test_a_pass_ends_without_its_backward(tmp_path: Path, habit: str) -> None:
    model = stack()
    if habit == "nothing requires a gradient":
        model.requires_grad_(False)
    with engine_of(tmp_path, model, param="nvme", optimizer="nvme") as engine:
        fetched = 0
        prefetch = engine.store.prefetch

        def counted(*keys: Any) -> Any:
            nonlocal fetched
            fetched += len(keys)
            return prefetch(*keys)

        engine.store.prefetch = counted  # type: ignore[method-assign]
        if habit == "evaluation with gradients":
            engine.eval()
        found = []
        for seed in range(4):
            fetched = 0
            engine(inputs(seed))
            found.append(fetched)
        assert found[2] == found[3] >= LAYERS - 1, found
        assert engine.coordinator.mismatches <= 1


def test_training_in_eval_mode_follows_its_schedule(tmp_path: Path) -> None:
    with engine_of(tmp_path, stack(), param="cpu", optimizer="cpu", accumulation=4) as engine:
        engine.eval()
        for seed in range(4):
            engine.backward(engine(inputs(seed)).square().sum())
            engine.step()
        assert engine.coordinator.mismatches <= 1
        assert len(engine.coordinator.prefetcher._schedules["eval"]) == 2 * LAYERS
