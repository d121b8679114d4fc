"""Safetensors files as a source of values: reads any range of a tensor's elements on demand.

A file is eight bytes (the header's length), a JSON header (name -> dtype, shape, byte range) and the tensors one after
another. The safetensors library reads and checks the header. It slices tensors along dimensions only; a rank's slice of
a flat partition is a contiguous range of elements, so this module reads the values, with one system call a block.
"""

from __future__ import annotations

import math
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infinity.base.untrusted import open_regular, parse_json, plain_name, read_json, reason, shortened
from infinity.errors import ConfigError, TransferError
from infinity.memory.partition import DTYPES
from infinity.plan.types import SAFETENSORS_NAMES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Bytes read at once; also the staging memory where the dtype changes on the way.
_BLOCK_NBYTES = 16 << 20
# An index longer than this is not one.
_INDEX_NBYTES_MAX = 100_000_000
_DIMS_MAX = 64
# Sizes are below this: they are numbers of 64 bits in every library.
_COUNT_END = 2**62
_DTYPES = {theirs: DTYPES[name] for name, theirs in SAFETENSORS_NAMES.items()}


class SafetensorsFile:
    """One open file. Its tensors are in `tensors`; call `close` after the last read.

    Raises ConfigError if the header violates the format: the file is untrusted, and the header says what is read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd, status = open_regular(path)
        except OSError as error:
            if not error.errno:
                raise ConfigError(f"{path}: {error.strerror}") from error
            raise self._failed(0, 0, error.errno, str(error)) from error
        try:
            self.tensors, start = self._read_tensors(status.st_size)
            self.header = self._read_header(start)
        except BaseException:
            self.close()
            raise

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file; TransferError if the file ends early or cannot be read."""
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

    def _read_tensors(self, nbytes: int) -> tuple[dict[str, StoredTensor], int]:
        """Return the header's tensors, and the byte offset of the first one.

        The library checks that they fill the rest of the file without gaps.
        """
        try:
            with safe_open(self.path, "np") as file:
                described = [(name, file.get_slice(name)) for name in file.offset_keys()]
                rows = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in described]
        except (SafetensorError, MemoryError) as error:
            raise ConfigError(
                f"{self.path} is not a safetensors file, or is cut short or damaged: {shortened(str(error))}. Fetch it "
                "again"
            ) from error
        found, offset = {}, 0
        for name, dtype, shape in rows:
            found[name] = StoredTensor.of(self, name, dtype, shape, offset)
            offset += found[name].nbytes
        start = nbytes - offset
        return {name: replace(tensor, offset=start + tensor.offset) for name, tensor in found.items()}, start

    def _read_header(self, start: int) -> bytes:
        """Return the JSON text before byte `start`; ConfigError where it repeats a key, which the library allows."""
        header = bytearray(start - 8)
        self.read_into(8, memoryview(header))
        try:
            parse_json(bytes(header))
        except ValueError as error:
            raise ConfigError(f"{self.path}: its header is not one of safetensors: {error}. Fetch it again") from error
        return bytes(header)

    def _failed(self, offset: int, nbytes: int, errno: int, reason: str) -> TransferError:
        return TransferError("read", path=str(self.path), offset=offset, nbytes=nbytes, errno=errno, reason=reason)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a file: a source of values for `infinity.zero.deferred_init`."""

    file: SafetensorsFile
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, file: SafetensorsFile, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> StoredTensor:
        """Make it from an entry of the header; ConfigError for a dtype or a shape that torch does not support."""
        if dtype not in _DTYPES:
            raise ConfigError(f"{file.path}: {shortened(name)} has dtype {shortened(dtype)}, which is not supported")
        if len(shape) > _DIMS_MAX or math.prod(max(dim, 1) for dim in shape) >= _COUNT_END:
            raise ConfigError(f"{file.path}: {shortened(name)} has the shape {shortened([*shape])}. Fetch it again")
        return cls(file, name, _DTYPES[dtype], shape, offset)

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
        """Read the whole tensor into CPU memory."""
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
        """CRC-32 over file names and headers; it differs between ranks that see different files."""
        crc = 0
        for file in self._files:
            crc = zlib.crc32(file.header, zlib.crc32(file.path.name.encode(), crc))
        return crc

    def close(self) -> None:
        """Close all files."""
        for file in self._files:
            file.close()


def _shards(folder: Path) -> dict[Path, set[str]]:
    """Return the files to read, with the tensors that the index places in each."""
    if (folder / INDEX).exists():
        shards: dict[Path, set[str]] = {}
        try:
            index = read_json(folder / INDEX, _INDEX_NBYTES_MAX)
            placed = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(placed, dict):
                raise ValueError("it has no weight_map")
            for name, file in placed.items():
                # Only the name is checked: in a hub cache the file is a link to another folder.
                shards.setdefault(folder / plain_name(file), set()).add(name)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder / INDEX} is no index of safetensors files: {reason(error)}. Fetch it again"
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
