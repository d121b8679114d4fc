"""Copies between the flat order of a whole tensor and the order of a shard's own elements, with bounded memory.

Runs that are long enough are read straight to where they belong. Of shorter ones, a block is read that covers several,
and they are copied in memory.

The fp32 masters in partitions: PARAM alone, PARAM with REMAINDER (the split master), or MASTER beside PARAM.

`load_masters` returns what `store_masters` stored, to the bit, for every finite value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from infinity.memory.partition import Partition
from infinity.ops.adam import join, split
from infinity.plan.shards import Range, runs, shard_range, whole_range
from infinity.plan.types import Kind

# Fills `out` ([n], one dtype) with the elements from a first one on.
FlatReader = Callable[[int, Tensor], None]

# A run of this size is read by itself, whatever lies between it and the next.
_RUN_NBYTES = 128 << 10
# What is read at once of shorter runs, with what lies between them.
_BLOCK_NBYTES = 16 << 20


def gather_shard(
    flat: Tensor, first: int, whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, target: Tensor
) -> None:  # fmt: skip
    """Copy elements [start, start + n) of a shard to `target` [n], from a range of the whole tensor that has them.

    flat: the elements of the flattened whole tensor from `first` on. ranges: what the shard has along `dim` of a tensor
    of shape `whole`, in order.
    """
    for run in runs(whole, dim, ranges, start, target.numel()):
        size = (run.rows, run.length)
        part = _strided(target, run.local - start, size, run.local_step)
        part.copy_(_strided(flat, run.whole - first, size, run.whole_step))


def scatter_shard(
    source: Tensor, start: int, whole: Sequence[int], dim: int, ranges: Sequence[Range], flat: Tensor, first: int
) -> None:  # fmt: skip
    """Copy elements [start, start + n) of a shard from `source` [n] to where they lie in the whole tensor, of which
    `flat` has the elements from `first` on. The inverse of `gather_shard`.
    """
    for run in runs(whole, dim, ranges, start, source.numel()):
        size = (run.rows, run.length)
        part = _strided(flat, run.whole - first, size, run.whole_step)
        part.copy_(_strided(source, run.local - start, size, run.local_step))


def read_shard(
    read: FlatReader, whole: tuple[int, ...], dim: int, ranges: Sequence[Range], start: int, target: Tensor
) -> None:  # fmt: skip
    """Fill `target` ([n], contiguous) with elements [start, start + n) of a shard of a tensor of shape `whole`.

    read: fills its tensor, of `target`'s dtype and device, with the elements from a first one on of the flattened
    whole tensor. ranges: what the shard has along `dim`, in order. Reads at most 16 MiB beside `target` at once.
    """
    width = target.element_size()
    block: Tensor | None = None
    for begin, numel in _chunks(whole, dim, ranges, start, target.numel(), width):
        piece = target[begin - start : begin - start + numel]
        if _is_long(whole, dim, ranges, begin, numel, width):
            for run in runs(whole, dim, ranges, begin, numel):
                for row in range(run.rows):
                    at = run.local + row * run.local_step - begin
                    read(run.whole + row * run.whole_step, piece[at : at + run.length])
            continue
        first, end = whole_range(whole, dim, ranges, begin, numel)
        if block is None or block.numel() < end - first:
            block = torch.empty(end - first, dtype=target.dtype, device=target.device)
        read(first, block[: end - first])
        gather_shard(block, first, whole, dim, ranges, begin, piece)


def spread_shard(
    read: FlatReader, whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int, flat: Tensor,
    first: int,
) -> None:  # fmt: skip
    """Fill the elements of `flat` (the whole tensor's, from `first` on) that are [start, start + numel) of a shard.

    read: fills its tensor with the elements from a first one on of the shard's own order. Elements of `flat` outside
    of the shard's range keep their values; those of the range outside of `flat` are not read.
    """
    begin, end = shard_range(whole, dim, ranges, first, flat.numel())
    begin, end = max(begin, start), min(end, start + numel)
    block_numel = _BLOCK_NBYTES // flat.element_size()
    if begin < end and _is_long(whole, dim, ranges, begin, end - begin, flat.element_size()):
        for run in runs(whole, dim, ranges, begin, end - begin):
            for row in range(run.rows):
                at = run.whole + row * run.whole_step - first
                read(run.local + row * run.local_step, flat[at : at + run.length])
        return
    block = torch.empty(max(0, min(end - begin, block_numel)), dtype=flat.dtype, device=flat.device)
    for at in range(begin, end, block_numel):
        part = block[: min(block_numel, end - at)]
        read(at, part)
        scatter_shard(part, at, whole, dim, ranges, flat, first)


def _strided(values: Tensor, start: int, size: tuple[int, int], step: int) -> Tensor:
    """The view [count, length] of a flat tensor's elements from `start` on, rows `step` apart."""
    return values.as_strided(size, (step, 1), values.storage_offset() + start)


def _is_long(whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int, width: int) -> bool:
    """Whether all but the first and the last run of a range are long, or it is one run."""
    inner = math.prod(whole[dim + 1 :])
    shortest = min((end - begin for begin, end in ranges if begin < end), default=0)
    if shortest * inner * width >= _RUN_NBYTES:
        return True
    first, end = whole_range(whole, dim, ranges, start, numel)
    return end - first == numel


def _chunks(
    whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int, width: int
) -> list[tuple[int, int]]:
    """Cut elements [start, start + numel) of a shard: (first element, elements) of parts whose runs are all long, or
    that a block covers.
    """
    if not numel:
        return []
    if _is_long(whole, dim, ranges, start, numel, width):
        return [(start, numel)]
    room = _BLOCK_NBYTES // width
    found = []
    first, end = whole_range(whole, dim, ranges, start, numel)
    for at in range(first, end, room):
        begin, stop = shard_range(whole, dim, ranges, at, min(room, end - at))
        begin, stop = max(begin, start), min(stop, start + numel)
        if begin < stop:
            found.append((begin, stop - begin))
    return found


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
