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


class _SlicesTransfer(WorkTransfer):
    """Every rank's slice for this one is on its way: `wait` adds them up."""

    def __init__(self, work: Any, slices: Tensor, partition: Tensor, full: Tensor) -> None:
        super().__init__(work, keep=(full,))
        self._slices: Tensor | None = slices
        self._partition = partition

    def wait(self) -> None:
        super().wait()
        if self._slices is not None:
            rows, self._slices = self._slices.view(-1, self._partition.numel()), None
            torch.sum(rows, dim=0, out=self._partition)


def reduce_scatter(partition: Tensor, full: Tensor, group: Any) -> WorkTransfer:
    """Sum `full` [numel] over ranks and leave this rank's slice in `partition` [numel / ranks]; returns at once.

    gloo's own runs an all-reduce of everything inside, twice the bytes and a copy: here ranks exchange slices, and each
    adds up those that it has received, in the order of ranks.
    """
    if dist.get_backend(group) == "gloo":
        slices = torch.empty_like(full)
        work = dist.all_to_all_single(slices, full, group=group, async_op=True)
        return _SlicesTransfer(work, slices, partition, full)
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
