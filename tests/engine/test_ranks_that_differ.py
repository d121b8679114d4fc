"""Ranks with other numbers, with another configuration, or that drop gradients alone: all raise, and name what differs.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import infinity
from infinity.errors import ConfigError, DesyncError
from tests.support.models import MLP
from tests.support.oracle import join

STEP: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "log_level": "error",
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "watchdog_seconds": 60,
}  # fmt: skip
# The group's key that rank 1 changes, what it gives it, and what every rank is told of both.
NUMBERS = {
    "lr": (2e-3, "param_groups[0]['lr']", "0.001", "0.002"),
    "weight_decay": (0.5, "param_groups[0]['weight_decay']", "0.0", "0.5"),
    "betas": ((0.8, 0.9), "param_groups[0]['betas']", "(0.9, 0.999)", "(0.8, 0.9)"),
}
CLIP = ("gradient_clipping", "1.0", "0.5")


def made(rank: int, **options: Any) -> infinity.Engine:
    torch.manual_seed(0)
    return infinity.initialize(model=MLP(), config={**STEP, **options})[0]


def micro(engine: infinity.Engine, rank: int) -> None:
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(rank))
    engine.backward(engine(x, x))


def told(call: Any) -> str:
    with pytest.raises(DesyncError) as caught:
        call()
    return str(caught.value)


def differ(rank: int, world: int) -> list[tuple[str, str]]:
    """What each rank is told, case by case."""
    join(world)
    found = []
    with made(rank, zero_optimization={"stage": 3}) as engine:
        for key, (value, *_) in NUMBERS.items():
            own = engine.optimizer.param_groups[0][key]
            micro(engine, rank)
            engine.step()
            micro(engine, rank)
            if rank == 1:
                engine.optimizer.param_groups[0][key] = value
            found.append((key, told(engine.step)))
            engine.optimizer.param_groups[0][key] = own
            engine.zero_grad()
        # Nothing of that was a step, and the run goes on.
        for _ in range(2):
            micro(engine, rank)
            engine.step()
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
    with made(rank, gradient_clipping=0.5 if rank else 1.0, gradient_accumulation_steps=1) as engine:
        micro(engine, rank)
        found.append(("clipping", told(engine.step)))
    with made(rank, zero_optimization={"stage": 1}) as engine:
        micro(engine, rank)
        engine.step()
        if rank == 1:
            engine.zero_grad()

        def on() -> None:
            for _ in range(2):
                micro(engine, rank)
                engine.step()

        found.append(("zero_grad", told(on)))
    return found


def test_numbers_that_enter_a_step_are_named_where_ranks_differ(rank_pools):
    for found in rank_pools[2].run(differ):
        said = dict(found)
        for key, (_, *words) in [*NUMBERS.items(), ("clipping", (None, *CLIP))]:
            assert all(word in said[key] for word in words) and "engine.zero_grad()" in said[key], said[key]
        assert "engine.zero_grad(), 0 bytes" in said["zero_grad"], said["zero_grad"]


def refused(rank: int, world: int, opened: bool, bad: int) -> tuple[str, str, float]:
    if opened:
        join(world)
    began = time.monotonic()
    with pytest.raises((ConfigError, DesyncError)) as caught:
        made(rank, **({"train_micro_batch_size_per_gpu": -1} if rank == bad else {}))
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(("opened", "bad"), [(True, 1), (False, 1), (False, 0)])
def test_a_configuration_that_one_rank_refuses_ends_the_others_within_seconds(rank_pools, opened, bad):
    found = rank_pools[2].run(refused, opened, bad)
    assert found[bad][0] == "ConfigError"
    kind, text, seconds = found[1 - bad]
    assert kind == "DesyncError" and seconds < 10, found
    assert f"rank {bad} has raised ConfigError in reading its configuration: " in text
    assert "train_micro_batch_size_per_gpu: -1" in text
