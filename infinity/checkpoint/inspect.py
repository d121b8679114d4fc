"""Verifying a checkpoint: every byte is read at the drive's speed and compared, and every damage is reported.

The checks cover the manifest, each rank's index, the names and sizes of files, the CRC-32C of every block, whether
every element of every tensor is there once in each of its kinds, and the file of the client state.

The differences between two checkpoints, from whatever topology, stage and tiers each was saved.

Values are compared element by element: masters in fp32, joined from what each side keeps, then each kind of optimizer
state, then buffers. A block of elements of each side is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.extract import description_of
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import (
    BLOCK_NBYTES,
    BUFFER,
    MANIFEST,
    MASTER,
    PARAM,
    REMAINDER,
    FileExtent,
    FileInfo,
    Manifest,
    RankIndex,
    check_files,
    inside,
    values_numel,
)
from infinity.checkpoint.restore import CheckpointSource
from infinity.errors import CheckpointError, TransferError, listed
from infinity.ops.crc32c import checksum

# Most tensors that one finding names.
_SHOWN_MAX = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """One damage. offset: -1 for a whole file. file: "" where no file is concerned."""

    file: str
    offset: int
    nbytes: int
    tensors: tuple[str, ...]
    what: str

    def __str__(self) -> str:
        place = f"{self.file}: " if self.file else ""
        where = f"{self.nbytes:,} bytes at offset {self.offset:,} " if self.offset >= 0 else ""
        names = listed(self.tensors, _SHOWN_MAX)
        return f"{place}{where}{self.what}{f'; they hold {names}' if names and self.offset >= 0 else ''}"


def verify(
    folder: Path, manifest: Manifest, tell: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[Damage]:
    """Yield every damage of a checkpoint. tell: called with (bytes read, all bytes)."""
    indexes = []
    for rank in range(len(manifest.ranks)):
        try:
            indexes.append(manifest.index(folder, rank))
        except CheckpointError as error:
            yield Damage(manifest.ranks[rank].name, -1, 0, (), error.what)
    total = sum(extent.nbytes for index in indexes for extent in index.extents)
    done = 0
    for index in indexes:
        present = {}
        for name, nbytes in index.files.items():
            try:
                found = _size_of(inside(folder, name))
            except CheckpointError as error:
                yield Damage(name, -1, 0, (), error.what)
                continue
            if found != nbytes:
                there = "it is missing" if found is None else f"it has {found:,} bytes"
                names = _names(index, name, 0, nbytes)
                yield Damage(name, -1, 0, names, f"{there} instead of {nbytes:,}; it holds {listed(names, _SHOWN_MAX)}")
            else:
                present[name] = nbytes
        kept = [extent for extent in index.extents if extent.file in present]
        for step in _blocks(folder, manifest, index, kept):
            if isinstance(step, Damage):
                yield step
                continue
            done += step
            tell(done, total)
    # The elements of a lost index are lost, too, and reported once.
    if len(indexes) == len(manifest.ranks):
        yield from _gaps(folder, manifest, indexes)
    try:
        if "export" in manifest.module:
            description_of(folder, manifest)
    except CheckpointError as error:
        yield Damage(MANIFEST, -1, 0, (), error.what)
    if manifest.client is not None:
        yield from _client(folder, manifest.client)


def _blocks(folder: Path, manifest: Manifest, index: RankIndex, extents: list[FileExtent]) -> Iterator[int | Damage]:
    """Yield the bytes of each right block, and a Damage for each wrong one; reading goes on behind it."""
    while extents:
        position, within = 0, 0
        with ExtentReader(folder, manifest, [replace(index, extents=tuple(extents), arrays=())]) as reader:
            try:
                for nbytes in reader.verify():
                    yield nbytes
                    within += nbytes
                    while position < len(extents) and within >= extents[position].nbytes:
                        within -= extents[position].nbytes
                        position += 1
                return
            except (CheckpointError, TransferError) as error:
                extent = extents[position]
                nbytes = min(BLOCK_NBYTES, extent.nbytes - within)
                offset = extent.offset + within
                what = "are not those that were written"
                if isinstance(error, TransferError):
                    what = f"cannot be read ({error.reason})"
                yield Damage(extent.file, offset, nbytes, _names(index, extent.file, offset, offset + nbytes), what)
                rest = replace(
                    extent, offset=offset + nbytes, nbytes=extent.nbytes - within - nbytes,
                    blocks=extent.blocks[within // BLOCK_NBYTES + 1 :],
                )  # fmt: skip
                extents = [*([rest] if rest.nbytes else []), *extents[position + 1 :]]


def _names(index: RankIndex, file: str, begin: int, end: int) -> tuple[str, ...]:
    """Return the tensors (with their kinds) that have elements in bytes [begin, end) of a file."""
    found: dict[str, None] = {}
    for array in index.arrays:
        extent = index.extents[array.extent]
        at = extent.offset + array.offset
        if extent.file == file and at < end and at + array.nbytes > begin:
            found[f"{array.tensor} ({array.kind})"] = None
    return tuple(found)


def _gaps(folder: Path, manifest: Manifest, indexes: list[RankIndex]) -> Iterator[Damage]:
    with ExtentReader(folder, manifest, indexes) as reader:
        for name, info in manifest.tensors.items():
            for kind in info.kinds:
                if not reader.covered(name, kind):
                    yield Damage("", -1, 0, (name,), f"not every element of {name} ({kind}) is there once")


def _client(folder: Path, client: FileInfo) -> Iterator[Damage]:
    try:
        path = inside(folder, client.name)
    except CheckpointError as error:
        yield Damage(client.name, -1, 0, (), error.what)
        return
    if _size_of(path) != client.nbytes:
        there = "it is missing" if _size_of(path) is None else f"it has {_size_of(path):,} bytes"
        yield Damage(client.name, -1, 0, (), f"{there} instead of {client.nbytes:,}")
        return
    crc = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK_NBYTES):
            crc = checksum(block, crc)
    if crc != client.crc32c:
        yield Damage(client.name, -1, 0, (), "its bytes are not those that were written")


def _size_of(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


WEIGHT = "weight"
_BLOCK_NUMEL = 1 << 20
_OF_MASTERS = (PARAM, REMAINDER, MASTER)


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of a tensor that differs: elements that do, and the largest difference (nan where one side is)."""

    tensor: str
    kind: str
    numel: int
    changed: int
    largest: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`compared` counts tensors by kind. `unlike` are (tensor, first's kinds, second's) where one side keeps what the
    other does not. `counters` are (name, first, second) of what differs about the run.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    unlike: tuple[tuple[str, str, str], ...]
    compared: Mapping[str, int]
    changes: tuple[Change, ...]
    counters: tuple[tuple[str, Any, Any], ...]

    @property
    def same(self) -> bool:
        """Whether the two are equal."""
        return not (self.added or self.removed or self.reshaped or self.unlike or self.changes or self.counters)


def compare_checkpoints(
    first: tuple[Path, Manifest], second: tuple[Path, Manifest],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:  # fmt: skip
    """Compare two checkpoints, verifying every block that is read. tell: called with (elements done, all elements)."""
    (one_folder, one), (two_folder, two) = first, second
    both = [name for name in one.tensors if name in two.tensors]
    alike = [name for name in both if one.tensors[name].shape == two.tensors[name].shape]
    work = [(name, kind) for name in alike for kind in _kinds(one, two, name)]
    total = sum(values_numel(kind, one.tensors[name].numel) for name, kind in work)
    compared: dict[str, int] = {}
    changes = []
    done = 0
    with (
        ExtentReader(one_folder, one, check_files(one_folder, one)) as left,
        ExtentReader(two_folder, two, check_files(two_folder, two)) as right,
    ):
        sources = CheckpointSource(left), CheckpointSource(right)
        for name, kind in work:
            numel, changed, largest = values_numel(kind, one.tensors[name].numel), 0, 0.0
            compared[kind] = compared.get(kind, 0) + 1
            for a, b in zip(*(_read_blocks(source, name, kind) for source in sources), strict=True):
                count, distance = _distance(a, b)
                changed += count
                largest = distance if math.isnan(distance) or math.isnan(largest) else max(largest, distance)
                done += a.numel()
                tell(done, total)
            if changed:
                changes.append(Change(name, kind, numel, changed, largest))
    return Comparison(
        added=tuple(name for name in two.tensors if name not in one.tensors),
        removed=tuple(name for name in one.tensors if name not in two.tensors),
        reshaped=tuple(name for name in both if name not in set(alike)),
        unlike=tuple(_unlike(one, two, alike)),
        compared=compared, changes=tuple(changes), counters=tuple(_run_differences(one, two)),
    )  # fmt: skip


def _kinds(one: Manifest, two: Manifest, name: str) -> list[str]:
    """Return the kinds of a tensor that both sides keep."""
    kinds = [set(manifest.tensors[name].kinds) for manifest in (one, two)]
    shared = kinds[0] & kinds[1]
    found = [WEIGHT] if PARAM in shared else []
    return found + sorted(shared - set(_OF_MASTERS))


def _unlike(one: Manifest, two: Manifest, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield tensors of which one side keeps fewer kinds; REMAINDER and MASTER, which follow the precision, aside."""
    for name in names:
        kinds = [set(manifest.tensors[name].kinds) - {REMAINDER, MASTER} for manifest in (one, two)]
        if kinds[0] != kinds[1]:
            first, second = (", ".join(sorted(each)) or "nothing" for each in kinds)
            yield name, first, second


def _read_blocks(source: CheckpointSource, name: str, kind: str) -> Iterator[Tensor]:
    numel = values_numel(kind, source.tensors[name].numel)
    for start in range(0, numel, _BLOCK_NUMEL):
        count = min(_BLOCK_NUMEL, numel - start)
        if kind == WEIGHT:
            yield source.masters(name, start, count)
            continue
        values = source.values(name, kind, start, count)
        yield values.float() if kind != BUFFER and values.is_floating_point() else values


def _distance(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return the number of elements that differ in their bits, and the largest absolute difference."""
    if a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0, 0.0
    a, b = a.double(), b.double()
    other = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(other.any()):
        return 0, 0.0
    difference = (a[other] - b[other]).abs()
    return int(other.sum()), float(difference.max())


def _run_differences(one: Manifest, two: Manifest) -> Iterator[tuple[str, Any, Any]]:
    left, right = (dict(_flat("", {**each.engine, "client_state": each.client_state})) for each in (one, two))
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)
    tensors = [None if each.client is None else f"crc32c {each.client.crc32c:08x}" for each in (one, two)]
    if tensors[0] != tensors[1]:
        yield "tensors of client_state", tensors[0], tensors[1]


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for at, inner in enumerate(value):
            yield from _flat(f"{path}[{at}]", inner)
    else:
        yield path, value
