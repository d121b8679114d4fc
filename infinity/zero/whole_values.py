"""Whole values in CPU memory of what the ranks of an axis have: partitions over data, shards over the tensor axis, and
parameters over the pipeline axis.

They travel in pieces of bounded size, so that beside a whole tensor no rank holds more than a piece.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather
from infinity.memory.shard_copy import gather_shard, scatter_shard
from infinity.plan.layout import Slot
from infinity.zero.value_slices import PIECE_NBYTES, broadcast_values


def rows_of_ranks(values: Tensor, group: AxisGroup, device: torch.device, name: str) -> Iterator[tuple[int, Tensor]]:
    """Yield every member's values ([numel], contiguous, of one size and dtype) in pieces: (first element, [size, n] in
    CPU memory). Collective: take all pieces. A piece is valid until the next one.

    device: where the group's collectives are, if they are not made by the host.
    """
    if group.size == 1:
        yield 0, values.cpu().view(1, -1)
        return
    step = max(PIECE_NBYTES // (values.element_size() * group.size), 1)
    for begin in range(0, values.numel(), step):
        mine = values[begin : begin + step]
        mine = mine if group.host_waits else mine.to(device)
        full = torch.empty(group.size * mine.numel(), dtype=mine.dtype, device=mine.device)
        all_gather(full, mine, group, name).wait()
        yield begin, full.cpu().view(group.size, -1)


def put_together(
    values: Tensor, slot: Slot, group: AxisGroup, device: torch.device, name: str, flat: Tensor | None
) -> None:  # fmt: skip
    """Put a slot's elements, and where it has a shard those of the other ranks of the tensor axis, into their places.

    values: [slot.numel], this rank's. flat: the whole parameter, flattened, in CPU memory; None on a rank that only
    sends. Collective over the tensor axis where the slot has a shard.
    """
    shard = slot.shard
    if shard is None:
        if flat is not None:
            flat[slot.start : slot.start + slot.numel].copy_(values)
        return
    for begin, rows in rows_of_ranks(values, group, device, name):
        if flat is None:
            continue
        for index, row in enumerate(rows):
            scatter_shard(row, slot.start + begin, slot.whole_shape, shard.dim, shard.ranges(index), flat, 0)


def pass_along(flat: Tensor, group: AxisGroup, source: int, name: str, *, keep: bool = True) -> None:
    """Copy `flat` ([numel] in CPU memory) of the group's member `source` into that of every other one. Collective.

    keep: whether this member wants the values; `flat` says only how many there are, and of which dtype, where it does
    not (a meta tensor does).
    """
    step = max(PIECE_NBYTES // flat.element_size(), 1)
    room = None if keep else torch.empty(min(step, flat.numel()), dtype=flat.dtype, device="cpu")
    for begin in range(0, flat.numel() if group.size > 1 else 0, step):
        piece = flat[begin : begin + step]
        broadcast_values(piece if room is None else room[: piece.numel()], group, source, name)


def take_own(flat: Tensor, slot: Slot, index: int, start: int, target: Tensor) -> None:
    """Copy the slot's elements from `start` on into `target` ([n]), of a whole parameter, flattened.

    index: this rank's on the tensor axis.
    """
    shard = slot.shard
    if shard is None:
        target.copy_(flat[slot.start + start :][: target.numel()])
    else:
        gather_shard(flat, 0, slot.whole_shape, shard.dim, shard.ranges(index), slot.start + start, target)
