"""Safetensors files as a source of values: any range of a tensor's elements, read when it is wanted.

A file is eight bytes (the header's length), a JSON header (name -> dtype, shape, byte range) and the tensors one behind
the other. The safetensors library cuts along dimensions; a rank's slice of a flat partition is a range of elements,
which lies in one piece in the file, so that it is read by one system call a block.
"""

from __future__ import annotations

import json
import math
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.config.untrusted import parse_json, plain_name, read_metadata, shortened
from infinity.errors import ConfigError, TransferError
from infinity.memory.partition import DTYPES
from infinity.plan.types import SAFETENSORS_NAMES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes read at once; also the staging memory where the dtype changes on the way.
_BLOCK_NBYTES = 16 << 20
# A header longer than this is not one.
_HEADER_NBYTES_MAX = 100_000_000
_DIMS_MAX = 64
# Sizes are below this: they are numbers of 64 bits in every library.
_COUNT_END = 2**62
_DTYPES = {theirs: DTYPES[name] for name, theirs in SAFETENSORS_NAMES.items()}


class SafetensorsFile:
    """One open file. Its tensors are in `tensors`; `close` when nothing reads them any more.

    ConfigError unless the header is what the format says: whoever made the file chose the ranges that are read here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # A pipe would wait for its writer.
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise self._failed(0, 0, error.errno or 0, str(error)) from error
        try:
            self.header, start = self._read_header()
            self.tensors = self._tensors(start)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file; TransferError when it ends before, or cannot be read."""
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done : done + _BLOCK_NBYTES]], offset + done)
            except OSError as error:
                raise self._failed(offset + done, len(target) - done, error.errno or 0, str(error)) from error
            if not count:
                raise self._failed(offset + done, len(target) - done, 0, "the file ends before it")
            done += count

    def close(self) -> None:
        """Close the file; idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> tuple[bytes, int]:
        """The JSON text, and where the tensors begin."""
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{self.path} is not a regular file")
        size = status.st_size
        prefix = bytearray(8)
        if size >= 8:
            self.read_into(0, memoryview(prefix))
        length = int.from_bytes(prefix, "little")
        if not 2 <= length <= min(size - 8, _HEADER_NBYTES_MAX):
            raise ConfigError(
                f"{self.path} is not a safetensors file, or is cut short: it has {size:,} bytes, of which {length:,} "
                f"are to be the header (at most {_HEADER_NBYTES_MAX:,}). Fetch it again"
            )
        header = bytearray(length)
        self.read_into(8, memoryview(header))
        return bytes(header), 8 + length

    def _tensors(self, start: int) -> dict[str, StoredTensor]:
        """What the header says; the tensors fill the rest of the file, one behind the other."""
        nbytes = os.fstat(self._fd).st_size - start
        try:
            header = parse_json(self.header)
            if not isinstance(header, dict):
                raise ValueError("it is not an object")
            if b"\\u" in self.header:
                # Half of a surrogate pair is a text of JSON, and of nothing else.
                json.dumps(header, ensure_ascii=False).encode()
            _check_metadata(header.pop("__metadata__", {}))
            found = {name: StoredTensor.of(self, name, entry, start) for name, entry in header.items()}
            at = start
            for tensor in sorted(found.values(), key=lambda tensor: (tensor.offset, tensor.nbytes)):
                if tensor.offset != at:
                    raise ValueError(
                        f"{shortened(tensor.name)} begins at byte {tensor.offset - start} of the data, where the one "
                        f"before ends at {at - start}"
                    )
                at += tensor.nbytes
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{self.path}: its header is not one of safetensors: {error}. Fetch it again") from error
        if at != start + nbytes:
            raise ConfigError(
                f"{self.path} is cut short or damaged: its tensors have {at - start:,} bytes, and {nbytes:,} are "
                "there. Fetch it again"
            )
        return found

    def _failed(self, offset: int, nbytes: int, errno: int, reason: str) -> TransferError:
        return TransferError("read", path=str(self.path), offset=offset, nbytes=nbytes, errno=errno, reason=reason)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: an origin of values, see `infinity.zero.deferred_init`."""

    file: SafetensorsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, file: SafetensorsFile, name: str, entry: Any, start: int) -> StoredTensor:
        """From an entry of the header, whose tensors begin at `start`. ValueError for one that is none, ConfigError for
        a dtype that is not read here.
        """
        place = shortened(name)
        if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
            raise ValueError(f"{place} has no dtype, shape and data_offsets")
        shape, offsets = entry["shape"], entry["data_offsets"]
        if not _are_counts(shape) or len(shape) > _DIMS_MAX or math.prod(max(dim, 1) for dim in shape) >= _COUNT_END:
            raise ValueError(f"{place} has the shape {shortened(shape)}")
        if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise ValueError(f"{place} has the data_offsets {shortened(offsets)}")
        dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
        if dtype is None:
            raise ConfigError(f"{file.path}: {place} has dtype {shortened(entry['dtype'])}, which is not supported")
        nbytes = math.prod(shape) * dtype.itemsize
        if offsets[1] - offsets[0] != nbytes:
            raise ValueError(f"{place} has {nbytes} bytes by its shape, and {offsets[1] - offsets[0]} by data_offsets")
        return cls(file, name, dtype, tuple(shape), start + offsets[0])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def read(self, start: int, target: Tensor) -> None:
        """Copy elements from `start` on into `target` ([n], on any device), converted to its dtype."""
        numel, itemsize = target.numel(), self.dtype.itemsize
        if not 0 <= start <= self.numel - numel:
            raise ValueError(f"{self.name} has {self.numel} elements, asked were {numel} from {start} on")
        direct = target.dtype is self.dtype and target.device.type == "cpu" and target.is_contiguous()
        block = max(_BLOCK_NBYTES // itemsize, 1)
        staging = None if direct else torch.empty(min(block, numel), dtype=self.dtype, device="cpu")
        for at in range(0, numel, block):
            piece = target[at : at + block]
            into = piece if staging is None else staging[: piece.numel()]
            self.file.read_into(self.offset + (start + at) * itemsize, into.view(torch.uint8).numpy().data)
            if staging is not None:
                piece.copy_(into)

    def whole(self) -> Tensor:
        """The tensor, in memory."""
        values = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        self.read(0, values.view(-1))
        return values


class WeightFolder:
    """The safetensors files of a model: `model.safetensors`, or shards with an index."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self.tensors: dict[str, StoredTensor] = {}
        try:
            for path, names in _shards(folder).items():
                file = SafetensorsFile(path)
                self._files.append(file)
                absent = sorted(names - file.tensors.keys())
                if absent:
                    raise ConfigError(f"{path} lacks {', '.join(absent[:5])}, which {INDEX} says is in it")
                self.tensors.update(file.tensors)
        except BaseException:
            self.close()
            raise

    @property
    def fingerprint(self) -> int:
        """CRC-32 over names and headers: ranks that see different files have different ones."""
        crc = 0
        for file in self._files:
            crc = zlib.crc32(file.header, zlib.crc32(file.path.name.encode(), crc))
        return crc

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def _check_metadata(value: Any) -> None:
    texts = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    if not texts:
        raise ValueError(f"__metadata__ is {shortened(value)} instead of texts by name")


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < _COUNT_END for value in values)


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Files to read, and the tensors that an index says are in each."""
    if (folder / INDEX).exists():
        shards: dict[Path, set[str]] = {}
        try:
            index = parse_json(read_metadata(folder / INDEX, _HEADER_NBYTES_MAX))
            placed = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(placed, dict):
                raise ValueError("it has no weight_map")
            for name, file in placed.items():
                # Only the name is looked at: in a cache of the hub it is a link to where the file lies.
                shards.setdefault(folder / plain_name(file), set()).add(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder / INDEX} is no index of safetensors files: {error}. Fetch it again"
            ) from error
        missing = [path.name for path in shards if not path.exists()]
        if missing:
            raise ConfigError(f"{folder} lacks {', '.join(sorted(missing))}, which {INDEX} names: fetch them again")
        return shards
    if (folder / SINGLE).exists():
        return {folder / SINGLE: set()}
    found = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".safetensors"))
    raise ConfigError(
        f"{folder} has neither {SINGLE} nor {INDEX}"
        + (f", but {', '.join(found[:5])}: save the model again with save_pretrained()" if found else "")
    )
