"""fp32 training equals torch.optim.AdamW in one process, whatever the ranks, the stage, the tiers and the model do."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.config import load_config
from infinity.engine import Engine
from infinity.optim.lr import build_scheduler
from tests.engine.cases import CASES, LEAF, Routed
from tests.support.cells import covered, kept
from tests.support.oracle import (
    ADAM,
    CLIP,
    STEPS,
    Case,
    Result,
    SplitBackward,
    difference,
    join,
    reference,
    settings,
    train,
)

# What differs from the oracle: weights absolutely, norms and values seen relatively.
WEIGHTS, NORMS, SEEN = 1e-6, 1e-5, 2e-5
# Where a cell's states live, by turns; that placement does not matter is test_placement_parity's claim.
PLACES = itertools.cycle(
    [("gpu", "gpu"), ("nvme", "nvme"), ("cpu", "nvme"), ("cpu", "cpu"), ("nvme", "gpu")],
)
# Where ranks matter; the others are the same on two.
OF_RANKS = (
    "a layer on one rank only", "experts chosen by rank", "another order each step", "weights alone in their unit",
    "two forwards, two backwards", "evaluation between steps", "read in training", "changed in training",
    "checkpointed together, reentrant",
)  # fmt: skip
WAYS = ("everything awkward", "checkpointed, reentrant", "checkpointed, not reentrant")
# A cell of a table: a label, what is trained, settings.
Cell = tuple[str, str, dict[str, Any]]


def _case(name: str) -> Case:
    return SplitBackward() if name == "split" else CASES[name]()


@functools.cache
def expected(name: str, world: int, accumulation: int, clip: float, steps: int = STEPS) -> Result:
    """The oracle's result: once a process and case, however many cells compare themselves with it."""
    return reference(_case(name), world=world, accumulation=accumulation, clip=clip, steps=steps)


def compare(rank: int, world: int, folder: str, cells: list[Cell], steps: int) -> list[tuple[str, list[float], str]]:
    """(label, differences from the oracle, digest) of each cell. Rank 0 compares, every rank has a digest."""
    join(world)
    found = []
    for label, name, options in cells:
        result = train(_case(name), settings(folder, **options), rank=rank, steps=steps)
        apart = [0.0, 0.0, 0.0]
        if rank == 0:
            oracle = expected(name, world, options.get("accumulation", 1), options.get("clip", 0.0), steps)
            apart = list(difference(result, oracle))
        found.append((label, apart, result.digest))
    return found


def check(rank_pools: Any, folder: Any, world: int, cells: list[Cell], steps: int = STEPS) -> None:
    """All cells on a pool of ranks; the failures are reported together."""
    everyone = rank_pools[world].run(compare, str(folder / "nvme"), cells, steps, timeout=110)
    wrong = [
        f"{label}: weights {apart[0]:.1e}, norms {apart[1]:.1e}, seen {apart[2]:.1e}"
        for label, apart, _ in everyone[0]
        if not (apart[0] <= WEIGHTS and apart[1] <= NORMS and apart[2] <= SEEN)
    ]
    assert not wrong, "\n".join(wrong)
    assert all([row[2] for row in other] == [row[2] for row in everyone[0]] for other in everyone), "ranks disagree"


@pytest.mark.slow
@pytest.mark.parametrize(
    *covered(
        world=(1, 2, 4), stage=(0, 1, 2, 3), accumulation=(1, 4), clip=(0.0, CLIP), name=("everything awkward", "split")
    )
)
def test_training_equals_the_oracle(rank_pools, tmp_path, world, stage, accumulation, clip, name):
    param, optimizer = next(PLACES)
    options = {"stage": stage, "accumulation": accumulation, "clip": clip, "param": param, "optimizer": optimizer}
    check(rank_pools, tmp_path, world, [(f"{name} {options}", name, options)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world", "names"),
    kept(
        [(stage, world, names) for stage in range(4) for world in (1, 2) for names in (tuple(CASES), OF_RANKS)],
        [(3, 1, tuple(CASES)), (2, 2, OF_RANKS), (3, 2, OF_RANKS)],
    ),
    ids=lambda given: len(given) if isinstance(given, tuple) else given,
)
def test_models_of_every_habit_equal_the_oracle(rank_pools, tmp_path, stage, world, names):
    cells = []
    for name in names:
        if stage == 3 and name in ("a layer on one rank only", "weights alone in their unit"):
            # There a layer that only some ranks call belongs in a data-dependent module: "experts chosen by rank".
            continue
        param, optimizer = next(PLACES)
        options = {"stage": stage, "accumulation": 2, "param": param, "optimizer": optimizer, "zero": LEAF}
        cells.append((f"{name} {options}", name, options))
    check(rank_pools, tmp_path, world, cells)


def plain_backward(engine: Engine, loss: Tensor) -> None:
    """autograd's own verb: the program scales for itself."""
    (loss / engine.gradient_accumulation_steps()).backward()


def without_sync(engine: Engine, loss: Tensor) -> None:
    """All but the last micro-step of a step under no_sync, as DDP's users write it."""
    if engine.is_gradient_accumulation_boundary():
        engine.backward(loss)
    else:
        with engine.no_sync():
            engine.backward(loss)


def kept_graph(engine: Engine, loss: Tensor) -> None:
    """Backward twice through one graph, half each."""
    engine.backward(loss / 2, retain_graph=True)
    engine.backward(loss / 2)


BACKWARDS = [plain_backward, without_sync, kept_graph]


def ways_of_backward(
    rank: int, world: int, folder: str, stage: int, names: tuple[str, ...]
) -> list[tuple[float, float, float]]:
    join(world)
    found = []
    for backward in BACKWARDS:
        for name in names:
            options = {"stage": stage, "accumulation": 2, "param": "nvme", "optimizer": "nvme", "clip": CLIP}
            if backward is kept_graph and name == "checkpointed, reentrant":
                # torch itself cannot run a reentrant region's backward twice.
                continue
            result = train(CASES[name](), settings(folder, **options), rank=rank, backward=backward)
            found.append(difference(result, expected(name, world, 2, CLIP)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "world", "names"),
    kept(
        [*((stage, world, WAYS) for stage, world in ((0, 2), (1, 1), (2, 2), (3, 1), (3, 2))), (3, 2, WAYS[:1])],
        [(1, 1, WAYS), (3, 1, WAYS), (3, 2, WAYS[:1])],
    ),
    ids=lambda given: len(given) if isinstance(given, tuple) else given,
)
def test_every_way_of_backward_equals_the_oracle(rank_pools, tmp_path, stage, world, names):
    for rows in rank_pools[world].run(ways_of_backward, str(tmp_path / "nvme"), stage, names):
        assert all(weights <= WEIGHTS and norms <= NORMS for weights, norms, _ in rows), rows


def exponential(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)


def cyclic(optimizer: torch.optim.Optimizer) -> Any:
    """Changes betas, too."""
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[4e-3, 2e-3], total_steps=6)


class WithRates(Routed):
    """Notes the rates after each step, on either side."""

    def after_step(self, call, step, access):
        optimizer = access._optimizer if hasattr(access, "_optimizer") else call.optimizer
        return [torch.tensor([group["lr"] for group in optimizer.param_groups])]


def schedule_given(rank: int, world: int, folder: str) -> list[tuple[str, tuple[float, float, float]]]:
    join(world)
    found = []
    for scheduler in (exponential, cyclic):
        oracle = reference(WithRates(), world=world, scheduler=scheduler)
        config = settings(folder, param="nvme", optimizer="nvme")
        result = train(WithRates(), config, rank=rank, lr_scheduler=scheduler)
        found.append((f"{scheduler.__name__} as a factory", difference(result, oracle)))

        def prepared(model: Any, scheduler: Callable[..., Any] = scheduler) -> dict[str, Any]:
            optimizer = torch.optim.AdamW(Case().groups(model), **ADAM)
            return {"optimizer": optimizer, "lr_scheduler": scheduler(optimizer)}

        result = train(WithRates(), config, rank=rank, prepare=prepared)
        found.append((f"{scheduler.__name__} on the program's own optimizer", difference(result, oracle)))
    return found


@pytest.mark.parametrize("world", kept([1, 2], [1]))
def test_a_torch_scheduler_as_factory_and_as_instance(rank_pools, tmp_path, world):
    for rows in rank_pools[world].run(schedule_given, str(tmp_path / "nvme")):
        wrong = [(label, apart) for label, apart in rows if not (apart[0] <= WEIGHTS and apart[2] <= SEEN)]
        assert not wrong


SCHEDULES: dict[str, dict[str, Any]] = {
    "WarmupLR": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3},
    "WarmupDecayLR": {"warmup_max_lr": 3e-3, "warmup_num_steps": 2, "total_num_steps": 4},
    "WarmupCosineLR": {"warmup_num_steps": 2, "total_num_steps": 4},
    "OneCycle": {"cycle_min_lr": 1e-3, "cycle_max_lr": 4e-3, "cycle_first_step_size": 2, "decay_lr_rate": 0.1},
    "LRRangeTest": {"lr_range_test_min_lr": 1e-3, "lr_range_test_step_size": 2},
}


def schedule_configured(rank: int, world: int, folder: str, kind: str) -> tuple[float, float, float]:
    """The five schedules' formulas are tests/optim/test_lr.py's claim; here is when the engine applies them."""
    join(world)
    section = {"type": kind, "params": SCHEDULES[kind]}
    parsed = load_config({"scheduler": section}).scheduler
    assert parsed is not None

    def same(optimizer: torch.optim.Optimizer) -> Any:
        return build_scheduler(parsed.type, parsed.params.model_dump(), optimizer)

    config = settings(folder, stage=2, optimizer="cpu", scheduler=section, accumulation=2)
    result = train(WithRates(), config, rank=rank)
    return difference(result, reference(WithRates(), world=world, accumulation=2, scheduler=same))


@pytest.mark.parametrize(
    ("kind", "world"),
    kept(
        list(itertools.product(SCHEDULES, (1, 2))), [*((kind, 1) for kind in SCHEDULES if kind != "OneCycle"),
                                                    ("OneCycle", 2)]
    ),
)
def test_a_schedule_of_the_configuration(rank_pools, tmp_path, kind, world):
    for weights, _, rates in rank_pools[world].run(schedule_configured, str(tmp_path / "nvme"), kind):
        assert weights <= WEIGHTS
        assert rates <= SEEN


def test_what_has_no_gradient_is_left_alone(tmp_path):
    """Not even weight decay moves a parameter that was never used, or one that is frozen; as in torch."""
    name = "a layer never used"
    before = {key: value.detach().clone() for key, value in CASES[name]().model().named_parameters()}
    for stage in (0, 1, 2, 3):
        result = train(CASES[name](), settings(tmp_path, stage=stage, param="nvme", optimizer="nvme"))
        for key, value in result.master.items():
            unused = key.startswith("layers.2")
            assert torch.equal(value, before[key]) == unused, key
            assert bool(result.exp_avg[key].any()) != unused, key


def test_the_oracle_tells_a_wrong_result(tmp_path):
    """The comparison bites: another seed of data, no clipping, a parameter more or less decayed, all are seen."""

    class Other(Case):
        def losses(self, call, rank, micro):
            return super().losses(call, rank + 1, micro)

    class AllDecay(Case):
        def groups(self, model):
            return [{"params": [param for group in super().groups(model) for param in group["params"]]}]

    oracle = reference(Case(), clip=CLIP)
    for case, clip in ((Other(), CLIP), (Case(), 0.0), (AllDecay(), CLIP)):
        weights, *_ = difference(train(case, settings(tmp_path, clip=clip)), oracle)
        assert weights > 10 * WEIGHTS
