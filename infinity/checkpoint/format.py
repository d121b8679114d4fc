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

A checkpoint may come from an attacker, who can compute a checksum, too: nothing in it is trusted. The JSON bodies are
pydantic models, with types, bounds and what must agree: numbers are below 2^63, files are plain names, every extent
lies inside its file and every array inside its extent. `inside` checks that no link leads out of the folder. Unknown
keys are ignored on purpose: a change that alters the meaning of known keys raises the version.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infinity.base.untrusted import (
    METADATA_NBYTES_MAX,
    leads_out,
    parse_json,
    plain_name,
    read_metadata,
    reason,
    shortened,
)
from infinity.errors import CheckpointError, TransferError
from infinity.ops.crc32c import checksum
from infinity.plan.shards import Range, local_numel
from infinity.plan.types import BLOCK_NUMEL as BLOCK_NUMEL_8BIT
from infinity.plan.types import DTYPE_NBYTES, SAVE_BLOCK_NBYTES

# An extent begins at a multiple of this many bytes; a block of it has a checksum.
ALIGNMENT = 4096
BLOCK_NBYTES = SAVE_BLOCK_NBYTES
# Parameters, what completes them to masters, and buffers have these kinds; all others are moments.
PARAM, REMAINDER, MASTER, BUFFER = "param", "remainder", "master", "buffer"
# Kinds of which a value belongs to a block of elements, and those in bytes.
_SCALES, _CODES = ("absmax1", "absmax2"), ("state1", "state2")
# Parameters and buffers are kept in the model's dtypes, these kinds in others than fp32.
_DTYPE_OF_KIND = {REMAINDER: "int16", **dict.fromkeys(_CODES, "uint8")}
# The largest number of a save; each save has a greater one than those before it.
NUMBER_MAX = 2**62
_BELOW = 2**63
_DIMS_MAX = 64
# Most ranges of a shard: those of a packed weight are one for each that is packed.
_RANGES_MAX = 64
# Most entries of a list or an object: pydantic keeps a finding for each wrong one.
_ENTRIES_MAX = 1_000_000
_Value = TypeVar("_Value")


def _text(value: str) -> str:
    # A string without a UTF-8 form cannot be printed.
    value.encode()
    return value


def _dtype(value: str) -> str:
    if value not in DTYPE_NBYTES:
        raise ValueError(f"there is no dtype {shortened(value)}")
    return value


def _numel(shape: tuple[int, ...]) -> tuple[int, ...]:
    # A dimension of 0 does not excuse the others: torch multiplies them all.
    if math.prod(max(dim, 1) for dim in shape) * 8 >= _BELOW:
        raise ValueError(f"a tensor of the shape {shortened(list(shape))} is too large for any memory")
    return shape


def _few(value: Any) -> Any:
    if isinstance(value, dict | list) and len(value) > _ENTRIES_MAX:
        raise ValueError(f"it has {len(value):,} entries, and at most {_ENTRIES_MAX:,} are read")
    return value


Few = Annotated[_Value, BeforeValidator(_few)]
Count = Annotated[int, Field(strict=True, ge=0, lt=_BELOW)]
Crc = Annotated[int, Field(strict=True, ge=0, lt=2**32)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, max_length=65536), AfterValidator(_text)]
TensorName = Annotated[str, Field(strict=True, max_length=4096), AfterValidator(_text)]
FileName = Annotated[str, Field(strict=True), AfterValidator(plain_name)]
Dtype = Annotated[str, Field(strict=True), AfterValidator(_dtype)]
KindName = Annotated[str, Field(strict=True, pattern=r"^[a-z0-9_]{1,64}$")]
Shape = Annotated[tuple[Count, ...], Field(max_length=_DIMS_MAX), AfterValidator(_numel)]
Identity = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{12}$")]


class Body(BaseModel):
    """A part of the metadata."""

    model_config = ConfigDict(frozen=True, extra="ignore")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """A file with the size and checksum that the manifest records."""

    name: FileName
    nbytes: Count
    crc32c: Crc

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


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the model. `kinds` are those of which every element is in the files."""

    shape: Shape
    dtype: Dtype
    trainable: Flag
    kinds: Annotated[tuple[KindName, ...], Field(max_length=64)]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def _kinds_agree(info: TensorInfo) -> TensorInfo:
    kinds = set(info.kinds)
    if len(kinds) != len(info.kinds):
        raise ValueError(f"kinds {shortened(info.kinds)} are named twice")
    if (BUFFER in kinds and len(kinds) > 1) or (kinds and not kinds & {BUFFER, PARAM}):
        raise ValueError(f"{shortened(sorted(kinds))} is neither a buffer nor a parameter with its states")
    if REMAINDER in kinds and (info.dtype != "bf16" or MASTER in kinds):
        raise ValueError(f"a parameter in {info.dtype} has no remainder")
    return info


Tensors = Few[dict[TensorName, Annotated[TensorInfo, AfterValidator(_kinds_agree)]]]


class CountersBody(Body):
    """The counters of the run at the save."""

    global_steps: Count
    micro_steps: Count
    global_samples: Count
    skipped_steps: Count


class SchedulerBody(Body):
    """The learning-rate scheduler's class and state."""

    type: Text
    state: Any


class GroupBody(Body):
    """A parameter group. `hyper` is encoded as `client_state` is."""

    params: Few[list[TensorName]]
    hyper: dict[Text, Any]

    @model_validator(mode="after")
    def _no_params(self) -> GroupBody:
        if "params" in self.hyper:
            raise ValueError("hyper-parameters replace the parameters")
        return self


class OptimizerBody(Body):
    """The optimizer's state besides its moments."""

    kind: Text
    groups: Few[list[GroupBody]]
    steps: Few[dict[TensorName, Count]]


class EngineBody(Body):
    """The state of the run."""

    counters: CountersBody
    precision: Any
    scheduler: SchedulerBody | None
    optimizer: OptimizerBody
    loader: Any


class VersionsBody(Body):
    """The versions of the software that saved it."""

    infinity: Text
    torch: Text
    python: Text


class PlanBody(Body):
    """The plan of the run, in short."""

    fingerprint: Text
    stage: Count
    world_size: Count
    dp: Count
    tp: Annotated[Count, Field(ge=1)] = 1
    pp: Annotated[Count, Field(ge=1)] = 1
    compute_dtype: Dtype

    @model_validator(mode="before")
    @classmethod
    def _with_data_axis(cls, body: Any) -> Any:
        # Version 1 had this axis alone, and no note of it.
        return {"dp": body.get("world_size"), **body} if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _axes_agree(self) -> PlanBody:
        if self.pp * self.dp * self.tp != self.world_size:
            raise ValueError(f"{self.pp} x {self.dp} x {self.tp} ranks are not {self.world_size}")
        return self


class ManifestBody(Body):
    """`manifest.json`."""

    id: Identity
    tag: Annotated[Text, Field(max_length=255)]
    number: Annotated[int, Field(strict=True, ge=0, le=NUMBER_MAX)]
    time: Text
    versions: VersionsBody
    plan: PlanBody
    tensors: Tensors
    tied: Few[dict[TensorName, TensorName]]
    ranks: Few[Annotated[list[FileInfo], Field(min_length=1)]]
    client: FileInfo | None
    engine: EngineBody
    client_state: Any
    module: dict[Text, Any]

    @model_validator(mode="after")
    def _files_agree(self) -> ManifestBody:
        names = [info.name for info in self.ranks]
        if len(set(names)) != len(names):
            raise ValueError("two ranks have the same index")
        large = next((info for info in self.ranks if info.nbytes > METADATA_NBYTES_MAX), None)
        if large is not None:
            raise ValueError(f"{large.name} has {large.nbytes:,} bytes, and at most {METADATA_NBYTES_MAX:,} are read")
        return self


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where a stored tensor lies in the model: elements from `start` on of the flattened `source`."""

    name: TensorName
    source: TensorName
    start: Count
    shape: Shape


def _in_folder(value: str) -> str:
    """A plain name, or one in a folder of an adapter's name."""
    for part in value.split("/", 1):
        plain_name(part)
    return value


class ExportBody(Body):
    """The files of an export besides weights, under the names that the checkpoint gives."""

    class_name: Text
    texts: dict[Annotated[str, Field(strict=True, pattern=r"\.json$"), AfterValidator(_in_folder)], Any]
    origin: Text | None
    weights: dict[Annotated[str, Field(strict=True), AfterValidator(_in_folder)], Few[list[TensorLocation]]] | None
    aliases: Few[dict[TensorName, TensorName]]
    refusal: Text

    @model_validator(mode="after")
    def _names_are_used_once(self) -> ExportBody:
        if not isinstance(self.texts.get("config.json", {}), dict):
            raise ValueError("config.json is not an object")
        for stem, places in (self.weights or {}).items():
            names = {place.name for place in places}
            if len(names) != len(places):
                raise ValueError(f"two tensors of {stem} have the same name")
            if "__metadata__" in names:
                raise ValueError(f"a tensor of {stem} cannot have the name of a header's metadata")
        return self


ExtentRow = tuple[
    Annotated[str, Field(strict=True)], Annotated[Count, Field(multiple_of=ALIGNMENT)],
    Annotated[Count, Field(multiple_of=ALIGNMENT)], Few[tuple[Crc, ...]],
]  # fmt: skip
# dim, ranges along it.
ShardRow = tuple[
    Annotated[Count, Field(lt=_DIMS_MAX)],
    Annotated[list[tuple[Count, Count]], Field(min_length=1, max_length=_RANGES_MAX)],
]
# tensor, kind, dtype, start, numel, extent, offset, shard: names are looked up in the manifest. Version 1 has no shard.
ArrayRow = Annotated[
    tuple[
        Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True)],
        Count, Count, Count, Count, Count | None,
    ],
    BeforeValidator(lambda row: [*row, None] if isinstance(row, list) and len(row) == 7 else row),
]  # fmt: skip


class IndexBody(Body):
    """`ID.rank-00000.json`."""

    rank: Count
    files: Few[dict[FileName, Count]]
    extents: Few[list[ExtentRow]]
    shards: Few[list[ShardRow]] = []
    arrays: Few[list[ArrayRow]]
    rng: dict[Text, Any]
    singles: Few[dict[TensorName, dict[Text, Any]]]

    @model_validator(mode="after")
    def _extents_fill_files(self) -> IndexBody:
        ends = dict.fromkeys(self.files, 0)
        for file, offset, nbytes, blocks in sorted(self.extents, key=itemgetter(0, 1, 2)):
            if file not in ends:
                raise ValueError(f"an extent lies in {shortened(file)}, which is none of the rank's files")
            if offset != ends[file]:
                raise ValueError(f"{file}: an extent begins at byte {offset}, and the one before ends at {ends[file]}")
            if len(blocks) != -(-nbytes // BLOCK_NBYTES):
                raise ValueError(f"{file}: {nbytes} bytes at offset {offset} have {len(blocks)} checksums")
            ends[file] = offset + nbytes
        for file, nbytes in self.files.items():
            if ends[file] != nbytes:
                raise ValueError(f"{file} has {nbytes} bytes, and its extents {ends[file]}")
        return self

    @model_validator(mode="after")
    def _shards_are_in_order(self) -> IndexBody:
        for number, (dim, ranges) in enumerate(self.shards):
            before = 0
            for begin, end in ranges:
                if not before <= begin < end:
                    raise ValueError(f"shard {number} has {begin} to {end} of dimension {dim}, behind {before}")
                before = end
        for tensor, *_, named in self.arrays:
            if named is not None and named >= len(self.shards):
                raise ValueError(f"{shortened(tensor)} is of shard {named} of {len(self.shards)}")
        return self

    @model_validator(mode="after")
    def _arrays_lie_in_extents(self) -> IndexBody:
        sizes = [extent[2] for extent in self.extents]
        before, end = -1, 0
        for tensor, _, dtype, _, numel, extent, offset, *_ in sorted(self.arrays, key=itemgetter(5, 6)):
            if extent >= len(sizes) or dtype not in DTYPE_NBYTES:
                raise ValueError(f"{shortened(tensor)} lies in extent {extent} of {len(sizes)} as {shortened(dtype)}")
            if not numel:
                continue
            if extent == before and offset < end:
                raise ValueError(f"{shortened(tensor)} lies at byte {offset} of extent {extent}, in what is another's")
            before, end = extent, offset + numel * DTYPE_NBYTES[dtype]
            if end > sizes[extent]:
                where = f"byte {end} of extent {extent}, which has {sizes[extent]}"
                raise ValueError(f"{shortened(tensor)} ends at {where}")
        return self


def disagreement(arrays: Iterable[Array], tensors: Mapping[str, TensorInfo]) -> str:
    """Return how a rank's arrays contradict the manifest's `tensors`; "" where they agree."""
    numels = {name: info.numel for name, info in tensors.items()}
    for array in arrays:
        info = tensors.get(array.tensor)
        if info is None or array.kind not in info.kinds:
            return f"it holds {shortened(array.tensor)} ({shortened(array.kind)}), of which the manifest says nothing"
        wanted = info.dtype if array.kind in (PARAM, BUFFER) else _DTYPE_OF_KIND.get(array.kind, "fp32")
        stop = array.start + array.numel
        if array.dtype != wanted:
            return f"it holds {array.tensor} ({array.kind}) as {array.dtype}, which is kept as {wanted}"
        if array.shard is None and stop > (numel := values_numel(array.kind, numels[array.tensor])):
            return f"it holds elements up to {stop} of {array.tensor}, which has {numel}"
        if array.shard is not None:
            dim, end = array.shard.dim, array.shard.ranges[-1][1]
            if dim >= len(info.shape) or end > info.shape[dim]:
                shape = shortened(list(info.shape))
                return f"it holds a shard of {array.tensor} up to {end} of dimension {dim}, which has the shape {shape}"
            block, inner = block_of(array.kind), math.prod(info.shape[dim + 1 :])
            if any(end * inner % block for pair in array.shard.ranges for end in pair):
                return f"it holds a shard of {array.tensor} ({array.kind}) that is cut inside a block of {block}"
            if stop > (numel := in_values(array.kind, info.shape, array.shard).numel):
                return f"it holds elements up to {stop} of a shard of {array.tensor}, which has {numel}"
    return ""


def block_of(kind: str) -> int:
    """Return how many elements share a value of this kind."""
    return BLOCK_NUMEL_8BIT if kind in _SCALES else 1


def values_numel(kind: str, numel: int) -> int:
    """Return how many values of a kind a tensor of `numel` elements has."""
    return -(-numel // block_of(kind))


class Values(NamedTuple):
    """A shard counted in the values of a kind: shape of the whole, and ranges along a dimension of it."""

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """Values of the shard."""
        return local_numel(self.shape, self.dim, self.ranges)


def in_values(kind: str, shape: tuple[int, ...], shard: ShardRanges) -> Values:
    """Return a shard of a tensor of this shape in the values of a kind: no block of elements is cut by it."""
    block = block_of(kind)
    if block == 1:
        return Values(shape, shard.dim, shard.ranges)
    inner = math.prod(shape[shard.dim + 1 :])
    ranges = tuple((begin * inner // block, end * inner // block) for begin, end in shard.ranges)
    return Values((math.prod(shape[: shard.dim]), shape[shard.dim] * inner // block), 1, ranges)


def explained(error: Exception) -> str:
    """Return what is wrong in one line: the first of many findings, with its place and value."""
    if not isinstance(error, ValidationError):
        return f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    first, *others = error.errors(include_url=False, include_context=False)
    place = ".".join(str(part) for part in first["loc"])[:200]
    more = f" (and {len(others)} more)" if others else ""
    if first["type"] == "value_error":
        return f"{place + ': ' if place else ''}{first['msg'].removeprefix('Value error, ')}{more}"
    if first["type"] == "missing":
        return f"{place} is missing{more}"
    return f"{place} is {shortened(first['input'])}: {first['msg'][:1].lower()}{first['msg'][1:]}{more}"


MANIFEST = "manifest.json"
LATEST = "latest"
TEMPORARY = ".part"

_OWN = re.compile(r"([0-9a-f]{12})\.(rank-\d{5,}\.(json|weights\.bin|frozen\.bin|states\.bin)|client\.safetensors)")


def index_name(identity: str, rank: int) -> str:
    """Return the name of a rank's index."""
    return f"{identity}.rank-{rank:05}.json"


def data_name(identity: str, rank: int, part: str) -> str:
    """Return the name of one of a rank's data files; `part` is "weights", "frozen" or "states"."""
    return f"{identity}.rank-{rank:05}.{part}.bin"


def client_name(identity: str) -> str:
    """Return the name of the file that holds the client state's tensors."""
    return f"{identity}.client.safetensors"


def identity_of(name: str) -> str | None:
    """Return the id of the save that writes a file of this name; None for a name that no save uses."""
    found = _OWN.fullmatch(name.removesuffix(TEMPORARY))
    return None if found is None else found.group(1)


def is_ours(name: str) -> bool:
    """Return whether a save writes files of this name into a checkpoint's folder."""
    return identity_of(name) is not None or name.removesuffix(TEMPORARY) == MANIFEST


def is_tag(tag: str) -> bool:
    """Return whether `tag` can name a checkpoint's folder."""
    return bool(tag) and tag not in (".", "..", LATEST, MANIFEST) and not set("/\0") & set(tag) and tag == tag.strip()


def inside(folder: Path, name: str) -> Path:
    """Return the path of a checkpoint's file; CheckpointError for a link that leads out of the folder."""
    if leads_out(folder, name):
        raise CheckpointError(
            folder / name, f"it is a link to {os.path.realpath(folder / name)}, outside the checkpoint's folder",
            "Copy the files themselves (cp -rL), if you trust where it leads",
        )  # fmt: skip
    return folder / name


# Re-exported: a reader of the format imports this module alone.
__all__ = [
    "ALIGNMENT", "BLOCK_NBYTES", "BUFFER", "DTYPE_NBYTES", "LATEST", "MANIFEST", "MASTER", "PARAM", "REMAINDER",
    "identity_of", "index_name", "inside", "is_tag",
]  # fmt: skip

FORMAT = "infinity checkpoint"
VERSION = 2
# Those that are read: version 1 has no shards.
_READ_VERSIONS = (1, VERSION)


_Record = TypeVar("_Record", bound="Written")


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


class Written:
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

    def row(self) -> list[Any]:
        """Return it as a file has it."""
        return [self.dim, [list(pair) for pair in self.ranges]]


@dataclass(frozen=True, slots=True)
class Array:
    """Elements [start, start + numel) of a tensor, flat in C order: at byte `offset` of extent number `extent`. Of a
    kind that has a value for each block of elements, values.

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

    def row(self, numbers: Mapping[ShardRanges | None, int | None]) -> list[Any]:
        """Return it as a file has it; `numbers` are of `shard_numbers`."""
        return [
            self.tensor, self.kind, self.dtype, self.start, self.numel, self.extent, self.offset, numbers[self.shard]
        ]  # fmt: skip

    @classmethod
    def of(cls, row: ArrayRow, shards: Sequence[ShardRanges]) -> Array:
        """Return the array of a row that `row` made."""
        return cls(*row[:7], None if row[7] is None else shards[row[7]])


def shard_numbers(arrays: Iterable[Array]) -> dict[ShardRanges | None, int | None]:
    """Return the arrays' shards in their order, with their numbers; None has none."""
    numbers: dict[ShardRanges | None, int | None] = {None: None}
    for array in arrays:
        numbers.setdefault(array.shard, len(numbers) - 1)
    return numbers


@dataclass(frozen=True)
class RankIndex(Written):
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
        """See `Written`."""
        numbers = shard_numbers(self.arrays)
        return {
            "rank": self.rank, "files": self.files, "rng": self.rng, "singles": self.singles,
            "extents": [[each.file, each.offset, each.nbytes, list(each.blocks)] for each in self.extents],
            "shards": [each.row() for each in numbers if each is not None],
            "arrays": [each.row(numbers) for each in self.arrays],
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
        """See `Written`."""
        found = IndexBody.model_validate(body)
        extents = tuple(FileExtent(*row) for row in found.extents)
        shards = [ShardRanges(dim, tuple(ranges)) for dim, ranges in found.shards]
        arrays = tuple(Array.of(row, shards) for row in found.arrays)
        return cls(found.rank, found.files, extents, arrays, found.rng, found.singles)


@dataclass(frozen=True)
class Manifest(Written):
    """The checkpoint as a whole. `engine` and `client_state` are encoded by `infinity.checkpoint.run_state`."""

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
        """See `Written`."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    @classmethod
    def of(cls, body: Any) -> Manifest:
        """See `Written`."""
        said = (body.get("format"), body.get("version")) if isinstance(body, dict) else (None, None)
        if said[0] != FORMAT or type(said[1]) is not int or said[1] not in _READ_VERSIONS:
            raise ValueError(f"format {shortened(said[0])}, version {shortened(said[1])}")
        found = ManifestBody.model_validate(body)
        # As they were written, with what another version may have added.
        kept = {name: body[name] for name in ("versions", "plan", "engine", "client_state", "module")}
        return cls(**{**dict(found), "ranks": tuple(found.ranks), **kept})

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
