"""The engine with a tensor axis: the cut of `tests.tensor_matrix` that would catch each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

import infinity
from infinity.errors import ConfigError
from tests.conftest import RankPools
from tests.support.oracle import join
from tests.tensor_matrix import (
    Place,
    batch,
    build,
    compare_dropout,
    compare_loops,
    compare_models,
    compare_replicas,
    compare_tiers,
    configuration,
    load_place,
    save_place,
)


@pytest.mark.slow
def test_models_of_transformers_are_what_they_are_in_one_process(rank_pools: RankPools) -> None:
    rows = rank_pools[2].run(compare_models, ("qwen3", "mixtral"), ("gemma2",), timeout=200)[0]
    assert len(rows) == 4
    assert all(row["right"] for row in rows), rows


@pytest.mark.slow
def test_replicated_parameters_have_equal_bits_on_three_ranks(rank_pools: RankPools) -> None:
    rows = rank_pools[3].run(compare_replicas, [("qwen3", False, "bf16"), ("llama", True, "bf16")], 6)[0]
    assert all(row["right"] and row["replicated"] > 4 for row in rows), rows


@pytest.mark.slow
def test_beside_a_tensor_axis_placement_shows_in_no_bit(rank_pools: RankPools) -> None:
    cells = [(3, "bf16", 0.5), (2, "fp32", 0.5), (0, "fp32", 0.0)]
    tiers = [("gpu", "gpu"), ("cpu", "nvme")]
    rows = rank_pools[4].run(compare_tiers, 2, cells, tiers, timeout=200)[0]
    assert all(row["right"] for row in rows), rows


@pytest.mark.slow
def test_loops_of_programs_give_the_weights_of_plain_torch(rank_pools: RankPools) -> None:
    loops = ("stage 1", "tiles", "recomputed, sequence", "generated", "state dict")
    rows = rank_pools[2].run(compare_loops, 2, loops, timeout=200)[0]
    assert [row["loop"] for row in rows] == [*loops]
    assert all(row["right"] for row in rows), rows


def test_dropout_is_shared_outside_of_regions_and_own_inside(rank_pools: RankPools) -> None:
    (row,) = rank_pools[2].run(compare_dropout)[0]
    assert row["right"], row


@pytest.mark.slow
def test_checkpoints_pass_between_topologies(rank_pools: RankPools, tmp_path: Path) -> None:
    """Saved with a tensor axis, loaded without, and the other way; in two launches of two ranks and one of one."""
    divided, whole = Place(2, 1, 3, "nvme"), Place(1, 2, 1, "gpu")
    saved = {place: rank_pools[2].run(save_place, str(tmp_path), place)[0] for place in (divided, whole)}
    for place, target in ((divided, whole), (whole, divided), (divided, Place(1, 1, 3, "cpu"))):
        ranks = target.tensor * target.data
        for row in rank_pools[ranks].run(load_place, str(tmp_path), [(place, saved[place])], target):
            assert row["right"], row


def called_with_its_own_batch(rank: int, world: int, drive: str) -> str:
    """As a program does that divides its data set over all ranks."""
    join(world)
    engine, *_ = infinity.initialize(model=build("llama"), config=configuration(drive, world))
    with engine, pytest.raises(ConfigError) as caught:
        engine(**batch(0, row=rank))
    return str(caught.value)


def test_ranks_of_a_tensor_group_that_get_different_batches_are_told(rank_pools: RankPools, tmp_path: Path) -> None:
    for text in rank_pools[2].run(called_with_its_own_batch, str(tmp_path)):
        assert "(input_ids, labels)" in text
        assert "engine.data_rank" in text
