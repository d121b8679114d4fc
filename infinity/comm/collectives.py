"""The collectives that ZeRO needs, by one name in every supported torch, on flat tensors of the group's device.

torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 has the old names only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity import record
from infinity.transfer import WorkTransfer

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Works:
    """Several works that are one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def all_gather(full: Tensor, partition: Tensor, group: Any) -> WorkTransfer:
    """Gather every rank's partition [numel / ranks] into `full` [numel]; returns at once. `partition` may lie at its
    place in `full`.

    gloo's own passes partitions round a ring, step by step, on one thread: here every rank sends its own to each other
    one, which took a third of the time.
    """
    if not _is_gloo(group) or not partition.numel():
        return WorkTransfer(_all_gather(full, partition, group=group, async_op=True), keep=(full, partition))
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    rows = full.view(ranks, -1)
    if rows[rank].data_ptr() != partition.data_ptr():
        rows[rank].copy_(partition)
    # Nearest neighbours first, so that not everybody sends to the same rank at once.
    others = [(rank + step) % ranks for step in range(1, ranks)]
    peers = [dist.get_global_rank(group, other) for other in others]
    works = [dist.irecv(rows[other], src=peer, group=group) for other, peer in zip(others, peers, strict=True)]
    works += [dist.isend(partition, dst=peer, group=group) for peer in peers]
    return WorkTransfer(_Works(works), keep=(full, partition))


def _is_gloo(group: Any) -> bool:
    return bool(dist.get_backend(group) == "gloo")


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


def needs_workspace(group: Any) -> bool:
    """Whether `reduce_scatter` makes use of a workspace."""
    return _is_gloo(group)


def reduce_scatter(partition: Tensor, full: Tensor, workspace: Tensor | None = None, *, group: Any) -> WorkTransfer:
    """Sum `full` [numel] over ranks and leave this rank's slice in `partition` [numel / ranks]; returns at once.

    workspace: as `full`, not used by anybody else until the transfer has been waited for; made here when absent.

    gloo's own runs an all-reduce of everything inside, twice the bytes and a copy: here ranks exchange slices, and each
    adds up those that it has received, in the order of ranks.
    """
    if needs_workspace(group):
        slices = torch.empty_like(full) if workspace is None else workspace
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
    with record.span(record.WAIT, "other ranks", nbytes=everyone.nbytes):
        all_gather(everyone, mine, group).wait()
    return everyone.view(world_size, len(values)).tolist()
