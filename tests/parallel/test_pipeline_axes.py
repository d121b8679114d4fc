"""A pipeline beside the other axes, on the simulated accelerator, and in programs that do more than train: what the
suite keeps of `tests.pipeline_matrix` and `tests.pipeline_loops`.
"""

from __future__ import annotations

import pytest

from tests.conftest import RankPools
from tests.pipeline_loops import compare_loops, on_one
from tests.pipeline_matrix import Axes, compare_axes, compare_ties, on_devices, on_one_rank, summed_once, tied_by_torch
from tests.support.accelerator.process import require
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.timeout(300)

# Of each kind of program one schedule at least; what splits a backward is the most demanding.
LOOPS = (
    "recomputed from NVMe", "compiled", "fp16 overflows", "first stage frozen", "adapters at the end", "tiles",
    "evaluated between", "norms by parameter", "timeline",
)  # fmt: skip


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_three_axes_on_eight_ranks_have_one_hash_and_the_weights_of_one_rank() -> None:
    axes = Axes(2, 2, 2)
    expected = {"llama": run_ranks(on_one_rank, 1, "llama", axes.data)[0]}
    args = axes, expected, (3,), (("zero_bubble", 1),), ("gpu", "nvme")
    (row,) = run_ranks(compare_axes, axes.world, *args, timeout=580)[0]
    assert row["right"] and row["settings"] == 2, row


def test_gradients_that_are_summed_once_a_step_have_the_bits_of_stage_1(rank_pools: RankPools) -> None:
    axes = Axes(2, 2, 1)
    expected = {"llama": rank_pools[1].run(on_one_rank, "llama", axes.data)[0]}
    rows = summed_once(rank_pools[4], axes, expected, ("gpu", "nvme"))
    assert [row["stage"] for row in rows] == [2, 3]
    assert all(row["right"] for row in rows), rows


@pytest.mark.matrix
@pytest.mark.slow
def test_tied_weights_beside_each_other_axis_have_one_hash(rank_pools: RankPools) -> None:
    for axes, family in ((Axes(2, 2, 1), "gpt2"), (Axes(2, 1, 2), "gemma2")):
        expected = {family: rank_pools[1].run(on_one_rank, family, axes.data)[0]}
        args = axes, expected, (0, 3), (("interleaved", 2),), ("gpu", "nvme")
        rows = rank_pools[4].run(compare_axes, *args, timeout=280)[0]
        assert len(rows) == 2
        assert all(row["right"] for row in rows), rows


def test_tied_weights_of_several_stages_stay_those_of_plain_torch(rank_pools: RankPools) -> None:
    expected = {"gpt2": rank_pools[1].run(tied_by_torch, "gpt2")[0]}
    rows = rank_pools[2].run(compare_ties, expected, (("zero_bubble", 2),), ("nvme",), timeout=280)[0]
    assert len(rows) == 1
    assert all(row["right"] for row in rows), rows


@pytest.mark.matrix
def test_programs_that_do_more_than_train_have_the_bits_of_accumulation(rank_pools: RankPools) -> None:
    expected = rank_pools[1].run(on_one, LOOPS, timeout=280)[0]
    rows = rank_pools[2].run(compare_loops, expected, (("zero_bubble", 1),), timeout=280)[0]
    assert len(rows) == len(LOOPS)
    assert [row for row in rows if not row["right"]] == []


@pytest.mark.matrix
@pytest.mark.slow
def test_on_an_accelerator_a_pipeline_has_the_hash_of_the_cpu() -> None:
    require()
    rows = on_devices((3,), ("bf16",), ("nvme",), (("zero_bubble", 1),))
    assert [row["own collectives"] for row in rows] == [False, True]
    assert all(row["right"] for row in rows), rows
