"""Shards: what the tensor axis leaves of a parameter, and how its elements lie in the whole one.

A shard is cut along one dimension. Every rank of the axis has the same share of each block of that dimension: a plain
weight is one block; a packed one (a gate above its up-projection) has several. So all ranks have shapes, sizes and
plans alike, and only their index tells them apart.

A shard's elements have an order of their own, C order of the local shape. It keeps the order of the whole tensor, so a
range of a shard lies within one range of the whole, in runs of equal length: `runs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

# (from, to) along a dimension.
Range = tuple[int, int]


class Replica(Enum):
    """What the ranks of a tensor group have of a unit."""

    # Each its own shards; also where there is one rank.
    NONE = "none"
    # All the same values and, by themselves, the same gradients.
    SAME = "same"
    # All the same values; gradients are each a part, to be summed over the group.
    PARTIAL = "partial"


@dataclass(frozen=True, slots=True)
class Shard:
    """A cut along `dim` into `parts`: each of `blocks` (sizes along that dimension) is divided equally."""

    dim: int
    blocks: tuple[int, ...]
    parts: int

    def __post_init__(self) -> None:
        if any(size % self.parts for size in self.blocks):
            raise ValueError(f"blocks of {self.blocks} cannot be divided by {self.parts}")

    @property
    def size(self) -> int:
        """Elements of the whole parameter along `dim`."""
        return sum(self.blocks)

    def ranges(self, index: int) -> tuple[Range, ...]:
        """The ranges along `dim` of the whole parameter that rank `index` of the axis has, in order."""
        ends = accumulate(self.blocks)
        begins = (end - size for end, size in zip(ends, self.blocks, strict=True))
        return tuple(
            (begin + size * index // self.parts, begin + size * (index + 1) // self.parts)
            for begin, size in zip(begins, self.blocks, strict=True)
        )

    def aligned(self, whole: Sequence[int]) -> int:
        """The largest number of elements of a parameter of shape `whole` of which every run of a shard, and every
        place where one begins, is a multiple.
        """
        inner = math.prod(whole[self.dim + 1 :])
        return math.gcd(*(inner * end for index in range(self.parts) for each in self.ranges(index) for end in each))

    def local_shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """The shape of a rank's shard of a parameter of shape `whole`."""
        return (*whole[: self.dim], whole[self.dim] // self.parts, *whole[self.dim + 1 :])

    def whole_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The parameter's shape, of which a rank has a shard of shape `local`."""
        return (*local[: self.dim], local[self.dim] * self.parts, *local[self.dim + 1 :])


class StridedRun(NamedTuple):
    """`rows` runs of `length` elements each: from `local` on in the shard's order, `local_step` apart, and from
    `whole` on in the whole tensor's, `whole_step` apart.
    """

    local: int
    whole: int
    rows: int
    length: int
    local_step: int
    whole_step: int


def local_numel(whole: Sequence[int], dim: int, ranges: Sequence[Range]) -> int:
    """Elements of a shard that has `ranges` along `dim` of a tensor of shape `whole`."""
    return math.prod(whole[:dim]) * math.prod(whole[dim + 1 :]) * sum(end - begin for begin, end in ranges)


def runs(whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int) -> Iterator[StridedRun]:
    """Yield where elements [start, start + numel) of a shard lie in the whole tensor: at most three runs a range.

    whole: the whole tensor's shape. ranges: what the shard has along `dim`, in order, without overlap.
    """
    inner = math.prod(whole[dim + 1 :])
    whole_row = whole[dim] * inner
    local_row = sum(end - begin for begin, end in ranges) * inner
    at = 0
    for begin, end in ranges:
        length = (end - begin) * inner
        yield from _runs_of_range(at, begin * inner, length, local_row, whole_row, start, start + numel)
        at += length


def _runs_of_range(
    local: int, whole: int, length: int, local_row: int, whole_row: int, start: int, stop: int
) -> Iterator[StridedRun]:
    """The runs of one range: in row r it has [local, local + length) of the shard's row, from `whole` on in the whole
    tensor's.
    """
    if not length or stop <= start:
        return
    # Rows of which at least one element is wanted.
    first = max(0, (start - local) // local_row)
    if start >= first * local_row + local + length:
        first += 1
    last = (stop - 1 - local) // local_row

    def piece(row: int) -> tuple[int, int]:
        """From and to within the row's run."""
        base = row * local_row + local
        return max(start - base, 0), min(stop - base, length)

    row = first
    while row <= last:
        begin, end = piece(row)
        count = 1
        if (begin, end) == (0, length):
            # All rows but the last are whole, too.
            count = last - row + 1 if piece(last) == (0, length) else last - row
        yield StridedRun(
            local=row * local_row + local + begin, whole=row * whole_row + whole + begin, rows=count,
            length=end - begin, local_step=local_row, whole_step=whole_row,
        )  # fmt: skip
        row += count


def whole_range(whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int) -> Range:
    """The smallest range of the whole tensor that has elements [start, start + numel) of a shard; (0, 0) of none."""
    found = list(runs(whole, dim, ranges, start, numel))
    ends = (run.whole + (run.rows - 1) * run.whole_step + run.length for run in found)
    return min((run.whole for run in found), default=0), max(ends, default=0)


def shard_range(whole: Sequence[int], dim: int, ranges: Sequence[Range], start: int, numel: int) -> Range:
    """The range of a shard's own order whose elements lie in [start, start + numel) of the whole tensor."""
    return _elements_before(whole, dim, ranges, start), _elements_before(whole, dim, ranges, start + numel)


def _elements_before(whole: Sequence[int], dim: int, ranges: Sequence[Range], place: int) -> int:
    """A shard's elements in front of element `place` of the whole tensor."""
    inner = math.prod(whole[dim + 1 :])
    if not whole[dim] * inner:
        return 0
    rows, rest = divmod(place, whole[dim] * inner)
    lengths = (max(0, min(rest, end * inner) - begin * inner) for begin, end in ranges)
    return rows * sum(end - begin for begin, end in ranges) * inner + sum(lengths)
