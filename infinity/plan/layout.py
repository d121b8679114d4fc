"""Flat layouts: where each parameter lies in its unit's flat buffer, and how a rank's slice is cut for the optimizer.

The gather's output *is* the parameters: a unit's flat buffer holds them one behind the other, each on a cache line, and
the tail is padded so that every rank's partition has the same size. Offsets do not depend on the number of ranks. Where
the update rule looks at blocks of elements, they begin with a parameter, and no partition or sub-group begins inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from infinity.plan.request import RuleSpec
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import ModelSpec
from infinity.plan.types import CACHE_LINE, DTYPE_NBYTES, Key, Kind, align_up

# Partitions are multiples of this many elements, so that no partition starts in the middle of a cache line.
PARTITION_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in the unit's flat buffer; `offset` and `numel` in elements.

    `shape` is the parameter's. `start` is the element of the parameter at which the slot begins: a tile's slot has some
    of its rows.
    """

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int
    group: int
    start: int = 0
    shard: Shard | None = None
    split: tuple[int, ...] = ()

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The parameter's shape before a tensor axis cuts it."""
        return self.shape if self.shard is None else self.shard.whole_shape(self.shape)

    @property
    def is_tile(self) -> bool:
        """Whether the slot has a part of the parameter's elements."""
        return self.numel != math.prod(self.shape)

    @property
    def own_shape(self) -> tuple[int, ...]:
        """The shape of what lies here: of a tile, its rows."""
        if not self.is_tile:
            return self.shape
        return (self.numel // math.prod(self.shape[1:]), *self.shape[1:])

    def matrices(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Where each matrix begins that a rule steps whole, and its shape: one, put together of its shards; those that
        it is `split` into; in a stack of matrices, as the experts of a mixture are, these of each.
        """
        rows, columns = self.whole_shape[-2:]
        each = [(row, count) for row, count in zip(accumulate((0, *self.split)), self.split or (rows,), strict=False)]
        for begin in range(0, max(self.numel, 1), rows * columns or 1):
            for row, count in each:
                yield begin + row * columns, (count, columns)

    @property
    def ends(self) -> bool:
        """Whether the parameter's last element lies here, or it has none."""
        return self.start + self.numel == math.prod(self.shape)


class Overlap(NamedTuple):
    """Elements that a flat range shares with one parameter."""

    slot: Slot
    # First shared element, counted from the parameter's own start.
    slot_start: int
    # First shared element, counted from the start of the range.
    range_start: int
    numel: int

    @property
    def tensor_start(self) -> int:
        """First shared element, counted from the start of the whole parameter."""
        return self.slot.start + self.slot_start


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """A unit's flat buffer: slots, dtype and the padded number of elements (a multiple of the number of ranks)."""

    index: int
    name: str
    modules: tuple[str, ...]
    dtype: str
    trainable: bool
    slots: tuple[Slot, ...]
    numel: int
    replica: Replica = Replica.NONE
    # The number of the update rule that steps it.
    rule: int = 0
    # Whether data decides if a forward uses it.
    routed: bool = False

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]

    @property
    def is_tile(self) -> bool:
        """Whether it is one of the tiles of a weight."""
        return any(slot.is_tile for slot in self.slots)

    @property
    def is_cut(self) -> bool:
        """Whether a tensor axis leaves each of its ranks a shard of the parameters."""
        return any(slot.shard is not None and slot.shard.parts > 1 for slot in self.slots)

    def partition_numel(self, parts: int) -> int:
        """Elements of one of `parts` equal partitions."""
        return self.numel // parts

    def partition_start(self, parts: int, rank: int) -> int:
        """The element at which a rank's partition begins; 0 on every rank if the unit is not partitioned."""
        return rank * self.partition_numel(parts) if parts > 1 else 0

    def overlaps(self, start: int, stop: int) -> Iterator[Overlap]:
        """The parts of parameters in the flat range [start, stop), in order, without padding."""
        for slot in self.slots:
            first, last = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if first < last:
                yield Overlap(slot, first - slot.offset, first - start, last - first)


class Slice(NamedTuple):
    """A range of one unit's partition: `start` and `numel` in elements from the partition's start."""

    unit: int
    start: int
    numel: int

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True, slots=True)
class SubGroup:
    """What the optimizer steps at once: whole partitions of consecutive units, or one slice of a large partition."""

    index: int
    slices: tuple[Slice, ...]

    @property
    def numel(self) -> int:
        # Asked of each of thousands, most of which are one slice.
        return self.slices[0].numel if len(self.slices) == 1 else sum(piece.numel for piece in self.slices)

    def placed(self) -> Iterator[tuple[Slice, int]]:
        """Yield each slice with the place of its first element in the sub-group's states."""
        at = 0
        for piece in self.slices:
            yield piece, at
            at += piece.numel


def make_layouts(spec: ModelSpec, parts: int, rules: Sequence[RuleSpec] = (RuleSpec(),)) -> tuple[UnitLayout, ...]:
    """Flat layouts of all units, padded for `parts` partitions. rules: those that step the units."""
    layouts = []
    for index, unit in enumerate(spec.units):
        block = rules[unit.rule].block if unit.trainable else 1
        alignment = max(1, CACHE_LINE // DTYPE_NBYTES[unit.dtype], block)
        slots = []
        offset = 0
        for param in unit.params:
            slots.append(
                Slot(param.name, param.shape, offset, param.numel, param.group, param.start, param.shard, param.split)
            )
            offset = align_up(offset + param.numel, alignment)
        layouts.append(
            UnitLayout(
                index=index,
                name=unit.name,
                modules=unit.modules,
                dtype=unit.dtype,
                trainable=unit.trainable,
                slots=tuple(slots),
                numel=align_up(offset, parts * max(PARTITION_ALIGNMENT, block)),
                replica=unit.replica,
                rule=unit.rule,
                routed=unit.routed,
            )  # fmt: skip
        )
    return tuple(layouts)


def cut_sub_groups(
    layouts: tuple[UnitLayout, ...], parts: int, numel_max: int, apart: frozenset[int] = frozenset(),
    alone: frozenset[int] = frozenset(), rules: Sequence[RuleSpec] = (RuleSpec(),),
) -> tuple[SubGroup, ...]:  # fmt: skip
    """Cut the trainable partitions into sub-groups of at most `numel_max` elements (rounded up to the alignment).

    Small units are joined while they fit; a partition that is too large alone is cut into near-equal slices. Units of
    which only one is in `apart` (indices), or that other rules step, are never joined; one in `alone` is joined with no
    other. Units of a rule that steps whole matrices are cut between these, however large one is, and where ranks share
    them not at all; those of a rule that looks at blocks are cut between blocks.
    """
    numel_max = align_up(max(numel_max, 1), PARTITION_ALIGNMENT)
    groups: list[tuple[Slice, ...]] = []
    open_slices: list[Slice] = []
    open_numel = 0

    def close() -> None:
        nonlocal open_slices, open_numel
        if open_slices:
            groups.append(tuple(open_slices))
        open_slices, open_numel = [], 0

    for layout in layouts:
        numel = layout.partition_numel(parts)
        if not layout.trainable or numel == 0:
            continue
        if numel > numel_max and rules[layout.rule].matrices:
            close()
            whole = [Slice(layout.index, 0, numel)] if parts > 1 else _between_matrices(layout, numel, numel_max)
            groups.extend((piece,) for piece in whole)
            continue
        if numel > numel_max:
            close()
            count = -(-numel // numel_max)
            size = align_up(-(-numel // count), max(PARTITION_ALIGNMENT, rules[layout.rule].block))
            groups.extend((Slice(layout.index, at, min(size, numel - at)),) for at in range(0, numel, size))
            continue
        joined = bool(open_slices) and (open_slices[-1].unit in apart) == (layout.index in apart)
        joined = joined and not {open_slices[-1].unit, layout.index} & alone
        joined = joined and layouts[open_slices[-1].unit].rule == layout.rule
        if open_numel + numel > numel_max or not joined:
            close()
        open_slices.append(Slice(layout.index, 0, numel))
        open_numel += numel
    close()
    return tuple(SubGroup(index, slices) for index, slices in enumerate(groups))


def _between_matrices(layout: UnitLayout, numel: int, numel_max: int) -> Iterator[Slice]:
    """A unit's only partition in slices that begin with a matrix, with as many as `numel_max` has room for."""
    begins = (slot.offset + start for slot in layout.slots for start, _ in slot.matrices())
    aligned = (at for at in begins if at % (CACHE_LINE // DTYPE_NBYTES[layout.dtype]) == 0)
    begin = 0
    for at, end in pairwise((*aligned, numel)):
        if end - begin > numel_max and at > begin:
            yield Slice(layout.index, begin, at - begin)
            begin = at
    yield Slice(layout.index, begin, numel - begin)


def matrix_owners(layout: UnitLayout, ranks: int) -> tuple[int, ...]:
    """The rank that makes each of a unit's matrices orthogonal: the costliest first, each to who has least to do."""
    costs = [math.prod(shape) * min(shape) for slot in layout.slots for _, shape in slot.matrices()]
    loads, owners = [0] * ranks, [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[at] = loads.index(min(loads))
        loads[owners[at]] += costs[at]
    return tuple(owners)


def states_of(groups: Sequence[SubGroup], unit: int) -> Iterator[tuple[Key, Slice, int]]:
    """Where the states of a unit's partition lie: (key of the states, slice of the partition, its start in them)."""
    for group in groups:
        for piece, at in group.placed():
            if piece.unit == unit:
                yield Key(Kind.STATES, group.index), piece, at
