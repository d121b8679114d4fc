"""Filling a rank's partitions from a checkpoint, or from any other source of weights.

Where the checkpoint was partitioned as the plan is, whole extents are read into the partitions' memory; elsewhere each
part of a tensor is read by name and range. Where parameters are kept in another precision, fp32 masters are made first
and stored as this plan stores them. One partition (or sub-group) is filled at a time, so that extra memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import MASTER, PARAM, REMAINDER, FileExtent, TensorInfo
from infinity.checkpoint.pieces import TensorSpan, holdings
from infinity.memory.master_weights import store_masters
from infinity.memory.pages import page_aligned
from infinity.memory.partition import DTYPES, Partition, State
from infinity.memory.store import TieredStore
from infinity.ops.adam import join
from infinity.plan.layout import Overlap, Slice, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.types import DTYPE_NBYTES, Key, Kind

# Masters made at a time, in elements.
_CHUNK_NUMEL = 1 << 20
_COMPANIONS = (REMAINDER, MASTER)


class ValueSource(Protocol):
    """A source of the model's values: a checkpoint, or a folder of weights."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The source's tensors by name, and the kinds that it has of each."""

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel) on the CPU, in fp32 (or the tensor's dtype, if that is not floating);
        valid until the next call.
        """

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """Read elements of one kind, unconverted, into `out` ([numel], of the kind's width)."""

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """Return the extent that holds exactly the arrays of a piece; None where there is none."""

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Read bytes of an extent from `begin` on into `target` ([n] uint8)."""


class CheckpointSource:
    """A checkpoint as a source. It returns views of memory that it reuses: a new allocation for each tensor would
    fragment the C library's heap.
    """

    def __init__(self, reader: ExtentReader) -> None:
        self.tensors = reader.manifest.tensors
        self._reader = reader
        self.read = reader.read
        self.read_bytes = reader.read_bytes
        self._rooms: dict[str, Tensor] = {}

    def values(self, name: str, kind: str, start: int, numel: int) -> Tensor:
        """Return elements of one kind, in its dtype; valid until the next call."""
        values = self._room(kind, numel, DTYPES[self._reader.dtype(name, kind)])
        self.read(name, kind, start, numel, values)
        return values

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """See `ValueSource`."""
        kinds = self.tensors[name].kinds
        values = self.values(name, MASTER if MASTER in kinds else PARAM, start, numel)
        if not values.is_floating_point() or (values.dtype is torch.float32 and REMAINDER not in kinds):
            return values
        masters = self._room("masters", numel, torch.float32)
        if REMAINDER not in kinds:
            return masters.copy_(values)
        remainder = self._room(REMAINDER, numel, torch.int16)
        self.read(name, REMAINDER, start, numel, remainder)
        for begin in range(0, numel, _CHUNK_NUMEL):
            chunk = slice(begin, begin + _CHUNK_NUMEL)
            masters[chunk] = join(values[chunk], remainder[chunk])
        return masters

    def _room(self, use: str, numel: int, dtype: torch.dtype) -> Tensor:
        nbytes = numel * dtype.itemsize
        room = self._rooms.get(use)
        if room is None or room.numel() < nbytes:
            room = self._rooms[use] = page_aligned(nbytes)
        return room[:nbytes].view(dtype)

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """See `ValueSource`."""
        found = (index.extent_of(piece.arrays) for index in self._reader.indexes)
        return next((extent for extent in found if extent is not None), None)


@dataclass(frozen=True, slots=True)
class Filling:
    """What is filled. names: the source's name of each of the model's tensors, None for one that keeps its values.

    moments: fill the optimizer's moments, too. start: the value of moments that the source does not have.
    """

    plan: Plan
    index: int
    names: Mapping[str, str | None]
    moments: bool
    start: float


def fill_partitions(filling: Filling, store: TieredStore, source: ValueSource) -> None:
    """Fill this rank's partitions from a source."""
    raw = all(_is_raw(filling, source, piece) for piece in holdings(filling.plan, filling.index))
    for piece in holdings(filling.plan, filling.index):
        if not piece.nbytes:
            continue
        if store[piece.key].state is State.FAILED:
            store.discard(piece.key)
        if raw:
            _fill_raw(filling, store, source, piece)
        elif piece.key.kind is Kind.STATES:
            _fill_group(filling, store, source, piece)
        elif not filling.plan.layouts[piece.key.index].trainable:
            _fill_frozen(filling, store, source, piece)
    store.settle()


def _is_raw(filling: Filling, source: ValueSource, piece: TensorSpan) -> bool:
    """Return whether the source keeps the same kinds in the same dtypes as the plan, so that bytes can be copied."""
    for array in piece.arrays:
        name = filling.names[array.tensor]
        if name is None or (array.kind not in (PARAM, *_COMPANIONS) and not filling.moments):
            continue
        info = source.tensors[name]
        if array.kind not in info.kinds or (array.kind == PARAM and info.dtype != array.dtype):
            return False
    return True


def _fill_raw(filling: Filling, store: TieredStore, source: ValueSource, piece: TensorSpan) -> None:
    wanted = [
        array
        for array in piece.arrays
        if filling.names[array.tensor] is not None and (filling.moments or array.kind in (PARAM, *_COMPANIONS))
    ]
    if not wanted:
        return
    whole = len(wanted) == len(piece.arrays)
    renamed = any(filling.names[array.tensor] != array.tensor for array in wanted)
    extent = source.extent_of(piece) if whole and not renamed else None
    with store.write(piece.key, fresh=whole) as (partition,):
        assert partition.buffer is not None
        if extent is not None:
            nbytes = min(piece.nbytes, extent.nbytes)
            source.read_bytes(extent, 0, partition.buffer[:nbytes])
        else:
            for array in wanted:
                name = filling.names[array.tensor]
                assert name is not None
                out = partition.buffer[array.offset : array.offset + array.nbytes]
                source.read(name, array.kind, array.start, array.numel, out)
    store.flush(piece.key)


def _fill_frozen(filling: Filling, store: TieredStore, source: ValueSource, piece: TensorSpan) -> None:
    """Fill a unit that is not trained from another dtype."""
    with store.write(piece.key) as (partition,):
        values = partition.view(Kind.PARAM)
        for array in piece.arrays:
            name = filling.names[array.tensor]
            first = array.offset // DTYPE_NBYTES[array.dtype]
            for begin in range(0, array.numel if name is not None else 0, _CHUNK_NUMEL):
                assert name is not None
                numel = min(_CHUNK_NUMEL, array.numel - begin)
                masters = source.masters(name, array.start + begin, numel)
                values[first + begin : first + begin + numel].copy_(masters)
    store.flush(piece.key)


def _fill_group(filling: Filling, store: TieredStore, source: ValueSource, piece: TensorSpan) -> None:
    """Fill a sub-group's masters, which lie in its parameters and its states, and its moments."""
    plan = filling.plan
    group = plan.sub_groups[piece.key.index]
    params = [Key(Kind.PARAM, each.unit) for each in group.slices]
    with store.write(piece.key) as (states,), store.write(*params) as partitions:
        by_unit = dict(zip((key.index for key in params), partitions, strict=True))
        for part, at, overlap in _overlaps(plan, filling.index, group):
            name = filling.names[overlap.slot.name]
            if name is None:
                continue
            target = by_unit[part.unit].view(Kind.PARAM)[part.start + overlap.range_start :][: overlap.numel]
            first = at + overlap.range_start
            for begin in range(0, overlap.numel, _CHUNK_NUMEL):
                piece_of = target[begin : begin + _CHUNK_NUMEL]
                masters = source.masters(name, overlap.tensor_start + begin, piece_of.numel())
                store_masters(masters.float(), piece_of, states, first + begin)
            if filling.moments:
                _fill_moments(filling, source, states, name, overlap, first)
    store.flush(piece.key, *params)


def _fill_moments(
    filling: Filling, source: ValueSource, states: Partition, name: str, overlap: Overlap, first: int
) -> None:
    for kind in filling.plan.request.moments:
        values = states.view(kind)[first : first + overlap.numel]
        if kind.value in source.tensors[name].kinds:
            source.read(name, kind.value, overlap.tensor_start, overlap.numel, values)
        else:
            values.fill_(filling.start)


def _overlaps(plan: Plan, index: int, group: SubGroup) -> Iterator[tuple[Slice, int, Overlap]]:
    """Yield (slice of a unit's partition, its start in the states, part of a tensor in it) of a sub-group."""
    for piece, at in group.placed():
        layout, parts = plan.layouts[piece.unit], plan.placement.units[piece.unit].parts
        flat = layout.partition_start(parts, index) + piece.start
        for overlap in layout.overlaps(flat, flat + piece.numel):
            yield piece, at, overlap
