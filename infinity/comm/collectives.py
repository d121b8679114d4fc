"""The collectives that ZeRO needs, by one name in every supported torch, on flat tensors of the group's device.

torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 has the old names only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.transfer import WorkTransfer

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(full: Tensor, partition: Tensor, group: Any) -> WorkTransfer:
    """Gather every rank's partition [numel / ranks] into `full` [numel]; returns at once."""
    return WorkTransfer(_all_gather(full, partition, group=group, async_op=True), keep=(full, partition))


def reduce_scatter(partition: Tensor, full: Tensor, group: Any) -> WorkTransfer:
    """Sum `full` [numel] over ranks and leave this rank's slice in `partition` [numel / ranks]; returns at once."""
    return WorkTransfer(
        _reduce_scatter(partition, full, op=dist.ReduceOp.SUM, group=group, async_op=True), keep=(full, partition)
    )


def all_reduce(tensor: Tensor, group: Any) -> WorkTransfer:
    """Sum `tensor` over ranks in place; returns at once."""
    return WorkTransfer(dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group, async_op=True), keep=(tensor,))


def broadcast(tensor: Tensor, group: Any, source: int = 0) -> None:
    """Make every rank's `tensor` that of rank `source`."""
    dist.broadcast(tensor, src=source, group=group)


def exchange(values: list[float], group: Any, world_size: int) -> list[list[float]]:
    """Every rank's list of numbers (same length everywhere, float64), by rank. Blocks; meant for small decisions."""
    if group is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world_size * len(values), dtype=torch.float64)
    all_gather(everyone, mine, group).wait()
    return everyone.view(world_size, len(values)).tolist()
