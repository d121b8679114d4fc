"""The format on disk: a folder for each checkpoint; for each rank a few large files and an index; a manifest.

    DIR/latest                             the tag that a load without one takes
    DIR/TAG/manifest.json                  written last; a folder without it is no checkpoint
    DIR/TAG/ID.rank-00000.json             what rank 0's files hold: which elements of which tensor lie where
    DIR/TAG/ID.rank-00000.weights.bin      parameters that are trained, and on rank 0 the module's buffers
    DIR/TAG/ID.rank-00000.frozen.bin       parameters that are not
    DIR/TAG/ID.rank-00000.states.bin       what completes parameters to masters, and the optimizer's moments
    DIR/TAG/ID.client.safetensors          tensors of the program's own state

Elements are addressed by global tensor name and range, of the whole tensor or of a shard that says how it lies in it,
so the format does not depend on the number of ranks. docs/checkpoint_format.md is the specification for readers. This
module and its imports need no torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from infinity.checkpoint.file_names import (
    LATEST,
    MANIFEST,
    TEMPORARY,
    identity_of,
    index_name,
    inside,
    is_ours,
    is_tag,
)
from infinity.checkpoint.json_bodies import (
    ALIGNMENT,
    BLOCK_NBYTES,
    BUFFER,
    MASTER,
    PARAM,
    REMAINDER,
    IndexBody,
    ManifestBody,
    disagreement,
    explained,
)
from infinity.config.untrusted import METADATA_NBYTES_MAX, parse_json, read_metadata, reason, shortened
from infinity.errors import CheckpointError, TransferError
from infinity.ops.checksum import checksum
from infinity.plan.shards import Range, local_numel
from infinity.plan.types import DTYPE_NBYTES

# Re-exported: a reader of the format imports this module alone.
__all__ = [
    "ALIGNMENT", "BLOCK_NBYTES", "BUFFER", "DTYPE_NBYTES", "LATEST", "MANIFEST", "MASTER", "PARAM", "REMAINDER",
    "identity_of", "index_name", "inside", "is_tag",
]  # fmt: skip

FORMAT = "infinity checkpoint"
VERSION = 2
# Those that are read: version 1 has no shards.
_READ_VERSIONS = (1, VERSION)


_Record = TypeVar("_Record", bound="_Written")


def canonical(value: Any) -> bytes:
    """Return the canonical bytes of a JSON value: keys sorted, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()


def seal(body: Any) -> bytes:
    """Return a metadata file: the body and the CRC-32C of its canonical bytes."""
    text = canonical(body)
    return b'{"body":' + text + b',"crc32c":' + str(checksum(text)).encode() + b"}\n"


def unseal(data: bytes, *, path: Path | str) -> Any:
    """Return the body of a metadata file; CheckpointError unless its checksum matches."""
    # Read by position, because the frame around the body is fixed.
    begin, end = len(b'{"body":'), data.rfind(b',"crc32c":')
    text, rest = data[begin:end], data[end:]
    if end < begin or data[:begin] != b'{"body":' or rest != b',"crc32c":%d}\n' % checksum(text):
        raise CheckpointError(
            path, f"its {len(data)} bytes are not those that were written (the checksum differs)",
            "Load an older checkpoint, or copy the file again from where it is whole",
        )  # fmt: skip
    try:
        return parse_json(text)
    except ValueError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path | str, error: Exception) -> CheckpointError:
    return CheckpointError(
        path, f"it is not the metadata of a checkpoint of format version {VERSION} ({explained(error)})",
        "Load it with the version of infinity that has written it, or load another checkpoint",
    )  # fmt: skip


class _Written:
    """A record that is stored as a metadata file."""

    def to_bytes(self) -> bytes:
        """Return the file's content; CheckpointError where it exceeds what a load reads."""
        data = seal(self.body())
        if len(data) > METADATA_NBYTES_MAX:
            raise CheckpointError(
                "metadata", f"it has {len(data):,} bytes, and at most {METADATA_NBYTES_MAX:,} are read",
                "Keep what is large in client_state as tensors or arrays",
            )  # fmt: skip
        return data

    def body(self) -> dict[str, Any]:
        """Return the record as JSON."""
        raise NotImplementedError

    @classmethod
    def of(cls: type[_Record], body: Any) -> _Record:
        """Return the record that `body()` encoded; ValueError for anything else."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls: type[_Record], data: bytes, *, path: Path | str) -> _Record:
        """Return the record of a file's content; CheckpointError about `path` where it is damaged or another."""
        body = unseal(data, path=path)
        try:
            return cls.of(body)
        except ValueError as error:
            raise _unreadable(path, error) from error

    @classmethod
    def read(cls: type[_Record], path: Path) -> _Record:
        """Return the record of a file; CheckpointError where it cannot be read."""
        try:
            data = read_metadata(inside(path.parent, path.name))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                path, f"it cannot be read ({reason(error)})", "Load another checkpoint of the folder"
            ) from error
        return cls.from_bytes(data, path=path)


@dataclass(frozen=True, slots=True)
class FileExtent:
    """A range of a file's bytes, with the CRC-32C of each of its blocks."""

    file: str
    offset: int
    nbytes: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShardRanges:
    """What a shard has of a tensor: ranges along dimension `dim`, in order, without overlap, none empty."""

    dim: int
    ranges: tuple[Range, ...]

    def numel(self, shape: Sequence[int]) -> int:
        """Elements of the shard, of a tensor of shape `shape`."""
        return local_numel(shape, self.dim, self.ranges)


@dataclass(frozen=True, slots=True)
class Array:
    """Elements [start, start + numel) of a tensor, flat in C order: at byte `offset` of extent number `extent`.

    shard: the range counts in the order of this shard's elements; None: in the tensor's.
    """

    tensor: str
    kind: str
    dtype: str
    start: int
    numel: int
    extent: int
    offset: int
    shard: ShardRanges | None = None

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True)
class RankIndex(_Written):
    """What one rank has written. `files`: sizes in bytes by name."""

    rank: int
    files: dict[str, int]
    extents: tuple[FileExtent, ...]
    arrays: tuple[Array, ...]
    # The rank's random-number generators.
    rng: dict[str, Any] = field(default_factory=dict)
    # What the optimizer keeps of a parameter in one value, by name.
    singles: dict[str, Any] = field(default_factory=dict)
    # Extents with their arrays, by the first array; filled at the first use.
    _by_first: dict[tuple[str, str, int], tuple[int, list[Array]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def body(self) -> dict[str, Any]:
        """See `_Written`."""
        numbers: dict[ShardRanges | None, int | None] = {None: None}
        for array in self.arrays:
            numbers.setdefault(array.shard, len(numbers) - 1)
        return {
            "rank": self.rank, "files": self.files, "rng": self.rng, "singles": self.singles,
            "extents": [[each.file, each.offset, each.nbytes, list(each.blocks)] for each in self.extents],
            "shards": [[each.dim, [list(pair) for pair in each.ranges]] for each in numbers if each is not None],
            "arrays": [
                [
                    each.tensor, each.kind, each.dtype, each.start, each.numel, each.extent, each.offset,
                    numbers[each.shard],
                ]
                for each in self.arrays
            ],
        }  # fmt: skip

    def extent_of(self, arrays: Sequence[Array]) -> FileExtent | None:
        """Return the extent that holds exactly these arrays at these offsets; None where there is none.

        The arrays' own `extent` is ignored.
        """
        if not self._by_first and self.arrays:
            grouped: dict[int, list[Array]] = {}
            for array in self.arrays:
                grouped.setdefault(array.extent, []).append(replace(array, extent=0))
            for at, held in grouped.items():
                self._by_first[held[0].tensor, held[0].kind, held[0].start] = at, held
        first = arrays[0]
        at, held = self._by_first.get((first.tensor, first.kind, first.start), (0, []))
        return self.extents[at] if held == [replace(array, extent=0) for array in arrays] else None

    @classmethod
    def of(cls, body: Any) -> RankIndex:
        """See `_Written`."""
        found = IndexBody.model_validate(body)
        extents = tuple(FileExtent(name, offset, nbytes, tuple(crcs)) for name, offset, nbytes, crcs in found.extents)
        shards = [ShardRanges(dim, tuple(ranges)) for dim, ranges in found.shards]
        arrays = tuple(Array(*row[:7], None if row[7] is None else shards[row[7]]) for row in found.arrays)
        return cls(found.rank, found.files, extents, arrays, found.rng, found.singles)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the model. `kinds` are those of which every element is in the files."""

    shape: tuple[int, ...]
    dtype: str
    trainable: bool
    kinds: tuple[str, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file with the size and checksum that the manifest records."""

    name: str
    nbytes: int
    crc32c: int

    def read(self, folder: Path) -> bytes:
        """Return the file's content; CheckpointError unless it matches."""
        path = inside(folder, self.name)
        try:
            data = read_metadata(path, self.nbytes)
        except (OSError, ValueError, MemoryError) as error:
            raise CheckpointError(
                path, f"the manifest names it, but it cannot be read ({reason(error)})",
                "Load another checkpoint of the folder",
            ) from error  # fmt: skip
        if len(data) != self.nbytes or checksum(data) != self.crc32c:
            raise CheckpointError(
                path, f"it is not the file of {self.nbytes} bytes that the manifest vouches for",
                "Load another checkpoint of the folder",
            )  # fmt: skip
        return data


@dataclass(frozen=True)
class Manifest(_Written):
    """The checkpoint as a whole. `engine` and `client_state` are encoded by `infinity.checkpoint.codec`."""

    id: str
    tag: str
    # Increases with every checkpoint of a folder.
    number: int
    time: str
    versions: dict[str, str]
    # fingerprint, stage, world_size (all ranks), pp, dp and tp (of them, on each axis), compute_dtype.
    plan: dict[str, Any]
    tensors: dict[str, TensorInfo]
    # Other names of tensors.
    tied: dict[str, str]
    # Rank indexes, by rank.
    ranks: tuple[FileInfo, ...]
    engine: dict[str, Any]
    client_state: Any
    # The tensors of `client_state`.
    client: FileInfo | None
    # Class of the module, and its configuration where it is a Hugging Face model.
    module: dict[str, Any]

    @property
    def steps(self) -> int:
        """Optimizer steps of the run at the save."""
        return int(self.engine["counters"]["global_steps"])

    @property
    def axes(self) -> tuple[int, int, int]:
        """Ranks on the pipeline, the data and the tensor axis of the run that was saved; without a note of an axis it
        had one. Version 1 had the data axis alone.
        """
        plan = self.plan
        return int(plan.get("pp", 1)), int(plan.get("dp", plan["world_size"])), int(plan.get("tp", 1))

    def body(self) -> dict[str, Any]:
        """See `_Written`."""
        names = ("id", "tag", "number", "time", "versions", "plan", "tied", "engine", "client_state", "module")
        return {
            "format": FORMAT, "version": VERSION, **{name: getattr(self, name) for name in names},
            "tensors": {name: asdict(info) for name, info in self.tensors.items()},
            "ranks": [asdict(info) for info in self.ranks],
            "client": None if self.client is None else asdict(self.client),
        }  # fmt: skip

    @classmethod
    def of(cls, body: Any) -> Manifest:
        """See `_Written`."""
        said = (body.get("format"), body.get("version")) if isinstance(body, dict) else (None, None)
        if said[0] != FORMAT or type(said[1]) is not int or said[1] not in _READ_VERSIONS:
            raise ValueError(f"format {shortened(said[0])}, version {shortened(said[1])}")
        found = ManifestBody.model_validate(body)
        names = ("versions", "plan", "engine", "client_state", "module")
        return cls(
            id=found.id, tag=found.tag, number=found.number, time=found.time, tied=found.tied,
            tensors={
                name: TensorInfo(info.shape, info.dtype, info.trainable, info.kinds)
                for name, info in found.tensors.items()
            },
            ranks=tuple(FileInfo(info.name, info.nbytes, info.crc32c) for info in found.ranks),
            client=None if found.client is None else FileInfo(**found.client.model_dump()),
            **{name: body[name] for name in names},
        )  # fmt: skip

    def index(self, folder: Path, rank: int) -> RankIndex:
        """Return one rank's index; CheckpointError unless it is the recorded file and agrees with the manifest."""
        info = self.ranks[rank]
        path = folder / info.name
        index = RankIndex.from_bytes(info.read(folder), path=path)
        wrong = disagreement(index.arrays, self.tensors)
        if index.rank != rank:
            wrong = f"it is rank {index.rank}'s, not rank {rank}'s"
        if wrong:
            raise CheckpointError(path, f"it does not suit the manifest: {wrong}", "Load another checkpoint")
        return index


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint's folder; CheckpointError where it cannot be read."""
    return Manifest.read(folder / MANIFEST)


def latest_tag(directory: Path | str) -> str | None:
    """Return the tag in DIR/latest; None without that file. CheckpointError where it holds no tag."""
    path = Path(directory) / LATEST
    try:
        tag = read_metadata(inside(Path(directory), LATEST), 4096).decode(errors="replace").removesuffix("\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise CheckpointError(path, f"it cannot be read ({reason(error)})", "Pass a tag, or call resume()") from error
    if not is_tag(tag) or not tag.isprintable() or "\ufffd" in tag:
        raise CheckpointError(path, f"it names no checkpoint, but {shortened(tag)}", "Pass a tag, or call resume()")
    return tag


def find(directory: Path | str, tag: str | None = None) -> Path | None:
    """Return the folder of a tag's checkpoint, by default that of DIR/latest; None where it has no manifest."""
    tag = latest_tag(directory) if tag is None else tag
    if tag is None:
        return None
    folder = Path(directory) / tag
    return folder if (folder / MANIFEST).is_file() else None


def checkpoint_folders(directory: Path | str) -> Iterator[Path]:
    """Yield the folders below DIR that hold files of checkpoints, complete or not."""
    try:
        paths = sorted(Path(directory).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in paths:
        names: list[str] = []
        # A file, an unreadable folder (lost+found), or one that was removed meanwhile.
        with suppress(OSError):
            names = os.listdir(path)
        if any(is_ours(name) for name in names):
            yield path


def complete(directory: Path | str) -> list[tuple[Path, Manifest]]:
    """Return all checkpoints in DIR whose manifest, indexes and file sizes are right, the newest first."""
    found = [(path, manifest) for path, manifest, why in _examined(directory) if manifest is not None and not why]
    return sorted(found, key=lambda pair: pair[1].number, reverse=True)


def broken(directory: Path | str) -> list[tuple[Path, str]]:
    """Return the folders in DIR without a loadable checkpoint, each with the reason."""
    return [(path, why) for path, _, why in _examined(directory) if why]


def check_files(folder: Path, manifest: Manifest) -> list[RankIndex]:
    """Return all indexes; CheckpointError where one is damaged, or a file is missing or has another size."""
    indexes = [manifest.index(folder, rank) for rank in range(len(manifest.ranks))]
    files = [(name, nbytes) for index in indexes for name, nbytes in index.files.items()]
    if manifest.client is not None:
        files.append((manifest.client.name, manifest.client.nbytes))
    for name, nbytes in files:
        path = inside(folder, name)
        held = path.stat().st_size if path.is_file() else None
        if held != nbytes:
            there = "it is missing" if held is None else f"it has {held} bytes"
            raise CheckpointError(
                path, f"{there}; the index says {nbytes}", "Load another checkpoint of the folder"
            )
    return indexes


def replace_file(path: Path, data: bytes) -> None:
    """Replace the content of `path` atomically, and return when the drive has it.

    TransferError where that fails.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        # Removes the leftover of a killed save, and never writes through a link.
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        raise TransferError(
            "write", path=str(path), offset=0, nbytes=len(data), errno=error.errno or 0, reason=reason(error)
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Return when the drive has the folder's entries."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _examined(directory: Path | str) -> Iterator[tuple[Path, Manifest | None, str]]:
    for folder in checkpoint_folders(directory):
        if not (folder / MANIFEST).is_file():
            yield folder, None, "it has no manifest: the save did not come to its end"
            continue
        manifest = None
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest)
        except CheckpointError as error:
            yield folder, manifest, str(error)
        else:
            yield folder, manifest, ""
