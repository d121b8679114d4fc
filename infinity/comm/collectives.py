"""The collectives that ZeRO needs, by one name in every supported torch, on flat tensors of the group's device.

Each has a name for whoever waits for it, such as "gather of layers.1"; the same number of a group's collectives must
have the same name on every rank.

torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 has the old names only.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from infinity import record
from infinity.comm.group import CollectiveTransfer, Group
from infinity.transfer import Transfer

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


def all_gather(full: Tensor, partition: Tensor, group: Group, name: str = "gather") -> CollectiveTransfer:
    """Gather every rank's partition [numel / ranks] into `full` [numel]; returns at once. `partition` may lie at its
    place in `full`.

    gloo's own passes partitions round a ring, step by step, on one thread: here every rank sends its own to each other
    one, which took a third of the time.
    """
    members = group.process_group
    if not _is_gloo(members) or not partition.numel():
        return group.start(
            name, lambda: _all_gather(full, partition, group=members, async_op=True), keep=(full, partition)
        )
    return group.start(name, lambda: _send_to_all(full, partition, members), keep=(full, partition))


def _send_to_all(full: Tensor, partition: Tensor, members: Any) -> _Works:
    rank, ranks = dist.get_rank(members), dist.get_world_size(members)
    rows = full.view(ranks, -1)
    if rows[rank].data_ptr() != partition.data_ptr():
        rows[rank].copy_(partition)
    # Nearest neighbours first, so that not everybody sends to the same rank at once.
    others = [(rank + step) % ranks for step in range(1, ranks)]
    peers = [dist.get_global_rank(members, other) for other in others]
    works = [dist.irecv(rows[other], src=peer, group=members) for other, peer in zip(others, peers, strict=True)]
    works += [dist.isend(partition, dst=peer, group=members) for peer in peers]
    return _Works(works)


def _is_gloo(members: Any) -> bool:
    return bool(dist.get_backend(members) == "gloo")


class _SlicesTransfer:
    """Every rank's slice for this one is on its way: `wait` adds them up."""

    def __init__(self, moving: CollectiveTransfer, slices: Tensor, partition: Tensor) -> None:
        self._moving = moving
        self._slices: Tensor | None = slices
        self._partition = partition

    def done(self) -> bool:
        return self._moving.done()

    def wait(self) -> None:
        self._moving.wait()
        if self._slices is not None:
            rows, self._slices = self._slices.view(-1, self._partition.numel()), None
            torch.sum(rows, dim=0, out=self._partition)


def needs_workspace(group: Group) -> bool:
    """Whether `reduce_scatter` makes use of a workspace."""
    return _is_gloo(group.process_group)


def reduce_scatter(
    partition: Tensor, full: Tensor, workspace: Tensor | None = None, *, group: Group, name: str = "reduction"
) -> Transfer:
    """Sum `full` [numel] over ranks and leave this rank's slice in `partition` [numel / ranks]; returns at once.

    workspace: as `full`, not used by anybody else until the transfer has been waited for; made here when absent.

    gloo's own runs an all-reduce of everything inside, twice the bytes and a copy: here ranks exchange slices, and each
    adds up those that it has received, in the order of ranks.
    """
    members = group.process_group
    if needs_workspace(group):
        slices = torch.empty_like(full) if workspace is None else workspace
        moving = group.start(
            name, lambda: dist.all_to_all_single(slices, full, group=members, async_op=True), keep=(full,)
        )
        return _SlicesTransfer(moving, slices, partition)
    return group.start(
        name,
        lambda: _reduce_scatter(partition, full, op=dist.ReduceOp.SUM, group=members, async_op=True),
        keep=(full, partition),
    )


def all_reduce(tensor: Tensor, group: Group, name: str = "sum") -> CollectiveTransfer:
    """Sum `tensor` over ranks in place; returns at once."""
    return group.start(
        name,
        lambda: dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group.process_group, async_op=True),
        keep=(tensor,),
    )


def broadcast(tensor: Tensor, group: Group, source: int = 0, name: str = "broadcast") -> None:
    """Make every rank's `tensor` that of rank `source`."""
    group.start(
        name, lambda: dist.broadcast(tensor, src=source, group=group.process_group, async_op=True), keep=(tensor,)
    ).wait()


def exchange(
    values: list[float], group: Group | None, world_size: int, name: str = "exchange of numbers"
) -> list[list[float]]:
    """Every rank's list of numbers (same length everywhere, float64), by rank. Blocks; meant for small decisions."""
    if group is None:
        return [values]
    mine = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world_size * len(values), dtype=torch.float64)
    with record.span(record.WAIT, "other ranks", nbytes=everyone.nbytes):
        all_gather(everyone, mine, group, name).wait()
    return everyone.view(world_size, len(values)).tolist()


def exchange_texts(text: str, group: Group, world_size: int, name: str = "exchange of texts") -> list[str]:
    """Every rank's text, of any length, by rank. Blocks."""
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
    sizes = [int(row[0]) for row in exchange([float(mine.numel())], group, world_size, name)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8)
    padded[: mine.numel()] = mine
    everyone = torch.empty(world_size * max(sizes), dtype=torch.uint8)
    all_gather(everyone, padded, group, name).wait()
    rows = everyone.view(world_size, -1)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]
