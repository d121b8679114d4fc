"""A model cut into stages, as a value: balance, the modules around the blocks, and what is left to each rank."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infinity.errors import ConfigError
from infinity.plan.pipeline import make_tables
from infinity.plan.spec import ModelSpec, ModuleNode, ParamSpec, UnitRules, find_units
from infinity.plan.stages import (
    PipelinePart,
    StageCut,
    balance,
    cut_model,
    find_blocks,
    modules_after,
    part_of,
    split_model,
    step_uses,
)


def leaf(path: str, class_name: str, *shape: int, tied: tuple[str, ...] = ()) -> ModuleNode:
    return ModuleNode(path, class_name, {"weight": ParamSpec(f"{path}.weight", shape, "fp32", tied=tied)})


def language_model(blocks: int = 4, *, tied: bool = False, norm_first: bool = False) -> ModuleNode:
    """Embedding, blocks of two layers, a norm, and a head of its own or the embedding's."""
    embed = leaf("model.embed", "Embedding", 1000, 64, tied=("head.weight",) if tied else ())
    listed = {
        str(at): ModuleNode(
            f"model.layers.{at}", "Block",
            children={name: leaf(f"model.layers.{at}.{name}", "Linear", 64, 64) for name in ("up", "down")},
        )
        for at in range(blocks)
    }  # fmt: skip
    layers = ModuleNode("model.layers", "ModuleList", children=listed)
    norm = leaf("model.final_norm", "Norm", 64)
    inner = {"embed": embed, "final_norm": norm, "layers": layers} if norm_first else {
        "embed": embed, "layers": layers, "final_norm": norm,
    }  # fmt: skip
    head = ModuleNode("head", "Linear", dict(embed.params)) if tied else leaf("head", "Linear", 1000, 64)
    return ModuleNode("", "Model", children={"model": ModuleNode("model", "Inner", children=inner), "head": head})


RULES = UnitRules(unit_numel_max=100_000, merge_numel_max=100)


def parts(
    root: ModuleNode, pp: int, virtual: int = 1, schedule: str = "1f1b", m: int = 4
) -> tuple[ModelSpec, list[PipelinePart]]:
    units = find_units(root, RULES)
    cut = cut_model(root, find_blocks(root), pp * virtual)
    split = split_model(units, cut, pp=pp, schedule=schedule, micro_batches=m)
    return units, [PipelinePart(split, index) for index in range(pp)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 8), st.integers(0, 9), st.integers(0, 9))
def test_no_division_has_a_faster_slowest_stage(costs: list[int], stages: int, first: int, last: int) -> None:
    stages = min(stages, len(costs))

    def slowest(counts: tuple[int, ...]) -> int:
        bounds = [0, *itertools.accumulate(counts)]
        sums = [sum(costs[begin:end]) for begin, end in itertools.pairwise(bounds)]
        sums[0] += first
        sums[-1] += last
        return max(sums)

    inner = itertools.combinations(range(1, len(costs)), stages - 1)
    every = [tuple(b - a for a, b in itertools.pairwise([0, *each, len(costs)])) for each in inner]
    found = balance(costs, stages, first=first, last=last)
    assert found in every
    assert slowest(found) == min(map(slowest, every))


def test_equal_divisions_are_made_even() -> None:
    assert balance([1.0] * 8, 3, last=2) == (3, 3, 2)
    assert balance([1.0] * 32, 4, last=4) == (9, 9, 9, 5)


def test_modules_in_front_and_behind_are_told_by_the_tree_and_by_their_names() -> None:
    for norm_first in (False, True):
        root = language_model(norm_first=norm_first)
        blocks = find_blocks(root)
        assert blocks == tuple(f"model.layers.{at}" for at in range(4))
        assert modules_after(root, blocks) == {"model.final_norm", "head"}
        cut = cut_model(root, blocks, 2, counts=(2, 2))
        assert cut == StageCut(blocks, (2, 2), ("head", "model.final_norm"))
        assert [*cut.stages_at("model.embed")] == [0]
        assert [*cut.stages_at("head")] == [1]
        assert [*cut.stages_at("model.layers.1.up")] == [0]
        # What contains the blocks runs on every stage.
        assert [*cut.stages_at("model")] == [0, 1] == [*cut.stages_at("")]


def test_a_lookup_costs_nothing_and_a_head_counts() -> None:
    # The head has as many elements as eight blocks.
    assert cut_model(language_model(12), find_blocks(language_model(12)), 2).counts == (10, 2)


def test_units_do_not_depend_on_the_pipeline_and_each_lies_where_it_is_used() -> None:
    for pp, virtual in ((2, 1), (4, 1), (2, 2)):
        units, found = parts(language_model(8), pp, virtual, "interleaved" if virtual > 1 else "1f1b")
        assert units == find_units(language_model(8), RULES)
        assert sorted(at for part in found for at in part.numbers) == [*range(len(units.units))]
        assert not any(part.shared for part in found)
        for part in found:
            mine = part_of(units, part)
            assert [unit.name for unit in mine.units] == [units.units[at].name for at in part.numbers]
            assert all(part.tells(at) for at in range(len(part.numbers)))


def test_a_tied_weight_lies_on_the_first_and_the_last_rank_and_the_first_tells() -> None:
    units, found = parts(language_model(8, tied=True), 4)
    (at,) = (number for number, unit in enumerate(units.units) if unit.params[0].name == "model.embed.weight")
    assert found[0].split.stages[at] == (0, 3)
    assert [[part.numbers[each] for each in part.shared] for part in found] == [[at], [], [], [at]]
    assert found[0].tells(found[0].numbers.index(at))
    assert not found[3].tells(found[3].numbers.index(at))
    assert found[3].at_ends == found[3].shared


def test_a_step_uses_what_the_table_says() -> None:
    units, found = parts(language_model(4), 2, schedule="gpipe", m=3)
    for part in found:
        mine = part_of(units, part)
        uses = step_uses(mine)
        forward = [use.unit for use in uses[: 3 * len(mine.uses)]]
        assert forward == [*mine.uses] * 3
        assert [use.unit for use in uses[3 * len(mine.uses) :]] == [*reversed(mine.uses)] * 3
        # The embedding's backward needs no weights, and has its place.
        unneeded = [use for use in uses if not use.needed]
        assert len(unneeded) == (3 if part.index == 0 else 0)
    assert found[0].split.tables == make_tables("gpipe", 2, 3)


def test_weights_that_only_inner_stages_share_are_refused_by_name() -> None:
    root = language_model(4)
    listed = root.children["model"].children["layers"].children
    listed["2"].children["up"].params["weight"] = listed["1"].children["up"].params["weight"] = ParamSpec(
        "model.layers.1.up.weight", (64, 64), "fp32", tied=("model.layers.2.up.weight",)
    )
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.up\.weight is used in stages 1, 2"):
        parts(root, 4)
    parts(root, 2)


def test_too_few_blocks_and_other_counts_are_refused_with_what_works() -> None:
    root = language_model(3)
    with pytest.raises(ConfigError, match="is 4 but Model has 3 blocks: use at most 3 stages"):
        cut_model(root, find_blocks(root), 4)
    with pytest.raises(ConfigError, match=r"parallel\.stages is \[2, 2\].* sum is the 3 blocks"):
        cut_model(root, find_blocks(root), 2, counts=(2, 2))
    with pytest.raises(ConfigError, match="no blocks that it repeats: use data or tensor parallelism"):
        cut_model(ModuleNode("", "Single", children={"only": leaf("only", "Linear", 4, 4)}), (), 2)


def test_the_longest_sequence_is_the_one_that_is_cut() -> None:
    root = language_model(5)
    towers = [
        ModuleNode(f"tower.{at}", "Tower", children={"w": leaf(f"tower.{at}.w", "Linear", 8, 8)}) for at in range(2)
    ]
    root.children["tower"] = ModuleNode(
        "tower", "ModuleList", children={str(at): each for at, each in enumerate(towers)}
    )
    assert find_blocks(root) == tuple(f"model.layers.{at}" for at in range(5))
