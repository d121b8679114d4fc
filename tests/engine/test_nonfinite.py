"""A gradient that is not finite reaches no weight: the step is skipped and counted, and training goes on without it."""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.errors import NonFiniteError, StateError
from tests.support.cells import covered


class Poison(torch.autograd.Function):
    """Identity whose gradient has one element that is not finite."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[-1] = float("nan")
        return grad


class Poisoned(nn.Linear):
    """A layer that spoils the gradient of its own weight, and no other, while `on`."""

    on = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, Poison.apply(self.weight) if self.on else self.weight, self.bias)


def start(folder: Path | str, *, stage: int, tier: str, dtype: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Poisoned(16, 16), nn.Linear(16, 16))
    home = {"device": tier, "nvme_path": str(folder)}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": home, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_param"] = home
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": zero,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        **options,
    }
    if dtype != "fp32":
        scale = {"initial_scale_power": 8, "hysteresis": 1} if dtype == "fp16" else {}
        config.setdefault(dtype, {"enabled": True, **scale})
    engine, *_ = infinity.initialize(model=model, config=config)
    return engine


def snapshot(engine: Any) -> list[Tensor]:
    """Weights and moments of every parameter, and the steps that each has taken."""
    states = [infinity.state(param) for param in engine.module.parameters()]
    values = [value for state in states for value in (state.master, state.exp_avg, state.exp_avg_sq)]
    return [*values, torch.tensor(list(engine._runtime.step.steps.values()))]


def step(engine: Any, seed: int, poison: float | None = None) -> None:
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[engine.config.compute_dtype]
    loss = engine(inputs.to(dtype)).float().square().mean()
    engine.backward(loss if poison is None else loss * poison)
    engine.step()


@pytest.mark.parametrize(
    *covered(
        stage=[0, 1, 2, 3], tier=["none", "cpu", "nvme"], dtype=["fp32", "bf16", "fp16"], poison=[math.nan, math.inf]
    )
)
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


def poisoned(stage: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Poisoned(16, 16), nn.Linear(16, 16))
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **options,
    }  # fmt: skip
    return infinity.initialize(model=model, config=config)[0]


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What infinity warns about in the block."""
    said: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    handler = Keep(logging.WARNING)
    logging.getLogger("infinity").addHandler(handler)
    yield said
    logging.getLogger("infinity").removeHandler(handler)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_warning_names_the_parameter(stage: int) -> None:
    with poisoned(stage) as engine, warnings() as said:
        step(engine, 1)
        engine.module[1].on = True
        step(engine, 2)
        engine.module[1].on = False
        step(engine, 3)
        assert engine.skipped_steps == 1
    (text,) = said
    assert "step 1 skipped: 1 gradient elements are not finite, first in the gradient of 1.weight;" in text


def where(rank: int, world: int, cases: list[tuple[int, str]]) -> list[list[str]]:
    """What rank 0 warns about when rank 1 has a bad gradient, or a bad loss."""
    found = []
    for stage, what in cases:
        with poisoned(stage) as engine, warnings() as said:
            step(engine, rank)
            engine.module[1].on = rank == 1 and what == "gradient"
            step(engine, 2 + rank, poison=float("inf") if rank == 1 and what == "loss" else None)
            engine.module[1].on = False
            step(engine, 4 + rank)
            assert engine.skipped_steps == 1
        found.append(said)
    return found


def test_the_warning_names_the_rank_where_it_can(rank_pools: Any) -> None:
    everyone = rank_pools[2].run(where, [(1, "gradient"), (3, "gradient"), (3, "loss")])
    local, summed, loss = (said[0] for said in everyone[0])
    assert "of 1.weight, on rank 1;" in local
    assert "of 1.weight, in the sum over ranks (every loss is finite);" in summed
    # Backward begins at the end of the model: there it appeared first.
    assert "of 2.bias, on rank 1, where the loss is not finite;" in loss
    assert everyone[1] == [[], [], []], "only rank 0 says it"


SLICE = [(0, "none", "fp32"), (1, "cpu", "bf16"), (2, "nvme", "fp16"), (3, "none", "fp32"), (3, "nvme", "bf16")]


def test_a_bad_gradient_on_one_rank_is_skipped_by_all(rank_pools: Any, tmp_path: Path) -> None:
    """Some cells of tests/engine/nonfinite_matrix.py."""
    matrix = importlib.import_module("tests.engine.nonfinite_matrix")
    assert rank_pools[2].run(matrix.run, str(tmp_path), SLICE) == [[[]] * len(SLICE)] * 2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_too_many_skips_end_in_an_error(tmp_path: Path, dtype: str) -> None:
    with start(tmp_path, stage=3, tier="cpu", dtype=dtype, max_skipped_steps=3) as engine:
        step(engine, 1)
        before = snapshot(engine)
        for seed in range(2):
            step(engine, seed, poison=float("nan"))
        with pytest.raises(NonFiniteError, match=r"3 steps in a row .* up to step 3: the gradient of 2\.bias is"):
            step(engine, 9, poison=float("nan"))
        assert all(map(torch.equal, before, snapshot(engine)))
        assert engine.skipped_steps == 3
        step(engine, 3)
        assert engine.was_step_applied(), "the program may go on with better data"


def test_fp16_refuses_a_backward_without_its_scale(tmp_path: Path) -> None:
    with start(tmp_path, stage=3, tier="cpu", dtype="fp16") as engine:
        engine(torch.randn(4, 16).half()).float().mean().backward()
        with pytest.raises(StateError, match=r"engine\.backward\(loss\)"):
            engine.step()
