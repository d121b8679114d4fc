"""Bytes a parameter that anyone can work out with a pencil, against the plan's; only padding may lie between."""

from __future__ import annotations

from typing import Any

import pytest

from estimators.estimate import Estimate, Machine, estimate
from infinity.plan.types import Kind, Tier

PADDING = 1e-3
STATES = (Kind.REMAINDER, Kind.MASTER, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
# What is stored of one value: parameters and gradients, and beside them the optimizer's states.
FULL_MASTER, SPLIT_MASTER = 4 + 4 + 4, 2 + 4 + 4


def made(stage: int, dtype: str, ranks: int, **zero: Any) -> Estimate:
    config = {dtype: {"enabled": True}, "zero_optimization": {"stage": stage, **zero}}
    return estimate("llama-3.2-1b", config, ranks=ranks, ranks_per_node=1)


def a_parameter(found: Estimate, *kinds: Kind, tier: Tier = Tier.GPU) -> float:
    return sum(found.at_rest[tier].get(kind, 0) for kind in kinds) / found.plan.numel


def stored(found: Estimate) -> float:
    """Bytes a parameter between two steps on the device, without what reductions work in."""
    found_at_home = found.plan.bytes_at_home()[Tier.GPU]
    return sum(found_at_home.values()) / found.plan.numel


def test_mixed_precision_adam_takes_sixteen_bytes_a_parameter_without_sharing():
    # 2 of parameters, 2 of gradients, 12 of master weights and moments.
    assert stored(made(0, "fp16", 1)) == pytest.approx(16, rel=PADDING)


def test_a_split_master_saves_two_of_them():
    assert stored(made(0, "bf16", 1)) == pytest.approx(14, rel=PADDING)


@pytest.mark.parametrize("ranks", [2, 8, 64])
@pytest.mark.parametrize(("dtype", "states"), [("fp16", FULL_MASTER), ("bf16", SPLIT_MASTER)])
def test_the_stages_have_the_formulas_of_zero(dtype, states, ranks):
    # Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020): 4 + 12/N,
    # 2 + 14/N and 16/N; a split master takes 10 where they have 12. Gradients of stage 1 lie whole until the boundary,
    # and beside them each rank's part of their sum.
    one, two, three = (made(stage, dtype, ranks) for stage in (1, 2, 3))
    assert a_parameter(one, Kind.PARAM, Kind.FULL) == pytest.approx(2, rel=PADDING)
    assert a_parameter(one, *STATES) == pytest.approx(states / ranks, rel=PADDING)
    assert stored(one) == pytest.approx(4 + (2 + states) / ranks, rel=PADDING)
    assert stored(two) == pytest.approx(2 + (2 + states) / ranks, rel=PADDING)
    # Norms and other small units stay whole.
    assert stored(three) == pytest.approx((4 + states) / ranks, rel=0.01)


def test_twelve_bytes_a_parameter_lie_on_the_drive_and_twice_where_they_may_be_undone():
    nvme = {"device": "nvme", "nvme_path": "nvme"}
    found = made(3, "bf16", 1, offload_param=nvme, offload_optimizer=nvme)
    assert found.plan.nvme_nbytes / found.plan.numel == pytest.approx(24, rel=PADDING)
    assert a_parameter(found, Kind.GRAD, tier=Tier.CPU) == pytest.approx(2, rel=PADDING)


def test_the_optimizer_on_the_cpu_takes_its_states_and_gradients_there():
    found = made(3, "bf16", 4, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    assert a_parameter(found, Kind.PARAM, Kind.GRAD, *STATES, tier=Tier.CPU) == pytest.approx(14 / 4, rel=PADDING)
    assert stored(found) == pytest.approx(0, abs=PADDING)


def test_blocks_of_sparse_attention_are_counted_as_they_are_computed():
    values = {
        "model_type": "mistral", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
        "num_attention_heads": 4, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    dense, blocks = (
        estimate(values, {**section, "train_micro_batch_size_per_gpu": 1}, sequence=64)
        for section in ({}, {"sparse_attention": {"mode": "dense", "block": 16}})
    )
    # A query meets 1 to 4 blocks of 16, with a window at most 3; the third layer is of the first's kind.
    full, windowed = (16 + 32 + 48 + 64) / 4, (16 + 32 + 48 + 48) / 4
    assert dense.seen_keys == 32 and blocks.seen_keys == pytest.approx((full + 2 * windowed) / 3)
    # Two products of two operations an element in forward, and twice as many in backward.
    more = 3 * 4 * (blocks.seen_keys - 32) * 3 * 32 * 64
    assert blocks.flops - dense.flops == pytest.approx(more)


def test_what_fits_in_less_memory_fits_in_more():
    nvme = {"device": "nvme", "nvme_path": "nvme"}
    zero = {"stage": 3, **{f"offload_{what}": nvme for what in ("param", "optimizer", "gradients")}}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    for ram in (12, 20):
        # While a model is built, its largest parameter is whole (4.2 GB), and no buffer of an engine is there yet.
        machine = Machine(22 * 10**9, ram * 10**9, 20 * 10**12)
        assert estimate("llama-3.1-405b", config, machine=machine, sequence=128, checkpointing=True).fits
