"""A file of `torch.save`, read without torch's unpickler: its value, and any range of its tensors' elements.

The file is a zip archive of uncompressed records: `data.pkl`, which `pickles` reads, and one record for each storage.
A tensor is its place in the file; its elements are read when they are asked for, straight into the caller's memory. The
archive has a CRC-32 of each record: that of the pickle is compared at once, those of storages by `verify`.
"""

from __future__ import annotations

import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.deepspeed.pickles import PickleReader, StorageType
from infinity.config.untrusted import METADATA_NBYTES_MAX, open_regular, reason, shortened
from infinity.errors import CheckpointError, TransferError

_BLOCK_NBYTES = 16 << 20
# A local header of a zip archive: its mark, and the lengths of the name and of the extra field in front of the data.
_LOCAL = struct.Struct("<4s22xHH")
_LOCAL_MARK = b"PK\3\4"
# The names of storages begin so.
_STORAGE = "data/"
_ADVICE = "Copy the file again from where it is whole, or load another checkpoint"


@dataclass(frozen=True, slots=True)
class ZipRecord:
    """A record of the archive: where its bytes lie, and their CRC-32; None where the writer computed none."""

    name: str
    offset: int
    nbytes: int
    crc32: int | None


class TorchFile:
    """One file. `value`: what was saved, with a `TorchTensor` for each tensor. CheckpointError for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # By name, without the archive's own.
        self._records: dict[str, ZipRecord] = {}
        try:
            with _opened(path) as file:
                self._mark = _fingerprint(file.fileno())
                data = self._read_archive(file)
            self.value = PickleReader(self._tensor, self._storage).read(data)
        except (OSError, ValueError, LookupError, TypeError, ArithmeticError, MemoryError, AttributeError) as error:
            raise self.error(f"it cannot be read ({reason(error)})") from error
        except (zipfile.BadZipFile, struct.error, RuntimeError, EOFError) as error:
            raise self.error(f"it is no file of torch.save, or cut short or damaged ({error})") from error

    def error(self, what: str) -> CheckpointError:
        """Return the error to raise about this file."""
        return CheckpointError(self.path, what, _ADVICE)

    @property
    def storages(self) -> tuple[ZipRecord, ...]:
        """The records of tensors' elements."""
        return tuple(record for record in self._records.values() if record.name.startswith(_STORAGE))

    def verify(self, record: ZipRecord) -> Iterator[int]:
        """Read a record and yield the bytes of each block; CheckpointError unless they are those that were written."""
        room, crc = memoryview(bytearray(min(_BLOCK_NBYTES, record.nbytes))), 0
        for at in range(0, record.nbytes, _BLOCK_NBYTES):
            block = room[: min(_BLOCK_NBYTES, record.nbytes - at)]
            self.read_into(record.offset + at, block)
            crc = zlib.crc32(block, crc)
            yield len(block)
        self._compare(record, crc)

    def is_uniform(self, record: ZipRecord) -> bool:
        """Whether a record repeats four bytes, as zeros and ones do."""
        room = memoryview(bytearray(min(_BLOCK_NBYTES, record.nbytes)))
        for at in range(0, record.nbytes, _BLOCK_NBYTES):
            block = room[: min(_BLOCK_NBYTES, record.nbytes - at)]
            self.read_into(record.offset + at, block)
            if block[4:] != block[:-4]:
                return False
        return True

    def _compare(self, record: ZipRecord, crc32: int) -> None:
        if record.crc32 not in (None, crc32):
            raise self.error(
                f"the {record.nbytes:,} bytes of its record {shortened(record.name)} are not those that were written "
                "(the CRC-32 differs)"
            )

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from the file; TransferError where it ends early, cannot be read, or has been replaced."""
        done = 0
        try:
            with _opened(self.path) as file:
                if _fingerprint(file.fileno()) != self._mark:
                    raise OSError(0, "it is not the file any more that was looked at")
                while done < len(target):
                    count = os.preadv(file.fileno(), [target[done : done + _BLOCK_NBYTES]], offset + done)
                    if not count:
                        raise OSError(0, "the file ends before it")
                    done += count
        except OSError as error:
            raise TransferError(
                "read", path=str(self.path), offset=offset + done, nbytes=len(target) - done, errno=error.errno or 0,
                reason=reason(error),
            ) from error  # fmt: skip

    def _read_archive(self, file: _Bounded) -> bytes:
        """Note where the storages lie, and return the pickle."""
        with zipfile.ZipFile(file) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            ends = [*(entry.header_offset for entry in entries), archive.start_dir][1:]
        # torch writes zeros where it was told to compute none (torch.serialization.set_crc32_options).
        kept = any(entry.CRC for entry in entries)
        places: dict[str, ZipRecord] = {}
        for entry, end in zip(entries, ends, strict=True):
            name = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1 or name in places:
                raise ValueError(f"its record {shortened(entry.filename)} is compressed, encrypted or there twice")
            mark, name_nbytes, extra_nbytes = _LOCAL.unpack(os.pread(file.fileno(), _LOCAL.size, entry.header_offset))
            offset = entry.header_offset + _LOCAL.size + name_nbytes + extra_nbytes
            if mark != _LOCAL_MARK or entry.file_size != entry.compress_size or offset + entry.file_size > end:
                raise ValueError(f"its record {shortened(entry.filename)} lies in what is another's")
            places[name] = ZipRecord(name, offset, entry.file_size, entry.CRC if kept else None)
        if "data.pkl" not in places:
            raise ValueError("it has no data.pkl")
        order = self._record(file, places["byteorder"]) if "byteorder" in places else b""
        if order not in (b"", b"little"):
            raise ValueError(f"its numbers are stored in the order {shortened(order)}")
        self._records.update(places)
        return self._record(file, places["data.pkl"])

    def _record(self, file: _Bounded, record: ZipRecord) -> bytes:
        file.seek(record.offset)
        data = file.read(record.nbytes)
        if len(data) != record.nbytes:
            raise ValueError("it ends before its pickle is complete")
        self._compare(record, zlib.crc32(data))
        return data

    def _storage(self, identity: Any) -> Storage:
        kind, dtype, key, _, numel = identity
        if kind != "storage" or not isinstance(dtype, StorageType) or type(numel) is not int or numel < 0:
            raise ValueError(f"{shortened(identity)} is no storage of a tensor")
        record = self._records.get(f"{_STORAGE}{key}") if isinstance(key, str) else None
        if record is None:
            raise ValueError(f"its record data/{shortened(key)} is missing")
        if record.nbytes != numel * dtype.dtype.itemsize:
            raise ValueError(f"its record data/{key} has {record.nbytes} bytes, and its pickle says {numel} elements")
        return Storage(dtype.dtype, record.offset, numel)

    def _tensor(
        self, storage: Any, start: Any, shape: Any, strides: Any, *_: Any
    ) -> TorchTensor:
        shape, strides = tuple(shape), tuple(strides)
        numbers = (start, *shape, *strides)
        if not isinstance(storage, Storage) or any(type(each) is not int or each < 0 for each in numbers):
            raise ValueError(f"a tensor of the shape {shortened(shape)} is none that is read")
        if len(shape) != len(strides) or len(shape) > 64 or math.prod(max(each, 1) for each in shape) >= 2**60:
            raise ValueError(f"a tensor has the shape {shortened(shape)}")
        last = sum((dim - 1) * stride for dim, stride in zip(shape, strides, strict=True))
        if math.prod(shape) and start + last >= storage.numel:
            raise ValueError(f"a tensor of the shape {list(shape)} exceeds its storage of {storage.numel} elements")
        return TorchTensor(self, storage, start, shape, strides)


@dataclass(frozen=True)
class Storage:
    """The elements of one or more tensors: where they lie in the file."""

    dtype: torch.dtype
    offset: int
    numel: int


@dataclass(frozen=True, eq=False)
class TorchTensor:
    """A tensor in a file."""

    file: TorchFile
    storage: Storage
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.storage.dtype

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def contiguous(self) -> bool:
        """Whether its elements lie one behind the other."""
        expected = 1
        for dim, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if dim != 1 and stride != expected:
                return not self.numel
            expected *= dim
        return True

    def read(self, start: int, target: Tensor) -> None:
        """Copy elements from `start` on into `target` ([n], contiguous, on the CPU), converted to its dtype."""
        if not 0 <= start <= self.numel - target.numel():
            raise self.file.error(f"a tensor has {self.numel} elements; {target.numel()} are wanted from {start} on")
        if not self.contiguous:
            target.copy_(self._dense()[start : start + target.numel()])
            return
        block = _BLOCK_NBYTES // self.dtype.itemsize
        staging = None if target.dtype is self.dtype else torch.empty(
            min(block, target.numel()), dtype=self.dtype, device="cpu"
        )  # fmt: skip
        for at in range(0, target.numel(), block):
            piece = target[at : at + block]
            into = piece if staging is None else staging[: piece.numel()]
            self._read_storage(self.start + start + at, into)
            if staging is not None:
                piece.copy_(into)

    def _dense(self) -> Tensor:
        """Return the elements of a small tensor that is stored with gaps, repeated or transposed, as [n]."""
        nbytes = max(self.numel, self.storage.numel) * self.dtype.itemsize
        if nbytes > METADATA_NBYTES_MAX:
            raise self.file.error(f"a tensor of the shape {list(self.shape)} is stored with gaps or transposed")
        values = torch.empty(self.storage.numel, dtype=self.dtype, device="cpu")
        self._read_storage(0, values)
        return values.as_strided(self.shape, self.strides, self.start).reshape(-1)

    def _read_storage(self, start: int, into: Tensor) -> None:
        if into.numel():
            offset = self.storage.offset + start * self.dtype.itemsize
            self.file.read_into(offset, into.view(torch.uint8).numpy().data)

    def whole(self) -> Tensor:
        """Return the whole tensor."""
        values = torch.empty(self.numel, dtype=self.dtype, device="cpu")
        self.read(0, values)
        return values.view(self.shape)

    def number(self) -> float:
        """Return the value of a tensor of one element."""
        if self.numel != 1:
            raise self.file.error(f"a tensor of the shape {list(self.shape)} stands for a number")
        return self.whole().view(1).tolist()[0]


class _Bounded(io.FileIO):
    """A file of which no more than metadata may have is read at a time."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or size < 0:
            size = METADATA_NBYTES_MAX
        if size > METADATA_NBYTES_MAX:
            raise ValueError(f"its metadata has {size:,} bytes, and at most {METADATA_NBYTES_MAX:,} are read")
        return super().read(size) or b""


def _opened(path: Path) -> _Bounded:
    return _Bounded(open_regular(path)[0], "r")


def _fingerprint(descriptor: int) -> tuple[int, ...]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
