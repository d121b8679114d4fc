"""The state of a step: what may follow what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StateError
from infinity.step.optimizer_step import OptimizerStep, StepState
from infinity.step.update import SubGroupUpdater


@pytest.mark.parametrize("managed", [True, False])
def test_gradients_are_final_in_the_last_micro_step(monkeypatch: pytest.MonkeyPatch, managed: bool) -> None:
    """Also after a backward whose gradients were dropped, and after an evaluation. Without a count each may be last."""
    seen: list[bool] = []
    landed = OptimizerStep.landed

    def noting(self: OptimizerStep, unit: int, arrived: Any, *, final: bool) -> None:
        seen.append(final)
        landed(self, unit, arrived, final=final)

    monkeypatch.setattr(OptimizerStep, "landed", noting)
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "overlap": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "managed_gradient_accumulation": managed,
    }  # fmt: skip
    with infinity.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.zero_grad()
        for _ in range(6):
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.eval()
            engine(torch.ones(1, 2))
            engine.train()
            engine.step()
    assert seen == ([False, False, False, True, False, False, True] if managed else [True] * 7)


def test_no_gradients_arrive_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does is an error, not a wrong norm; the step itself goes on and ends."""
    seen: list[StepState] = []
    update = SubGroupUpdater.update

    def meddling(self: SubGroupUpdater, *arguments: Any) -> None:
        seen.append(engine._runtime.step.state)
        with pytest.raises(StateError, match="from stepping to accumulating"):
            engine._runtime.step.landed(0, [True], final=True)
        update(self, *arguments)

    monkeypatch.setattr(SubGroupUpdater, "update", meddling)
    config = {"train_batch_size": 1, "overlap": False, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with infinity.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
        assert engine._runtime.step.state is StepState.IDLE
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert engine._runtime.step.state is StepState.ACCUMULATING
        engine.step()
        assert engine._runtime.step.state is StepState.IDLE
    assert seen == [StepState.STEPPING] * len(seen) != []
