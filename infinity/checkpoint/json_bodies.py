"""The metadata of a checkpoint as pydantic models of the JSON bodies: types, bounds, and what must agree.

A checkpoint may come from an attacker, who can compute a checksum, too: nothing in it is trusted. Numbers are below
2^63, files are plain names, every extent lies inside its file and every array inside its extent. Unknown keys are
ignored on purpose: a change that alters the meaning of known keys raises the version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from infinity.config.untrusted import METADATA_NBYTES_MAX, plain_name, shortened
from infinity.plan.shards import Range, local_numel
from infinity.plan.types import DTYPE_NBYTES, SAVE_BLOCK_NBYTES

# An extent begins at a multiple of this many bytes; a block of it has a checksum.
ALIGNMENT = 4096
BLOCK_NBYTES = SAVE_BLOCK_NBYTES
# Parameters, what completes them to masters, and buffers have these kinds; all others are moments.
PARAM, REMAINDER, MASTER, BUFFER = "param", "remainder", "master", "buffer"
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


class FileBody(Body):
    """A file with the size and checksum that the manifest records."""

    name: FileName
    nbytes: Count
    crc32c: Crc


class TensorBody(Body):
    """A tensor of the model, and the kinds that are kept of it."""

    shape: Shape
    dtype: Dtype
    trainable: Flag
    kinds: Annotated[tuple[KindName, ...], Field(max_length=64)]

    @model_validator(mode="after")
    def _kinds_agree(self) -> TensorBody:
        kinds = set(self.kinds)
        if len(kinds) != len(self.kinds):
            raise ValueError(f"kinds {shortened(self.kinds)} are named twice")
        if (BUFFER in kinds and len(kinds) > 1) or (kinds and not kinds & {BUFFER, PARAM}):
            raise ValueError(f"{shortened(sorted(kinds))} is neither a buffer nor a parameter with its states")
        if REMAINDER in kinds and (self.dtype != "bf16" or MASTER in kinds):
            raise ValueError(f"a parameter in {self.dtype} has no remainder")
        return self

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


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
    tensors: Few[dict[TensorName, TensorBody]]
    tied: Few[dict[TensorName, TensorName]]
    ranks: Few[Annotated[list[FileBody], Field(min_length=1)]]
    client: FileBody | None
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


class PlaceBody(Body):
    """Where a stored tensor lies in the model."""

    name: TensorName
    source: TensorName
    start: Count
    shape: Shape

    @model_validator(mode="after")
    def _is_no_metadata(self) -> PlaceBody:
        if self.name == "__metadata__":
            raise ValueError("a tensor cannot have the name of a header's metadata")
        return self


def _in_folder(value: str) -> str:
    """A plain name, or one in a folder of an adapter's name."""
    for part in value.split("/", 1):
        plain_name(part)
    return value


def _json_file(value: str) -> str:
    if not value.endswith(".json"):
        raise ValueError(f"{shortened(value)} is not the name of a JSON file")
    return _in_folder(value)


class ExportBody(Body):
    """The files of an export besides weights, under the names that the checkpoint gives."""

    class_name: Text
    texts: dict[Annotated[str, Field(strict=True), AfterValidator(_json_file)], Any]
    origin: Text | None
    weights: dict[Annotated[str, Field(strict=True), AfterValidator(_in_folder)], Few[list[PlaceBody]]] | None
    aliases: Few[dict[TensorName, TensorName]]
    refusal: Text

    @model_validator(mode="after")
    def _names_are_used_once(self) -> ExportBody:
        if not isinstance(self.texts.get("config.json", {}), dict):
            raise ValueError("config.json is not an object")
        for stem, places in (self.weights or {}).items():
            if len({place.name for place in places}) != len(places):
                raise ValueError(f"two tensors of {stem} have the same name")
        return self


ExtentRow = tuple[
    Annotated[str, Field(strict=True)], Annotated[Count, Field(multiple_of=ALIGNMENT)],
    Annotated[Count, Field(multiple_of=ALIGNMENT)], Few[list[Crc]],
]  # fmt: skip
# dim, ranges along it.
ShardRow = tuple[
    Annotated[Count, Field(lt=_DIMS_MAX)],
    Annotated[list[tuple[Count, Count]], Field(min_length=1, max_length=_RANGES_MAX)],
]


def _with_shard(row: Any) -> Any:
    # Version 1 has none.
    return [*row, None] if isinstance(row, list) and len(row) == 7 else row


# tensor, kind, dtype, start, numel, extent, offset, shard: names are looked up in the manifest.
ArrayRow = Annotated[
    tuple[
        Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True)], Annotated[str, Field(strict=True)],
        Count, Count, Count, Count, Count | None,
    ],
    BeforeValidator(_with_shard),
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


class Part(Protocol):
    """What a shard has of a tensor."""

    @property
    def dim(self) -> int: ...

    @property
    def ranges(self) -> tuple[Range, ...]: ...


class Stretch(Protocol):
    """A range of a tensor's elements."""

    @property
    def tensor(self) -> str: ...

    @property
    def kind(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def start(self) -> int: ...

    @property
    def numel(self) -> int: ...

    @property
    def shard(self) -> Part | None: ...


class Info(Protocol):
    """A tensor of the model."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def kinds(self) -> tuple[str, ...]: ...

    @property
    def numel(self) -> int: ...


def disagreement(arrays: Iterable[Stretch], tensors: Mapping[str, Info]) -> str:
    """Return how a rank's arrays contradict the manifest's `tensors`; "" where they agree."""
    numels = {name: info.numel for name, info in tensors.items()}
    for array in arrays:
        info = tensors.get(array.tensor)
        if info is None or array.kind not in info.kinds:
            return f"it holds {shortened(array.tensor)} ({shortened(array.kind)}), of which the manifest says nothing"
        wanted = info.dtype if array.kind in (PARAM, BUFFER) else "int16" if array.kind == REMAINDER else "fp32"
        stop = array.start + array.numel
        if array.dtype != wanted:
            return f"it holds {array.tensor} ({array.kind}) as {array.dtype}, which is kept as {wanted}"
        if array.shard is None and stop > numels[array.tensor]:
            return f"it holds elements up to {stop} of {array.tensor}, which has {numels[array.tensor]}"
        if array.shard is not None:
            dim, end = array.shard.dim, array.shard.ranges[-1][1]
            if dim >= len(info.shape) or end > info.shape[dim]:
                shape = shortened(list(info.shape))
                return f"it holds a shard of {array.tensor} up to {end} of dimension {dim}, which has the shape {shape}"
            if stop > (numel := local_numel(info.shape, dim, array.shard.ranges)):
                return f"it holds elements up to {stop} of a shard of {array.tensor}, which has {numel}"
    return ""


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
