"""Verifying a checkpoint: every byte is read at the drive's speed and compared, and every damage is reported.

The checks cover the manifest, each rank's index, the names and sizes of files, the CRC-32C of every block, whether
every element of every tensor is there once in each of its kinds, and the file of the client state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from infinity.checkpoint.extract import description_of
from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import BLOCK_NBYTES, MANIFEST, FileExtent, FileInfo, Manifest, RankIndex, inside
from infinity.errors import CheckpointError, TransferError, listed
from infinity.ops.checksum import checksum

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
