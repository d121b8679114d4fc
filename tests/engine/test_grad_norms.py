"""Norms by parameter are torch's on every stage, tier and number of ranks, and leave the step alone."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StateError
from infinity.ops.adam import GradStats
from infinity.plan.shards import Replica
from infinity.step import norms
from infinity.step.norms import Norms, StepFlags
from tests.support.oracle import Case, join, settings, train

ByName = list[dict[str, float]]
STEPS = 2


def expected(world: int, accumulation: int) -> ByName:
    """The first step of plain torch, all ranks' data: later ones depend on the optimizer."""
    model = Case().model()
    for micro in range(accumulation):
        for rank in range(world):
            for loss in Case().losses(model, rank, micro):
                (loss / (accumulation * world)).backward()
    return [{name: float(param.grad.norm()) for name, param in model.named_parameters() if param.grad is not None}]


class Asked(Case):
    """Asks after every step."""

    def __init__(self) -> None:
        self.norms: ByName = []

    def after_step(self, call: nn.Module, step: int, access: Any) -> list[torch.Tensor]:
        self.norms.append(call.get_grad_norms())
        total = math.sqrt(math.fsum(norm**2 for norm in self.norms[-1].values()))
        assert total == pytest.approx(call.get_global_grad_norm(), rel=1e-9), "the parts of the global norm"
        return []


def cells(rank: int, world: int, folder: str, options: list[dict[str, Any]]) -> list[Norms]:
    join(world)
    found = []
    for each in options:
        case = Asked()
        asked = train(case, settings(folder, **each), rank=rank, steps=STEPS).digest
        if world == 1:
            silent = train(Case(), settings(folder, **each), rank=rank, steps=STEPS).digest
            assert asked == silent, "asking changes nothing"
        found.append(case.norms)
    return found


OPTIONS: list[dict[str, Any]] = [
    {"stage": 0, "accumulation": 2},
    {"stage": 1, "optimizer": "cpu", "accumulation": 2},
    {"stage": 2, "optimizer": "nvme", "accumulation": 2, "clip": 0.05},
    {"stage": 3, "param": "nvme", "optimizer": "nvme", "accumulation": 2},
    # Every matrix in several tiles, of which each is a unit.
    {"stage": 3, "param": "cpu", "optimizer": "nvme", "accumulation": 2, "zero": {"tile_parameters": 200}},
]


@pytest.mark.parametrize("world", [1, 2])
def test_norms_by_parameter_are_torchs(rank_pools: Any, tmp_path: Path, world: int) -> None:
    everyone = rank_pools[world].run(cells, str(tmp_path), OPTIONS)
    (oracle,) = expected(world, 2)
    assert "fixed.weight" not in oracle, "frozen"
    for options, found in zip(OPTIONS, everyone[0], strict=True):
        assert found[0].keys() == oracle.keys(), options
        assert found[0] == pytest.approx(oracle, rel=1e-5, abs=1e-9), options
    assert all(norms == everyone[0] for norms in everyone), "the same bits on every rank"
    assert everyone[0][1][-1] == pytest.approx(everyone[0][3][-1], rel=1e-4), "later steps agree, too"


def test_what_had_no_gradient_is_left_out_and_what_is_not_finite_shows(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"used": nn.Linear(8, 8), "idle": nn.Linear(8, 8)})
    config = {"train_micro_batch_size_per_gpu": 4, "fp16": {"enabled": True, "initial_scale_power": 8}}
    with infinity.initialize(model=model, config=config)[0] as engine:
        x = torch.randn(4, 8).half()
        with pytest.raises(StateError, match=r"ask for them after step\(\)"):
            engine.get_grad_norms()
        engine.backward(engine.module["used"](x).float().square().mean())
        with pytest.raises(StateError, match="before the next backward"):
            engine.get_grad_norms()
        engine.step()
        norms = engine.get_grad_norms()
        assert set(norms) == {"used.weight", "used.bias"}
        total = math.sqrt(sum(norm**2 for norm in norms.values()))
        assert total == pytest.approx(engine.get_global_grad_norm(), rel=1e-9), "unscaled"
        poison = torch.ones(8)
        poison[3] = math.inf
        used = engine.module["used"]
        engine.backward(((x @ used.weight.T).float() * poison).sum() + used.bias.float().sum())
        engine.step()
        assert not engine.was_step_applied()
        assert engine.get_grad_norms() == {"used.weight": math.inf, "used.bias": pytest.approx(math.sqrt(8))}


def norms_beside_padding(rank: int, world: int) -> tuple[float, float]:
    """(the global norm, that of all parameters) where another unit has left its gradients between two of a unit's."""
    join(world)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 64))
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}}
    with infinity.initialize(model=model, config=config)[0] as engine:
        engine.backward(engine(torch.ones(1, 5)).sum())
        engine.step()
        return engine.get_global_grad_norm(), math.hypot(*engine.get_grad_norms().values())


def test_what_another_unit_leaves_in_the_padding_of_a_sum_is_no_gradient(rank_pools: Any) -> None:
    for whole, of_parameters in rank_pools[2].run(norms_beside_padding):
        assert whole == pytest.approx(of_parameters, rel=1e-9)


# Of each unit: whether it is partitioned over the data axis, and what the ranks of a tensor group have of it.
UNITS = [(True, Replica.NONE), (False, Replica.NONE), (True, Replica.SAME), (False, Replica.PARTIAL)]


def test_a_norm_over_two_axes_counts_once_what_several_ranks_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(unit: int, data: int, tensor: int) -> GradStats:
        """What a rank has measured: numbers whose sum in fp64 depends on the order, the same where the unit is."""
        parted, replica = UNITS[unit]
        here = 1 + unit + 10 * (data if parted else 0) + 100 * (tensor if replica is Replica.NONE else 0)
        return GradStats(here / 7 * 10.0 ** (here % 5), here)

    def on_rank(data: int, tensor: int, rows: list[list[float]] | None) -> tuple[Any, list[float]]:
        """(the result, what the rank has told)."""
        said: list[list[float]] = []
        monkeypatch.setattr(norms, "agree_on_numbers", lambda mine, *_, **__: (said.append(mine), rows or [mine])[1])
        monkeypatch.setattr(Norms, "by_unit", lambda *_: {unit: squares(unit, data, tensor) for unit in range(4)})
        plan = SimpleNamespace(
            pipeline=None, told_elsewhere=frozenset(),
            layouts=[SimpleNamespace(slots=(), trainable=True, replica=replica) for _, replica in UNITS],
            placement=SimpleNamespace(units=[SimpleNamespace(parts=2 if parted else 1) for parted, _ in UNITS]),
        )  # fmt: skip
        groups = SimpleNamespace(
            world=SimpleNamespace(size=4), data=SimpleNamespace(index=data), tensor=SimpleNamespace(index=tensor)
        )
        mine = Norms(plan, None, groups)  # type: ignore[arg-type]
        return mine.of_all_ranks(StepFlags(preempted=(data, tensor) == (1, 0)), []), said[0]

    places = [(data, tensor) for data in range(2) for tensor in range(2)]
    rows = [on_rank(*place, None)[1] for place in places]
    distinct = {squares(unit, *place) for unit in range(4) for place in places}
    assert len(distinct) == 4 + 2 + 2 + 1
    total = math.fsum(stats.sum_of_squares for stats in distinct), sum(stats.nonfinite_count for stats in distinct)
    for order in (rows, rows[::-1]):
        for place in places:
            assert on_rank(*place, order)[0] == (*total, StepFlags(preempted=True))


class Sometimes(nn.Module):
    """Two layers, of which a step may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor, *, count: int) -> torch.Tensor:
        for layer in self.layers[:count]:
            x = layer(x)
        return x.square().sum()


def test_a_unit_that_a_step_leaves_out_adds_nothing_to_its_norm() -> None:
    """What the step before has left in its partition is not counted again."""
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW", "params": {"lr": 1e-14}}, "gradient_clipping": 1.0}
    norms_of: list[list[float]] = []
    for counts in ((1, 1), (2, 1)):
        torch.manual_seed(0)
        with infinity.initialize(model=Sometimes(), config=config)[0] as engine:
            found = []
            for count in counts:
                engine.backward(engine(torch.ones(1, 4), count=count))
                engine.step()
                found.append(engine.get_global_grad_norm())
            norms_of.append(found)
    assert norms_of[0][1] == norms_of[1][1] != norms_of[1][0]
