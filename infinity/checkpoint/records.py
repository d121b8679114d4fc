"""Records of a step beside the swap files, with which a run that was killed goes on (`checkpoint.every_step`).

Beside the swap file of a rank lie three files of its name: `.run`, written once, says whose run it is, how its plan was
made and what its partitions hold; `.step0` and `.step1` are written in turn. Each of these two is a record: where the
values of one step lie (slot, bytes before the zero tail and checksums, by partition), and what else a checkpoint keeps.
They have the frame of a checkpoint's metadata: one that is cut anywhere, or changed, is none, and the other counts.
What a record names is not written before the next one is whole ([Note: records] in `infinity.memory.partition`), so
that of two records the newer is always true, and the older until another step begins to write. Beside the rank's files
on other drives lies an empty `.step0`: without a record beside it a swap file is removed by the next start there.

A rank's latest record may be one ahead of another's. `newest` finds the latest that all have.

Whoever reads these files treats them as hostile, as those of a checkpoint.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
from pydantic import Field, model_validator
from safetensors import SafetensorError
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.checkpoint.format import (
    DTYPE_NBYTES,
    Array,
    ArrayRow,
    Body,
    Count,
    Crc,
    EngineBody,
    Few,
    FileInfo,
    Flag,
    Identity,
    Manifest,
    PlanBody,
    ShardRanges,
    ShardRow,
    TensorInfo,
    TensorName,
    Tensors,
    Text,
    Written,
    shard_numbers,
    sync_folder,
)
from infinity.checkpoint.pieces import TensorSpan
from infinity.checkpoint.publish import (
    Retention,
    check_tag,
    claimed,
    now,
    prepare,
    publish_checkpoint,
    remove_save,
    versions,
    write_client,
)
from infinity.checkpoint.save import Capture, Lent, LetGo, write
from infinity.errors import CheckpointError
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.store import Place
from infinity.memory.tiers.nvme import RECORD_SUFFIXES, RUN_SUFFIX, NvmeTier, has_ended, has_record, wait_for_end
from infinity.ops.aio import Queue
from infinity.plan.spec import dtype_name
from infinity.plan.types import Extent, Key, Kind, PartitionSpec, moved_at_once

_ADVICE = "Remove the swap file and what has its name, and go on from a checkpoint"
_KINDS = {Kind.PARAM.value: Kind.PARAM, Kind.STATES.value: Kind.STATES}
_PlaceRow = tuple[Count, Count]
_KindName = Annotated[str, Field(strict=True, pattern="^(param|states)$")]


class _PartitionBody(Body):
    kind: _KindName
    index: Count
    nbytes: Count
    copied: Flag
    extent: _PlaceRow | None
    spare: _PlaceRow | None


class _PieceBody(Body):
    kind: _KindName
    index: Count
    part: Annotated[str, Field(strict=True, pattern="^(weights|frozen|states)$")]
    begin: Count
    nbytes: Count
    arrays: Few[list[ArrayRow]]


class _RunBody(Body):
    run: Identity
    path: Text
    rank: Count
    files: Annotated[list[Text], Field(min_length=1, max_length=1024)]
    weights: Annotated[list[Annotated[float, Field(gt=0, allow_inf_nan=False)]], Field(min_length=1, max_length=1024)]
    nbytes: Count
    sampled: Flag
    plan: PlanBody
    made: dict[Text, Any]
    partitions: Few[list[_PartitionBody]]
    shards: Few[list[ShardRow]]
    pieces: Few[list[_PieceBody]]
    tensors: Tensors
    tied: Few[dict[TensorName, TensorName]]
    module: dict[Text, Any]

    @model_validator(mode="after")
    def _agree(self) -> _RunBody:
        if len(self.files) != len(self.weights):
            raise ValueError(f"{len(self.files)} files have {len(self.weights)} weights")
        if self.rank >= self.plan.world_size:
            raise ValueError(f"rank {self.rank} is none of {self.plan.world_size}")
        sizes = {(each.kind, each.index): each.nbytes for each in self.partitions}
        if len(sizes) != len(self.partitions):
            raise ValueError("a partition is named twice")
        for each in self.partitions:
            for place in (each.extent, each.spare):
                if place is not None and (place[1] < each.nbytes or place[0] + place[1] > self.nbytes):
                    raise ValueError(f"{each.kind} {each.index} has bytes {place} of a file of {self.nbytes}")
        for piece in self.pieces:
            if piece.begin + piece.nbytes > sizes.get((piece.kind, piece.index), -1):
                raise ValueError(f"a piece ends behind {piece.kind} {piece.index}")
            for tensor, _, dtype, _, numel, _, offset, shard in piece.arrays:
                if dtype not in DTYPE_NBYTES or offset + numel * DTYPE_NBYTES[dtype] > piece.nbytes:
                    raise ValueError(f"{tensor} ends behind its piece")
                if shard is not None and shard >= len(self.shards):
                    raise ValueError(f"{tensor} is of shard {shard} of {len(self.shards)}")
        return self


@dataclass(frozen=True, slots=True)
class SavedPartition:
    """A partition that a record names. copied: it lives in memory, and the extents are of copies of it."""

    key: Key
    nbytes: int
    copied: bool
    extent: Extent | None
    spare: Extent | None

    @classmethod
    def of(cls, spec: PartitionSpec) -> SavedPartition:
        """The same of a plan's partition."""
        return cls(spec.key, spec.nbytes, spec.copied, spec.extent, spec.spare)

    def moved(self, slot: int, prefix_nbytes: int) -> list[tuple[Extent, int]]:
        """What was written at once to one of its extents, each with its first byte of the value."""
        extent = self.spare if slot else self.extent
        return moved_at_once(extent, self.nbytes, prefix_nbytes, copied=self.copied)


@dataclass(frozen=True)
class RunFile(Written):
    """What `.run` says.

    path: the run's `checkpoint.path`, absolute. files: the swap files, one a drive, with the drives' weights. nbytes:
    of these files together. sampled: whether checksums are of samples. plan, tensors, tied, module: as in a
    checkpoint's manifest. made: what the plan was made of, for `PlanInputs.plan_again`.
    """

    run: str
    path: str
    rank: int
    files: tuple[Path, ...]
    weights: tuple[float, ...]
    nbytes: int
    sampled: bool
    plan: Mapping[str, Any]
    made: Mapping[str, Any]
    partitions: tuple[SavedPartition, ...]
    pieces: tuple[TensorSpan, ...]
    tensors: Mapping[str, TensorInfo]
    tied: Mapping[str, str]
    module: Mapping[str, Any]

    def body(self) -> dict[str, Any]:
        """See `Written`."""
        numbers = shard_numbers(array for piece in self.pieces for array in piece.arrays)
        return {
            **vars(self), "files": [str(path) for path in self.files],
            "partitions": [
                {
                    "kind": each.key.kind.value, "index": each.key.index, "nbytes": each.nbytes, "copied": each.copied,
                    "extent": _row(each.extent), "spare": _row(each.spare),
                }
                for each in self.partitions
            ],
            "shards": [each.row() for each in numbers if each is not None],
            "pieces": [
                {
                    "kind": piece.key.kind.value, "index": piece.key.index, "part": piece.part, "begin": piece.begin,
                    "nbytes": piece.nbytes, "arrays": [array.row(numbers) for array in piece.arrays],
                }
                for piece in self.pieces
            ],
            "tensors": {name: asdict(info) for name, info in self.tensors.items()},
        }  # fmt: skip

    @classmethod
    def of(cls, body: Any) -> RunFile:
        """See `Written`."""
        found = _RunBody.model_validate(body)
        shards = [ShardRanges(dim, tuple(ranges)) for dim, ranges in found.shards]
        return cls(
            found.run, found.path, found.rank, tuple(map(Path, found.files)), tuple(found.weights), found.nbytes,
            found.sampled, found.plan.model_dump(), found.made,
            tuple(
                SavedPartition(
                    Key(_KINDS[each.kind], each.index), each.nbytes, each.copied, _extent(each.extent),
                    _extent(each.spare),
                )
                for each in found.partitions
            ),
            tuple(
                TensorSpan(
                    Key(_KINDS[each.kind], each.index), each.part, each.begin, each.nbytes,
                    tuple(Array.of(row, shards) for row in each.arrays),
                )
                for each in found.pieces
            ),
            found.tensors, found.tied, found.module,
        )  # fmt: skip


def _row(extent: Extent | None) -> list[int] | None:
    return None if extent is None else [extent.offset, extent.nbytes]


def _extent(row: tuple[int, int] | None) -> Extent | None:
    return None if row is None else Extent(*row)


class _RecordBody(Body):
    run: Identity
    rank: Count
    version: Annotated[Count, Field(ge=1)]
    # Slot, bytes before the zero tail, checksums; in the order of the run's partitions.
    places: Few[tuple[tuple[Annotated[Count, Field(le=1)], Count, Few[tuple[Crc, ...]]], ...]]
    engine: EngineBody
    rng: dict[Text, Any]
    singles: Few[dict[TensorName, dict[Text, Any]]]
    client_state: Any
    told: Few[tuple[TensorName, ...]]
    tensors: Annotated[str, Field(strict=True)]


@dataclass(frozen=True)
class StepRecord(Written):
    """What `.step0` or `.step1` says: the state behind one step.

    version: greater by one with each record of the run, the same on all ranks. places: by partition, as the run has
    them: slot, bytes before the zero tail, checksums of what was written at once. engine, rng, singles, client_state:
    as in a checkpoint. told: the buffers of which this rank's copy is saved. tensors: of buffers ("buffer/NAME") and of
    the client state ("client/PATH").
    """

    run: str
    rank: int
    version: int
    places: tuple[Place, ...]
    engine: Mapping[str, Any]
    rng: Mapping[str, Any]
    singles: Mapping[str, Any]
    client_state: Any
    told: tuple[str, ...] = ()
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """How many optimizer steps the state has behind it."""
        return int(self.engine["counters"]["global_steps"])

    def buffers(self) -> dict[str, Tensor]:
        """The module's buffers by name."""
        return _beneath(self.tensors, "buffer/")

    def client_tensors(self) -> dict[str, Tensor]:
        """The tensors of the client state, for `decode`."""
        return _beneath(self.tensors, "client/")

    def body(self) -> dict[str, Any]:
        """See `Written`."""
        blob = safetensors.torch.save(dict(self.tensors)) if self.tensors else b""
        return {**vars(self), "tensors": base64.b64encode(blob).decode()}

    @classmethod
    def of(cls, body: Any) -> StepRecord:
        """See `Written`."""
        found = _RecordBody.model_validate(body)
        try:
            blob = base64.b64decode(found.tensors, validate=True)
            tensors = safetensors.torch.load(blob) if blob else {}
        except (SafetensorError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"its tensors cannot be read ({error})") from error
        return cls(**{**dict(found), "engine": found.engine.model_dump(), "tensors": tensors})


def _beneath(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def write_run(run: RunFile) -> None:
    """Write `.run` beside the first swap file, and what keeps the others."""
    for path in run.files[1:]:
        _put(path.with_suffix(RECORD_SUFFIXES[0]), b"", sync=True)
    _put(run.files[0].with_suffix(RUN_SUFFIX), run.to_bytes(), sync=True)


def write_record(path: Path, record: StepRecord, *, sync: bool) -> None:
    """Write a record beside a swap file, over the last but one. sync: return once it outlasts a loss of power."""
    _put(path.with_suffix(RECORD_SUFFIXES[record.version % 2]), record.to_bytes(), sync=sync)


def _put(path: Path, data: bytes, *, sync: bool) -> None:
    new = not path.exists()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.pwrite(descriptor, view, len(data) - len(view)) :]
        os.ftruncate(descriptor, len(data))
        if sync:
            os.fdatasync(descriptor)
    finally:
        os.close(descriptor)
    if sync and new:
        sync_folder(path.parent)


def remove_records(files: Iterable[Path]) -> None:
    """Remove what lies beside swap files: the first one's records first, without which the rest is no run's state."""
    for path in files:
        for suffix in (*RECORD_SUFFIXES, RUN_SUFFIX):
            path.with_suffix(suffix).unlink(missing_ok=True)


def remove_run(files: Sequence[Path]) -> int:
    """Remove the swap files of a killed run, and return their bytes; do nothing and return 0 where a process has one.
    OSError where it cannot.
    """
    if not all(map(has_ended, files)):
        return 0
    nbytes = sum(path.stat().st_size for path in files)
    # Killed in between, it leaves files that the next start removes.
    remove_records(files)
    for path in files:
        path.unlink(missing_ok=True)
    return nbytes


@dataclass(frozen=True)
class KilledRun:
    """What one rank of a killed run has left. `path`: its first swap file. `records`: by version, one or two."""

    path: Path
    run: RunFile
    records: Mapping[int, StepRecord]

    def only(self, version: int) -> None:
        """Remove the records of other versions: these are about to be overwritten in part."""
        self.path.with_suffix(RECORD_SUFFIXES[(version + 1) % 2]).unlink(missing_ok=True)

    @contextmanager
    def opened(self) -> Iterator[NvmeTier]:
        """Lend the swap files, which stay where they are."""
        run = self.run
        tier = NvmeTier(
            [path.parent for path in run.files], nbytes=run.nbytes, rank=run.rank, queue=[Queue() for _ in run.files],
            weights=run.weights, checksum="sampled" if run.sampled else True, found=run.files,
        )  # fmt: skip
        try:
            yield tier
        finally:
            tier.close()

    @property
    def nbytes(self) -> int:
        """Bytes of its swap files."""
        return self.run.nbytes


def killed_runs(folder: Path, *, path: str | None = None, rank: int | None = None) -> list[KilledRun]:
    """Return what killed runs have left in a folder for swap files. path, rank: only of this run, of this rank.

    CheckpointError where a run's files are damaged beyond what the other record makes up for. TransferError where a
    process still has them.
    """
    found = []
    for at in sorted(folder.glob(f"infinity-swap-*{RUN_SUFFIX}")) if folder.is_dir() else ():
        killed = _read_killed(at, path, rank)
        found += [] if killed is None else [killed]
    return found


def left_behind(folder: Path) -> dict[Path, int]:
    """Return the swap files of killed runs in a folder, with their sizes: those with a record beside them whose process
    has ended.
    """
    found = {}
    for path in sorted(folder.glob("infinity-swap-*.bin")):
        # One that cannot be opened belongs to another user, or is no file.
        with suppress(OSError):
            if has_record(path) and has_ended(path):
                found[path] = path.stat().st_size
    return found


def left_runs(folders: Iterable[Path]) -> tuple[dict[str, list[KilledRun]], list[CheckpointError]]:
    """Return what killed runs have left in folders for swap files, by the run's id, and what of it cannot be read."""
    runs: dict[str, list[KilledRun]] = {}
    damaged: list[CheckpointError] = []
    # Files that no run tells of so far: those on a run's further drives.
    rest: dict[str, Path] = {}
    for path in (path for folder in folders for path in left_behind(folder)):
        try:
            killed = _read_killed(path.with_suffix(RUN_SUFFIX), None, None)
        except CheckpointError as error:
            damaged.append(error)
            continue
        if killed is None:
            rest[path.name] = path
        else:
            runs.setdefault(killed.run.run, []).append(killed)
    told = {each.name for ranks in runs.values() for killed in ranks for each in killed.run.files}
    advice = "Name the folders of all drives of its run, or remove it and what has its name"
    damaged += [
        CheckpointError(path, "no run in these folders tells of this swap file", advice)
        for name, path in rest.items() if name not in told
    ]  # fmt: skip
    return runs, damaged


def _read_killed(at: Path, path: str | None, rank: int | None) -> KilledRun | None:
    """See `killed_runs`. at: a `.run` file."""
    beside = [at.with_suffix(suffix) for suffix in RECORD_SUFFIXES]
    if not at.exists() or not any(each.exists() for each in beside):
        return None
    run = RunFile.read(at)
    if (path is not None and run.path != path) or (rank is not None and run.rank != rank):
        return None
    # A name in a file is only taken for the file that it lies beside, or for one of its name on another drive.
    if run.files[0].name != at.with_suffix(".bin").name or any(
        not each.name.startswith("infinity-swap-") or each.suffix != ".bin" for each in run.files
    ):
        raise CheckpointError(at, f"it tells of {run.files[0]}, which is not its swap file", _ADVICE)
    files = (at.with_suffix(".bin"), *run.files[1:])
    missing = next((each for each in files if not each.is_file()), None)
    if missing is not None:
        if missing == files[0]:
            # The end of a run that was over: its file went first.
            return None
        raise CheckpointError(missing, f"this swap file, of which {at} tells, is not there", _ADVICE)
    # What it has begun to write would come after what is read here.
    wait_for_end(files[0])
    records, damage = {}, ""
    for each in beside:
        try:
            record = StepRecord.read(each) if each.exists() else None
            if record is not None:
                _check(record, run, each)
                records[record.version] = record
        except CheckpointError as error:
            damage = str(error)
    if not records:
        raise CheckpointError(at.with_suffix(".bin"), f"none of its records is whole: {damage}", _ADVICE)
    return KilledRun(files[0], replace(run, files=files), records)


def _check(record: StepRecord, run: RunFile, at: Path) -> None:
    """CheckpointError where a record is not of the run that it lies beside."""
    own = at.suffix == RECORD_SUFFIXES[record.version % 2]
    if not own or (record.run, record.rank) != (run.run, run.rank):
        raise CheckpointError(at, "it is a record of another run, of another rank, or of another place", _ADVICE)
    if len(record.places) != len(run.partitions):
        raise CheckpointError(at, f"it names {len(record.places)} values of {len(run.partitions)}", _ADVICE)
    for (slot, prefix, _), each in zip(record.places, run.partitions, strict=True):
        if prefix > each.nbytes or (each.nbytes and (each.spare if slot else each.extent) is None):
            raise CheckpointError(at, f"it names a place of {each.key} that there is not", _ADVICE)


def newest(ranks: Sequence[Iterable[int]]) -> int | None:
    """The latest version that every rank has; None without one."""
    return max(set.intersection(*map(set, ranks)), default=None) if ranks else None


class SwapSource:
    """The partitions of a killed run, for a checkpoint that is made of them (see `save.PartitionSource`)."""

    def __init__(self, run: RunFile, record: StepRecord, tier: NvmeTier) -> None:
        """tier: has the run's swap files."""
        self._tier = tier
        self._places = {
            each.key: (each, slot, prefix)
            for each, (slot, prefix, _) in zip(run.partitions, record.places, strict=True)
        }
        for each, (slot, prefix, crcs) in zip(run.partitions, record.places, strict=True):
            try:
                tier.expect([extent for extent, _ in each.moved(slot, prefix)], crcs)
            except ValueError as error:
                raise CheckpointError(tier.path, f"its record is none of these partitions: {error}", _ADVICE) from error

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """See `PartitionSource`."""
        for key in keys:
            let_go(0)
            yield key

    @contextmanager
    def lend(self, key: Key, *, last: bool = True) -> Iterator[Lent]:
        """See `PartitionSource`."""
        each, slot, prefix = self._places[key]
        buffer = page_aligned(each.nbytes)
        moves: list[Transfer] = []
        for extent, begin in each.moved(slot, prefix):
            moves.append(self._tier.read(extent, buffer[begin : begin + extent.nbytes]))
        for move in moves:
            move.wait()
        if not each.copied:
            buffer[prefix:].zero_()
        yield Lent(buffer, partial(_no_read, key))

    def skip(self, keys: Sequence[Key]) -> None:
        """See `PartitionSource`."""


def make_checkpoint(folders: Sequence[Path], out: Path, *, tag: str | None = None, path: str | None = None) -> Path:
    """Make a checkpoint in `out` of what a killed run has left in folders for swap files, and return its folder. The
    swap files stay. path: the run's `checkpoint.path`, where there are several.

    CheckpointError where there is none, or what is there is not whole; TransferError where the drive fails, or has not
    the bytes that were written. Nothing is left of the checkpoint then.
    """
    ranks, version = _one_run([each for folder in folders for each in killed_runs(folder, path=path)], folders)
    first, record = ranks[0].run, ranks[0].records[version]
    tag = check_tag(f"global_step{record.step}" if tag is None else tag)
    with claimed(out):
        target = prepare(out, tag, Retention(), latest=True)
        try:
            infos = tuple(_write_rank(each, each.records[version], out / tag, target.id) for each in ranks)
            client = write_client(out / tag, target.id, record.client_tensors())
            manifest = Manifest(
                id=target.id, tag=tag, number=target.number, time=now(), versions=versions(), plan=dict(first.plan),
                tensors=dict(first.tensors), tied=dict(first.tied), ranks=infos, client=client,
                engine=dict(record.engine), client_state=record.client_state, module=dict(first.module),
            )  # fmt: skip
            publish_checkpoint(out, manifest, latest=True, checked=True)
        except BaseException:
            remove_save(out / tag, target.id)
            raise
    return out / tag


def _one_run(found: Sequence[KilledRun], folders: Sequence[Path]) -> tuple[list[KilledRun], int]:
    """Return the ranks of the only run that there is, in order, and the latest version of its records."""
    runs: dict[str, dict[int, KilledRun]] = {}
    for each in found:
        runs.setdefault(each.run.run, {})[each.run.rank] = each
    if not runs:
        raise CheckpointError(
            folders[0], "no swap files with a record of a step are here",
            "Name the folder that nvme_path named in the run; checkpoint.every_step was on in it",
        )  # fmt: skip
    if len(runs) > 1:
        paths = ", ".join(sorted({each.run.path for each in found}))
        raise CheckpointError(
            folders[0], f"swap files of {len(runs)} runs are here ({paths})",
            "Say which one with --path; `infinity ckpt killed` lists them, and removes what is not needed",
        )  # fmt: skip
    (ranks,) = runs.values()
    size = int(next(iter(ranks.values())).run.plan["world_size"])
    missing = [rank for rank in range(size) if rank not in ranks]
    if missing:
        raise CheckpointError(
            folders[0], f"the run had {size} ranks, and the swap files of rank {missing[0]} are not here",
            "Name the folders of all nodes",
        )  # fmt: skip
    version = newest([ranks[rank].records for rank in range(size)])
    if version is None:
        raise CheckpointError(folders[0], "the ranks' records are of no common step", _ADVICE)
    return [ranks[rank] for rank in range(size)], version


def _write_rank(killed: KilledRun, record: StepRecord, folder: Path, identity: str) -> FileInfo:
    """Write one rank's files of a checkpoint."""
    run, told = killed.run, set(record.told)
    buffers = tuple(
        (name, dtype_name(each.dtype), each) for name, each in record.buffers().items() if name in told
    )  # fmt: skip
    capture = Capture(run.rank, run.pieces, buffers, record.rng, record.singles)
    with Queue() as queue, killed.opened() as tier:
        return write(capture, SwapSource(run, record, tier), folder, identity, queue)


def _no_read(key: Key, begin: int, room: Tensor) -> Transfer:
    raise AssertionError(f"{key} is in memory")
