"""Filling a rank's partitions from a checkpoint, or from any other source of weights.

Where the checkpoint was partitioned as the plan is, whole extents are read into the partitions' memory; elsewhere each
part of a tensor is read by name and range, and of what the tensor axis cuts, this rank's runs are picked from it. Where
parameters are kept in another precision, fp32 masters are made first and stored as this plan stores them. One partition
(or sub-group) is filled at a time, so that extra memory is bounded.

`match` finds the model's tensors among the checkpoint's and reports all mismatches in one error. Safetensors files are
a source, too: of parameters only, under their own names.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import BUFFER, MASTER, PARAM, REMAINDER, FileExtent, ShardRanges, TensorInfo, in_values
from infinity.checkpoint.pieces import TensorSpan, holdings, shard_ranges
from infinity.errors import CheckpointError, listed
from infinity.log import logger
from infinity.memory.partition import DTYPES, Partition, State
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.shard_copy import read_shard, store_masters
from infinity.memory.store import TieredStore
from infinity.ops.adam import join
from infinity.ops.codes import decoded, encoded
from infinity.plan.layout import Overlap, Slice, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.spec import dtype_name
from infinity.plan.types import ADAM_MOMENTS, BLOCK_NUMEL, CODED_MOMENTS, DTYPE_NBYTES, FLOATING_DTYPES, Key, Kind

# Masters made at a time, in elements.
_CHUNK_NUMEL = 1 << 20
_COMPANIONS = (REMAINDER, MASTER)
# Adam's moments, which are made of codes where a checkpoint has these.
_IN_CODES = {kind: which for which, kind in enumerate(ADAM_MOMENTS)}
# Dtypes as which elements are moved, whatever they are.
_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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

    def read_shard(self, name: str, kind: str, shard: ShardRanges, start: int, numel: int, out: Tensor) -> bool:
        """As `read`, with elements counted in the order of a shard's; False, and nothing read, where the source does
        not have them so.
        """

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
        self.read_shard = reader.read_shard
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
    """What is filled. index, tensor: the rank's on the data and the tensor axis. names: the source's name of each of
    the model's tensors, None for one that keeps its values.

    moments: fill the optimizer's moments, too. start: the value of moments that the source does not have.
    """

    plan: Plan
    index: int
    names: Mapping[str, str | None]
    moments: bool
    start: float
    tensor: int = 0


class ShardedSource:
    """A source as a rank's partitions see it: tensors have the model's names, and elements of what the tensor axis cuts
    count in the order of the rank's shard. Any source of whole tensors serves it.
    """

    def __init__(self, filling: Filling, source: ValueSource) -> None:
        self._names = filling.names
        self._source = source
        self._shards = {
            slot.name: shard_ranges(slot, filling.tensor) for layout in filling.plan.layouts for slot in layout.slots
        }
        self._room = torch.empty(0, dtype=torch.uint8, device="cpu")

    def info(self, name: str) -> TensorInfo | None:
        """Return what the source has of a tensor; None where it has none and the values stay."""
        source = self._names[name]
        return None if source is None else self._source.tensors[source]

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel) as `ValueSource.masters` does; valid until the next call."""
        source, shard = self._names[name], self._shards[name]
        assert source is not None
        if shard is None:
            return self._source.masters(source, start, numel)
        info = self._source.tensors[source]
        dtype = torch.float32 if info.dtype in FLOATING_DTYPES else DTYPES[info.dtype]
        if self._room.numel() < numel * dtype.itemsize:
            self._room = page_aligned(numel * dtype.itemsize)
        found = self._room[: numel * dtype.itemsize].view(dtype)

        def read(first: int, out: Tensor) -> None:
            for at in range(0, out.numel(), _CHUNK_NUMEL):
                part = out[at : at + _CHUNK_NUMEL]
                part.copy_(self._source.masters(source, first + at, part.numel()))

        read_shard(read, info.shape, shard.dim, shard.ranges, start, found)
        return found

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """Read elements of one kind, unconverted, into `out` ([numel], of the kind's width, or as bytes)."""
        source, shard = self._names[name], self._shards[name]
        assert source is not None
        if shard is None:
            self._source.read(source, kind, start, numel, out)
        elif numel and not self._source.read_shard(source, kind, shard, start, numel, out):
            values = out.view(_BY_WIDTH[out.nbytes // numel])
            read_shard(
                lambda first, part: self._source.read(source, kind, first, part.numel(), part),
                *in_values(kind, self._source.tensors[source].shape, shard), start, values,
            )  # fmt: skip

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """Return the extent that holds exactly the arrays of a piece; None where there is none, or names differ."""
        renamed = any(self._names[array.tensor] != array.tensor for array in piece.arrays)
        return None if renamed else self._source.extent_of(piece)

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Read bytes of an extent from `begin` on into `target` ([n] uint8)."""
        self._source.read_bytes(extent, begin, target)


def fill_partitions(filling: Filling, store: TieredStore, values: ValueSource) -> None:
    """Fill this rank's partitions from a source."""
    source = ShardedSource(filling, values)
    pieces = holdings(filling.plan, filling.index, filling.tensor)
    raw = all(_is_raw(filling, source, piece) for piece in pieces)
    for piece in pieces:
        if not piece.nbytes:
            continue
        if store[piece.key].state is State.FAILED:
            store.discard(piece.key)
        if raw:
            _fill_raw(filling, store, source, piece)
        elif piece.key.kind is Kind.STATES:
            _fill_group(filling, store, source, piece)
        elif not filling.plan.layouts[piece.key.index].trainable:
            _fill_frozen(store, source, piece)
    store.settle()


def _is_raw(filling: Filling, source: ShardedSource, piece: TensorSpan) -> bool:
    """Return whether the source keeps the same kinds in the same dtypes as the plan, so that bytes can be copied."""
    for array in piece.arrays:
        info = source.info(array.tensor)
        if info is None or (array.kind not in (PARAM, *_COMPANIONS) and not filling.moments):
            continue
        if array.kind not in info.kinds or (array.kind == PARAM and info.dtype != array.dtype):
            return False
    return True


def _fill_raw(filling: Filling, store: TieredStore, source: ShardedSource, piece: TensorSpan) -> None:
    wanted = [
        array
        for array in piece.arrays
        if source.info(array.tensor) is not None and (filling.moments or array.kind in (PARAM, *_COMPANIONS))
    ]
    if not wanted:
        return
    whole = len(wanted) == len(piece.arrays)
    extent = source.extent_of(piece) if whole else None
    with store.write(piece.key, fresh=whole) as (partition,):
        assert partition.buffer is not None
        if extent is not None:
            nbytes = min(piece.nbytes, extent.nbytes)
            source.read_bytes(extent, 0, partition.buffer[:nbytes])
        else:
            for array in wanted:
                out = partition.buffer[array.offset : array.offset + array.nbytes]
                source.read(array.tensor, array.kind, array.start, array.numel, out)
    store.flush(piece.key)


def _fill_frozen(store: TieredStore, source: ShardedSource, piece: TensorSpan) -> None:
    """Fill a unit that is not trained from another dtype."""
    with store.write(piece.key) as (partition,):
        values = partition.view(Kind.PARAM)
        for array in piece.arrays:
            if source.info(array.tensor) is None:
                continue
            first = array.offset // DTYPE_NBYTES[array.dtype]
            for begin in range(0, array.numel, _CHUNK_NUMEL):
                numel = min(_CHUNK_NUMEL, array.numel - begin)
                masters = source.masters(array.tensor, array.start + begin, numel)
                values[first + begin : first + begin + numel].copy_(masters)
    store.flush(piece.key)


def _fill_group(filling: Filling, store: TieredStore, source: ShardedSource, piece: TensorSpan) -> None:
    """Fill a sub-group's masters, which lie in its parameters and its states, and its moments."""
    plan = filling.plan
    group = plan.sub_groups[piece.key.index]
    params = [Key(Kind.PARAM, each.unit) for each in group.slices]
    with store.write(piece.key) as (states,), store.write(*params) as partitions:
        by_unit = dict(zip((key.index for key in params), partitions, strict=True))
        for part, at, overlap in _overlaps(plan, filling.index, group):
            name = overlap.slot.name
            if source.info(name) is None:
                continue
            target = by_unit[part.unit].view(Kind.PARAM)[part.start + overlap.range_start :][: overlap.numel]
            first = at + overlap.range_start
            for begin in range(0, overlap.numel, _CHUNK_NUMEL):
                piece_of = target[begin : begin + _CHUNK_NUMEL]
                masters = source.masters(name, overlap.tensor_start + begin, piece_of.numel())
                store_masters(masters.float(), piece_of, states, first + begin)
            if filling.moments:
                moments = plan.rule_of(group).moments
                _fill_moments(moments, filling.start, source, states, overlap, first)
    store.flush(piece.key, *params)


def _fill_moments(
    moments: Sequence[Kind], start: float, source: ShardedSource, states: Partition, overlap: Overlap, first: int
) -> None:
    name = overlap.slot.name
    info = source.info(name)
    kept = () if info is None else info.kinds

    def read(kind: Kind, out: Tensor) -> None:
        source.read(name, kind.value, overlap.tensor_start // kind.block, out.numel(), out)

    views = {kind: states.view(kind)[kind.span(first, overlap.numel)] for kind in moments}
    if moments == CODED_MOMENTS and kept and not {kind.value for kind in CODED_MOMENTS} & {*kept}:
        for which, kind in enumerate(ADAM_MOMENTS):
            values = torch.zeros(overlap.numel, dtype=torch.float32, device="cpu")
            if kind.value in kept:
                read(kind, values)
            for coded, made in zip(CODED_MOMENTS[2 * which :], encoded(values, which), strict=False):
                views[coded].copy_(made)
        return
    for kind, values in views.items():
        if kind.value in kept:
            read(kind, values)
        elif kind in _IN_CODES and (codes := CODED_MOMENTS[2 * _IN_CODES[kind]]).value in kept:
            scales = CODED_MOMENTS[2 * _IN_CODES[kind] + 1]
            blocks = -(-overlap.numel // BLOCK_NUMEL)
            read(codes, found := torch.empty(overlap.numel, dtype=torch.uint8, device="cpu"))
            read(scales, above := torch.empty(blocks, dtype=torch.float32, device="cpu"))
            values.copy_(decoded(found, above, _IN_CODES[kind]))
        else:
            values.fill_(start)


def _overlaps(plan: Plan, index: int, group: SubGroup) -> Iterator[tuple[Slice, int, Overlap]]:
    """Yield (slice of a unit's partition, its start in the states, part of a tensor in it) of a sub-group."""
    for piece, at in group.placed():
        layout, parts = plan.layouts[piece.unit], plan.placement.units[piece.unit].parts
        flat = layout.partition_start(parts, index) + piece.start
        for overlap in layout.overlaps(flat, flat + piece.numel):
            yield piece, at, overlap


# Most names of a kind that one message lists.
_SHOWN_MAX = 20


@dataclass
class Match:
    """The result. `source`: by the model's name of a tensor, the checkpoint's, or None where it has none."""

    source: dict[str, str | None] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    # Parameters that were left out on purpose.
    excluded: list[str] = field(default_factory=list)


def match(
    wanted: Mapping[str, TensorInfo], aliases: Mapping[str, str], saved: Mapping[str, TensorInfo],
    tied: Mapping[str, str],
) -> Match:  # fmt: skip
    """Compare the model's tensors with a checkpoint's. aliases, tied: further names of tensors on either side."""
    names: dict[str, list[str]] = {name: [name] for name in wanted}
    for alias, name in aliases.items():
        if name in names:
            names[name].append(alias)
    found, taken = Match(), set[str]()
    for name, info in wanted.items():
        sources = [tied.get(each, each) for each in names[name]]
        source = next((each for each in sources if each in saved), None)
        taken.update(each for each in sources if each in saved)
        found.source[name] = None
        if source is None:
            found.missing.append(name)
        elif saved[source].shape != info.shape:
            found.mismatched.append(f"{name} is {list(info.shape)} in the model and {list(saved[source].shape)} here")
        elif BUFFER in saved[source].kinds and BUFFER not in info.kinds:
            found.mismatched.append(f"{name} is a parameter in the model and a buffer here")
        elif not saved[source].kinds:
            (found.missing if info.trainable else found.excluded).append(name)
        elif saved[source].dtype != info.dtype and not {saved[source].dtype, info.dtype} <= {*FLOATING_DTYPES}:
            found.mismatched.append(f"{name} is {info.dtype} in the model and {saved[source].dtype} here")
        else:
            found.source[name] = source
    found.unexpected.extend(name for name in saved if name not in taken)
    return found


def report_mismatch(found: Match, path: object, *, strict: bool) -> None:
    """Raise CheckpointError with every mismatch. strict=False: missing and unexpected tensors are a warning only."""
    lines = [
        f"{kind}: {listed(names, _SHOWN_MAX)}"
        for kind, names in (
            ("missing in the checkpoint", [_suggest(name, found.unexpected) for name in found.missing]),
            ("not in the model", [_suggest(name, found.missing) for name in found.unexpected]),
            ("of another shape or type", found.mismatched),
        )
        if names
    ]
    if found.excluded:
        logger.info("%s holds no frozen parameters: %d keep the model's values", path, len(found.excluded))
    if not lines:
        return
    text = "it and the model do not match.\n  " + "\n  ".join(lines)
    if strict or found.mismatched:
        advice = "Build the model that was saved" + (
            "" if found.mismatched else ", or pass load_module_strict=False to load what matches"
        )
        raise CheckpointError(path, text + "\nNothing was loaded", advice)
    logger.warning("%s: %s\nWhat is missing keeps the model's values.", path, text)


def _suggest(name: str, others: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.6)
    return f"{name} (did you mean {near[0]}?)" if near else name


class StoredLike(Protocol):
    """A tensor in a file."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, start: int, target: Tensor) -> None: ...


class Stored:
    """See `infinity.checkpoint.restore.ValueSource`."""

    def __init__(self, tensors: Mapping[str, StoredLike]) -> None:
        self.tensors = {
            name: TensorInfo(tensor.shape, dtype_name(tensor.dtype), trainable=False, kinds=(PARAM,))
            for name, tensor in tensors.items()
        }
        self._stored = tensors

    def masters(self, name: str, start: int, numel: int) -> Tensor:
        """Return elements [start, start + numel), in fp32 where the tensor is floating."""
        stored = self._stored[name]
        dtype = torch.float32 if stored.dtype.is_floating_point else stored.dtype
        values = torch.empty(numel, dtype=dtype, device="cpu")
        stored.read(start, values)
        return values

    def read(self, name: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """Read elements, unconverted, into `out`."""
        stored = self._stored[name]
        stored.read(start, out.view(stored.dtype))

    def read_shard(self, name: str, kind: str, shard: ShardRanges, start: int, numel: int, out: Tensor) -> bool:
        """Return False: tensors are whole."""
        return False

    def extent_of(self, piece: TensorSpan) -> FileExtent | None:
        """Return None: there are no extents."""
        return None

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Never called, because there are no extents."""
        raise NotImplementedError
