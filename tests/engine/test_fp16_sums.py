"""In fp16 gradients are summed over ranks, and averaged in fp32 later: where that overflows, and what avoids it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import infinity
from tests.conftest import RankPools
from tests.support.oracle import join

SCALE_POWER = 14
FP32 = {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}


def skipped(rank: int, world: int) -> list[int]:
    """Steps that were skipped, of one step each: by scaled gradients of 24,576 and of 40,960, and of these in fp32."""
    join(world)
    found = []
    for gradient, types in ((1.5, {}), (2.5, {}), (2.5, FP32)):
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "initial_scale_power": SCALE_POWER},
            "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}, **types,
        }  # fmt: skip
        engine, *_ = infinity.initialize(model=nn.Linear(8, 2, bias=False), config=config)
        with engine:
            engine.backward(engine(torch.full((1, 8), gradient, dtype=torch.float16)).float().sum())
            engine.step()
            found.append(engine.skipped_steps)
    return found


def test_a_sum_over_ranks_overflows_where_its_average_would_not(rank_pools: RankPools) -> None:
    """docs/precision.md says so, and names the keys that avoid it."""
    assert rank_pools[2].run(skipped) == [[0, 1, 0]] * 2
    assert rank_pools[1].run(skipped) == [[0, 0, 0]]
