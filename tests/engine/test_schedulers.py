"""Schedulers that a program gives: the engine steps them, and refuses at the start what it cannot step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import infinity
from infinity.errors import ConfigError
from tests.support.models import mlp, vector_batch

CONFIG = {
    "train_micro_batch_size_per_gpu": 4, "log_level": "error", "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}  # fmt: skip


class NeedsLoss:
    """A program's own, with an argument that has a name only."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, *, loss: float) -> None:
        self.optimizer.param_groups[0]["lr"] *= loss


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (ReduceLROnPlateau, ["ReduceLROnPlateau.step(metrics", "missing a required argument: 'metrics'"]),
        (partial(ReduceLROnPlateau, patience=1), ["ReduceLROnPlateau.step(metrics", "after engine.step()"]),
        (NeedsLoss, ["NeedsLoss.step(*, loss", "client_state"]),
        (lambda optimizer: None, ["NoneType has no step()"]),
    ],
    ids=["class", "factory", "own", "nothing"],
)
def test_a_scheduler_that_step_cannot_call_is_refused_before_anything_is_trained(given, words):
    model = mlp()
    before = weights(model)
    with pytest.raises(ConfigError) as refused:
        infinity.initialize(model=model, config=CONFIG, lr_scheduler=given)
    for word in words:
        assert word in str(refused.value)
    assert all(map(torch.equal, weights(model), before))


def test_an_instance_is_refused_before_the_model_is_touched():
    model = mlp()
    scheduler = ReduceLROnPlateau(torch.optim.AdamW(model.parameters(), lr=1e-2))
    pointers = [param.data_ptr() for param in model.parameters()]
    with pytest.raises(ConfigError, match="metrics"):
        infinity.initialize(model=model, config=CONFIG, lr_scheduler=scheduler)
    assert [param.data_ptr() for param in model.parameters()] == pointers


def test_the_way_that_the_refusal_names_lowers_the_rate():
    engine, optimizer, *_ = infinity.initialize(model=mlp(), config=CONFIG)
    with engine:
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        rates = []
        for step in range(3):
            engine.backward(engine(**vector_batch(0, step)))
            engine.step()
            scheduler.step(1.0)
            rates.append(engine.get_lr()[0])
    assert rates == [1e-2, 5e-3, 2.5e-3]


def test_a_class_is_a_factory():
    engine, optimizer, _, scheduler = infinity.initialize(
        model=mlp(), config=CONFIG, lr_scheduler=torch.optim.lr_scheduler.ConstantLR
    )
    with engine:
        assert scheduler.optimizer is optimizer
        for step in range(6):
            engine.backward(engine(**vector_batch(0, step)))
            engine.step()
        assert scheduler.last_epoch == 6
