"""Weights beyond the gather budget are cut along their rows; what fits, or is not used row by row, is left whole."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest
import torch
from torch import nn

from infinity.config import ResolveContext, load_config, resolve
from infinity.plan.capacity import Capacity
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan
from infinity.plan.spec import UnitRules, cut_rows, find_units, module_tree
from infinity.plan.types import Kind, Tier, Topology
from tests.support.models import tiny_llama


def plan_of(model: nn.Module, zero: dict[str, Any], *, ranks: int = 1) -> Plan:
    home = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_param_persistence_threshold": 0,
            **zero,
        },
    }  # fmt: skip
    if config["zero_optimization"]["stage"] < 3:  # type: ignore[index]
        del config["zero_optimization"]["offload_param"]  # type: ignore[attr-defined]
    resolved = resolve(load_config(config), ResolveContext(world_size=ranks))
    inputs = PlanInputs(
        node=module_tree(model, compute_dtype="fp32"), config=resolved, topology=Topology(dp=ranks, local_size=ranks),
        accelerator=False, capacity=Capacity(),
    )  # fmt: skip
    return inputs.plan()


def tiles_by_name(plan: Plan) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for layout in plan.layouts:
        for slot in layout.slots:
            if slot.is_tile:
                found.setdefault(slot.name, []).append((slot.start, slot.numel))
    return found


def test_rows_are_cut_without_gap_into_near_equal_tiles():
    rng = random.Random(0)
    for _ in range(500):
        shape, numel_max = (rng.randint(1, 300), rng.randint(1, 40)), rng.randint(1, 2000)
        tiles = list(cut_rows(shape, numel_max))
        assert [start for start, _ in tiles] == [0, *itertools.accumulate(numel for _, numel in tiles)][:-1]
        assert sum(numel for _, numel in tiles) == math.prod(shape)
        assert all(numel % shape[1] == 0 and numel <= max(numel_max, shape[1]) for _, numel in tiles)
        # No tile is needed less: all but the last are equal.
        assert len({numel for _, numel in tiles[:-1]}) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_weight_beyond_the_budget_is_in_tiles_and_never_more_of_it_gathered(ranks):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1024))
    live = 64 * 1024 // 4
    plan = plan_of(model, {"stage3_max_live_parameters": live, "stage3_prefetch_bucket_size": live // 4}, ranks=ranks)
    tiles = tiles_by_name(plan)
    assert [*tiles] == ["1.weight"], "what fits stays whole"
    assert len(tiles["1.weight"]) == 16
    assert plan.bytes_by_tier()[Tier.GPU][Kind.FULL] <= 4 * live
    assert "1.weight is executed in 16 tiles" in plan.explain()
    assert plan.numel == sum(param.numel() for param in model.parameters())
    # Gradients wait one tile at a time; a tile is `live` bytes.
    assert plan.pools.left_nbytes <= 3 * live


def test_plans_of_models_that_fit_do_not_change():
    for zero in ({}, {"stage3_max_live_parameters": 20_000, "sub_group_size": 500}):
        plans = [plan_of(tiny_llama(), {**zero, **tiles}) for tiles in ({}, {"tile_parameters": 0})]
        assert plans[0] == plans[1]
        assert plans[0].fingerprint() == plans[1].fingerprint()


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_below_stage_3_nothing_is_gathered_and_nothing_cut(stage):
    assert not tiles_by_name(plan_of(tiny_llama(), {"stage": stage, "tile_parameters": 100}))


def test_a_tile_does_not_stay_gathered_for_being_small():
    plan = plan_of(nn.Linear(16, 1024), {"tile_parameters": 512, "stage3_param_persistence_threshold": 2000})
    for layout, placed in zip(plan.layouts, plan.placement.units, strict=True):
        assert placed.whole == (not layout.is_tile)


def test_tiny_bounds_make_no_plan_of_thousands_of_pieces():
    model = nn.Sequential(*[nn.Linear(2048, 2048, device="meta") for _ in range(2)])
    bounds = {"stage3_max_live_parameters": 100, "sub_group_size": 100}
    plan = plan_of(model, {**bounds, "offload_optimizer": {"device": "cpu"}})
    assert max(map(len, tiles_by_name(plan).values())) == 256 and len(plan.sub_groups) <= 4096 + 2


class Own(nn.Linear):
    """A linear layer of another class may use its weight as it likes."""


class Tied(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, 16)
        self.head = head
        head.weight = self.embedding.weight  # type: ignore[assignment]


def test_tied_weights_are_in_tiles_where_every_use_is_row_by_row():
    plan = plan_of(Tied(nn.Linear(16, 96, bias=False)), {"tile_parameters": 200})
    assert [*tiles_by_name(plan)] == ["embedding.weight"]
    modules = {layout.modules for layout in plan.layouts if layout.is_tile}
    assert modules == {("embedding", "head")}
    # Forward uses every tile twice, backward in the reverse order.
    count = len(tiles_by_name(plan)["embedding.weight"])
    assert plan.schedule.trace[: 2 * count] == (*range(count), *range(count))
    assert plan.schedule.trace[2 * count :] == (*reversed(range(count)), *reversed(range(count)))


@pytest.mark.parametrize("head", [Own(16, 96), nn.Conv1d(16, 96, 1)], ids=["another class", "a convolution"])
def test_tied_weights_with_another_use_stay_whole_and_the_plan_says_so(head):
    plan = plan_of(Tied(head), {"stage3_max_live_parameters": 500})
    assert not tiles_by_name(plan)
    assert "embedding.weight is gathered whole" in plan.explain()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(MLPExpert() for _ in range(2))


class MLPExpert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 64)


def test_what_is_chosen_by_data_is_never_cut():
    assert not tiles_by_name(plan_of(nn.Sequential(Experts(), nn.Linear(16, 16)), {"tile_parameters": 256}))


def test_the_rest_of_a_block_is_one_unit_around_its_tiles():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 400), nn.Linear(16, 16)

    model = nn.Sequential(Block(), Block())
    rules = UnitRules(unit_numel_max=2000, merge_numel_max=0, whole_numel_max=4000, tile_numel_max=1600)
    names = [unit.name for unit in find_units(module_tree(model, compute_dtype="fp32"), rules).units]
    tiles = [f"{block}.wide.weight, tile {tile} of 4" for block in (0, 1) for tile in (1, 2, 3, 4)]
    assert names == ["0", *tiles[:4], "1", *tiles[4:]]


def test_frozen_and_trained_tiles_keep_their_kind():
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    plan = plan_of(model, {"tile_parameters": 600})
    trained = {layout.slots[0].name: layout.trainable for layout in plan.layouts}
    assert trained == {"0.weight": False, "1.weight": True}
    assert all("(frozen)" in layout.name for layout in plan.layouts if not layout.trainable)
    assert torch.Size(plan.layouts[0].slots[0].shape) == model[0].weight.shape
