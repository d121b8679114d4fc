"""A tensor group of all ranks, without an engine."""

from __future__ import annotations

import torch
import torch.distributed as dist

from infinity.distributed.axis_group import AxisGroup


def open_tensor_group(rank: int, world: int) -> AxisGroup:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return AxisGroup("tensor", rank, world, dist.group.WORLD)
