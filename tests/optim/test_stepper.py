"""The stepper's state: what may follow what."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StateError
from infinity.optim.stepper import StepperState
from infinity.optim.sub_group_update import SubGroupUpdater


def test_no_gradients_arrive_inside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that does is an error, not a wrong norm; the step itself goes on and ends."""
    seen: list[StepperState] = []
    update = SubGroupUpdater.update

    def meddling(self: SubGroupUpdater, *arguments: Any) -> None:
        seen.append(engine._runtime.stepper._state)
        with pytest.raises(StateError, match="from stepping to accumulating"):
            engine._runtime.stepper.on_accumulated(0, [True], final=True)
        update(self, *arguments)

    monkeypatch.setattr(SubGroupUpdater, "update", meddling)
    config = {"train_batch_size": 1, "overlap": False, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with infinity.initialize(model=nn.Linear(2, 2), config=config)[0] as engine:
        assert engine._runtime.stepper._state is StepperState.IDLE
        engine.backward(engine(torch.ones(1, 2)).sum())
        assert engine._runtime.stepper._state is StepperState.ACCUMULATING
        engine.step()
        assert engine._runtime.stepper._state is StepperState.IDLE
    assert seen == [StepperState.STEPPING] * len(seen) != []
