"""Writing safetensors files as a stream: headers first, then ranges of elements in any order, by any process.

A file is eight bytes (the header's length), a JSON header (name -> dtype, shape, byte range) and the tensors one behind
the other (https://github.com/huggingface/safetensors, "Format"). The safetensors library writes whole tensors only.
Here the place of each tensor is known before its values, so several ranks write their ranges of one file at the same
time, and no rank holds a tensor whole. The folder is made beside its place and renamed when it is complete:
`check_complete` compares the bytes written with the tensors' sizes, so that no tensor is left empty.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import uuid
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from infinity.checkpoint.format import ShardRanges, sync_folder
from infinity.errors import ConfigError, StateError, TransferError
from infinity.memory.partition import DTYPES
from infinity.plan.shards import runs
from infinity.plan.types import DTYPE_NBYTES, SAFETENSORS_NAMES

_SUFFIX = ".safetensors"
# Elements that an export reads and converts at a time.
EXPORT_NUMEL = 4 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of the files: elements [start, start + numel) of the flattened tensor `source` of the model, stored as
    `dtype` (the plan's name).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_NBYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file: its name, its header with the length in front, and the tensors with their offsets in the file."""

    name: str
    head: bytes
    entries: tuple[tuple[Entry, int], ...]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor, _ in self.entries)


def cut_into_shards(
    tensors: Sequence[Entry], stem: str, nbytes_max: int | None = None, metadata: Mapping[str, str] | None = None
) -> list[WeightFile]:
    """Return the files for `tensors` in their order, each of at most `nbytes_max` bytes or with a single larger tensor.

    A single file is `stem.safetensors`; several are numbered as transformers does.
    """
    rows: list[list[Entry]] = [[]]
    filled = 0
    for tensor in tensors:
        if rows[-1] and nbytes_max is not None and filled + tensor.nbytes > nbytes_max:
            rows.append([])
            filled = 0
        rows[-1].append(tensor)
        filled += tensor.nbytes
    shards = []
    for index, row in enumerate(rows):
        name = f"{stem}-{index + 1:05d}-of-{len(rows):05d}{_SUFFIX}" if len(rows) > 1 else stem + _SUFFIX
        shards.append(_shard(name, row, metadata or {}))
    return shards


def index_of(shards: Iterable[WeightFile]) -> str:
    """Return the text of `stem.safetensors.index.json` for several files."""
    placed = {tensor.name: (shard.name, tensor.nbytes) for shard in shards for tensor, _ in shard.entries}
    total = sum(nbytes for _, nbytes in placed.values())
    names = {name: placed[name][0] for name in sorted(placed)}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2) + "\n"


def _shard(name: str, tensors: Sequence[Entry], metadata: Mapping[str, str]) -> WeightFile:
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    at = 0
    offsets = []
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }  # fmt: skip
        offsets.append(at)
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Values begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return WeightFile(name, head, tuple((tensor, len(head) + at) for tensor, at in zip(tensors, offsets, strict=True)))


class WeightWriter:
    """The files of `shards` below `folder`, open for ranges of elements. Use as a context manager."""

    def __init__(self, folder: Path, shards: Sequence[WeightFile], *, create: bool) -> None:
        """create: make the files and write their headers, in one process; the others open them."""
        self.written_nbytes = 0
        self._paths = [folder / shard.name for shard in shards]
        self._fds: list[int] = []
        # By source: (first element, placed tensor, file, offset), in order.
        self._places: dict[str, list[tuple[int, Entry, int, int]]] = {}
        for index, shard in enumerate(shards):
            for tensor, offset in shard.entries:
                self._places.setdefault(tensor.source, []).append((tensor.start, tensor, index, offset))
        for places in self._places.values():
            places.sort(key=lambda place: place[0])
        self._shards = shards
        try:
            for path, shard in zip(self._paths, shards, strict=True):
                self._open(path, shard, create)
        except BaseException:
            self.close()
            raise

    @property
    def dtypes(self) -> Mapping[str, str]:
        """The model's tensors that are written, with the dtype (the plan's name) in which they are stored."""
        return {source: places[0][1].dtype for source, places in self._places.items()}

    def write(self, source: str, start: int, values: memoryview) -> None:
        """Write the bytes of elements from `start` on of a tensor of the model, in the dtype that they are stored in.

        Elements that are in no file are left out. TransferError where the drive refuses.
        """
        places = self._places.get(source, [])
        if not places:
            return
        itemsize = DTYPE_NBYTES[places[0][1].dtype]
        stop = start + len(values) // itemsize
        first = max(bisect_right(places, start, key=lambda place: place[0]) - 1, 0)
        for begin, tensor, file, offset in places[first:]:
            low, high = max(start, begin), min(stop, begin + tensor.numel)
            if begin >= stop:
                break
            if low < high:
                part = values[(low - start) * itemsize : (high - start) * itemsize]
                self._put(file, offset + (low - begin) * itemsize, part)

    def write_shard(
        self, source: str, shape: Sequence[int], shard: ShardRanges, start: int, values: memoryview
    ) -> None:
        """As `write`, for elements from `start` on of a shard of a tensor of shape `shape`. Only the shard's own bytes
        of a file are touched: other ranks write what lies between them.
        """
        if source not in self._places:
            return
        itemsize = DTYPE_NBYTES[self._places[source][0][1].dtype]
        for run in runs(shape, shard.dim, shard.ranges, start, len(values) // itemsize):
            for row in range(run.rows):
                at = (run.local - start + row * run.local_step) * itemsize
                self.write(source, run.whole + row * run.whole_step, values[at : at + run.length * itemsize])

    def sync(self) -> None:
        """Block until the drive has everything that was written."""
        for path, fd in zip(self._paths, self._fds, strict=True):
            try:
                os.fsync(fd)
            except OSError as error:
                raise _failed("sync", path, 0, 0, error) from error

    def close(self) -> None:
        """Close the files; idempotent."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> WeightWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, path: Path, shard: WeightFile, create: bool) -> None:
        try:
            if create:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._fds.append(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
                os.ftruncate(self._fds[-1], shard.nbytes)
            else:
                self._fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        except OSError as error:
            raise _failed("creation" if create else "opening", path, 0, shard.nbytes, error) from error
        if create:
            self._put(len(self._fds) - 1, 0, memoryview(shard.head))
            self.written_nbytes -= len(shard.head)

    def _put(self, file: int, offset: int, values: memoryview) -> None:
        done = 0
        while done < len(values):
            try:
                done += os.pwrite(self._fds[file], values[done:], offset + done)
            except OSError as error:
                raise _failed("write", self._paths[file], offset + done, len(values) - done, error) from error
        self.written_nbytes += len(values)


def check_complete(written_nbytes: int, shards: Iterable[WeightFile], where: Path) -> None:
    """Raise StateError unless all bytes of all tensors were written."""
    wanted = sum(tensor.nbytes for shard in shards for tensor, _ in shard.entries)
    if written_nbytes != wanted:
        raise StateError(
            f"the weights in {where} have {wanted:,} bytes but {written_nbytes:,} were written: the export is not "
            "published"
        )


@contextmanager
def folder_beside(folder: Path) -> Iterator[Path]:
    """Make a folder next to `folder`, and remove it after the block unless `publish_folder` has moved it."""
    folder = folder.resolve()
    made = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:12]}.partial"
    try:
        made.mkdir(parents=True)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def publish_folder(made: Path, folder: Path) -> None:
    """Move `made` to `folder`: by one rename where that is new or empty, otherwise file by file.

    In a folder that has files, the weights of an earlier export are removed first and the index is written last, so a
    reader in between finds no model, never half of one. Files of other names stay.
    """
    sync_folder(made)
    try:
        os.rename(made, folder)
    except OSError as error:
        if not folder.is_dir():
            raise _failed("rename", folder, 0, 0, error) from error
        _replace(made, folder)
    sync_folder(folder.resolve().parent)


def _replace(made: Path, folder: Path) -> None:
    names = sorted(path.relative_to(made) for path in made.rglob("*") if path.is_file())
    stems = {re.sub(r"(-\d{5}-of-\d{5})?\.safetensors$", "", str(name)) for name in names if name.suffix == _SUFFIX}
    for stem in stems:
        pattern = re.compile(re.escape(Path(stem).name) + r"(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
        place = (folder / stem).parent
        for old in sorted(place.iterdir(), reverse=True) if place.is_dir() else ():
            # A single file of the same name is replaced atomically.
            single = old.name.endswith(_SUFFIX) and old.relative_to(folder) in names and "-of-" not in old.name
            if pattern.fullmatch(old.name) and not single:
                old.unlink()
    for name in sorted(names, key=lambda name: (name.name.endswith(".index.json"), name)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(made / name, folder / name)
    shutil.rmtree(made)
    sync_folder(folder)


def _failed(operation: str, path: Path, offset: int, nbytes: int, error: OSError) -> TransferError:
    return TransferError(
        operation, path=str(path), offset=offset, nbytes=nbytes, errno=error.errno or errno.EIO, reason=str(error)
    )


def as_bytes(values: Tensor, dtype: str, name: str) -> memoryview:
    """Return the bytes of `values` ([n], on the CPU), converted to `dtype` (the plan's name) where both are floating.

    ConfigError about the tensor `name` where a finite value overflows in fp16.
    """
    wanted = DTYPES[dtype] if values.dtype.is_floating_point else values.dtype
    converted = values.to(wanted).contiguous()
    if wanted is torch.float16 and values.dtype is not wanted and bool((converted.isinf() & values.isfinite()).any()):
        raise ConfigError(f"export: {name} has values beyond 65504, the largest of fp16; export in bf16 or fp32")
    return converted.view(torch.uint8).numpy().data


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write small text files below `folder` and sync each."""
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())


