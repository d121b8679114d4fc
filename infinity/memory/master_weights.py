"""The fp32 masters in partitions: PARAM alone, PARAM with REMAINDER (the split master), or MASTER beside PARAM.

`load_masters` returns what `store_masters` stored, to the bit, for every finite value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.memory.partition import Partition
from infinity.ops.adam import join, split
from infinity.plan.types import Kind


def store_masters(values: Tensor, param: Tensor, states: Partition | None, at: int) -> None:
    """Store masters: `values` [n] (fp32, CPU) into `param` [n] and, from element `at` on, into the states beside it."""
    if states is None or param.dtype is torch.float32:
        param.copy_(values)
        return
    span = slice(at, at + values.numel())
    if param.dtype is torch.bfloat16:
        remainder = states.view(Kind.REMAINDER)[span]
        if param.is_cpu and remainder.is_cpu:
            split(values, out=(param, remainder))
            return
        for target, part in zip((param, remainder), split(values), strict=True):
            target.copy_(part)
    else:
        param.copy_(values)
        states.view(Kind.MASTER)[span].copy_(values)


def load_masters(param: Tensor, states: Partition | None, at: int) -> Tensor:
    """The masters [n] in fp32 on the CPU, in memory of their own, of `param` [n] and the states beside it."""
    if states is None or param.dtype is torch.float32:
        return param.detach().cpu().float().clone()
    span = slice(at, at + param.numel())
    if param.dtype is torch.bfloat16:
        return join(param.cpu().contiguous(), states.view(Kind.REMAINDER)[span].cpu().contiguous())
    return states.view(Kind.MASTER)[span].cpu().clone()
