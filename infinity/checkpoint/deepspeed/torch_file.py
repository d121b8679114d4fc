"""A file of `torch.save`, read without torch's unpickler: its value, and any range of its tensors' elements.

The file is a zip archive of uncompressed records: `data.pkl`, and one record for each storage. A tensor is its place in
the file; its elements are read when they are asked for, straight into the caller's memory. The archive has a CRC-32 of
each record: that of the pickle is compared at once, those of storages by `verify`.

The pickle may be an attacker's. `pickletools` decodes one instruction after the other, and this module carries out
those that data needs, on plain values. A name in the pickle is looked up in `_CALLS` and `_VALUES`, and nothing is
imported: each name there stands for a function of this module that makes a plain value, or for a value. A name of a
program's own (`_is_foreign`) becomes an `Unloaded`, which holds what the pickle would have given to it. Any other name,
and any other instruction, is an error that names it.
"""

from __future__ import annotations

import io
import math
import os
import pickletools
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import UnionType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.base.untrusted import METADATA_NBYTES_MAX, open_regular, reason, shortened
from infinity.errors import CheckpointError, TransferError
from infinity.memory.partition import DTYPES

# The most instructions of one pickle, and bytes (or elements, eightfold) that its calls may copy.
_COUNT_MAX = 20_000_000
_COPIED_MAX = 128 << 20
_MARK = object()


@dataclass
class PickledObject:
    """An object of a class of others: its class by name, and its attributes."""

    name: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class Unloaded:
    """What stands for a name of a program's, which is neither imported nor called: a class, a function, or an object of
    it with what the pickle gave to its constructor, as its state, and, to a dictionary or a list of its own kind, as
    its items.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: dict[Any, Any] | list[Any] | None = None

    def __repr__(self) -> str:
        return f"Unloaded({self.name!r})"

    def fill(self, arguments: tuple[Any, ...], state: Any, items: dict[Any, Any] | list[Any] | None) -> None:
        """Take everything at once."""
        self.arguments, self.state, self.items = arguments, state, items

    def build(self, state: Any) -> None:
        """Take an object's state: its attributes, those in slots too, or what its class makes of it."""
        parts = state if type(state) is tuple and len(state) == 2 else (state,)
        if all(part is None or type(part) is dict for part in parts):
            state = {key: value for part in parts for key, value in (part or {}).items()}
        self.state = state

    def extend(self, items: list[Any]) -> None:
        """Take items, as a list of its own kind does."""
        self.items = [] if self.items is None else self.items
        _of(list, self.items).extend(items)

    def update(self, items: list[tuple[Any, Any]]) -> None:
        """Take keys and values, as a dictionary of its own kind does."""
        self.items = {} if self.items is None else self.items
        _of(dict, self.items).update(items)


@dataclass
class NumpyArray:
    """An array of numpy while it is read; `value` in the end."""

    value: Any = None

    def build(self, state: Any) -> None:
        """Take numpy's state: (version, shape, dtype, whether in Fortran's order, bytes)."""
        _, shape, dtype, transposed, data = state
        if not isinstance(dtype, np.dtype) or not isinstance(data, bytes):
            raise ValueError("an array of numpy is of another kind than numbers")
        flat = np.frombuffer(data, dtype=dtype)
        self.value = flat.reshape(_shape(shape), order="F" if transposed else "C").copy()


@dataclass
class _DType:
    """A dtype of numpy while it is read."""

    code: str

    def build(self, state: Any) -> None:
        """Take numpy's state, of which the byte order matters."""
        if state[1] in ("<", ">"):
            self.code = state[1] + self.code


@dataclass(frozen=True)
class StorageType:
    """A class of torch's storages: the dtype of its elements."""

    dtype: torch.dtype


@dataclass(frozen=True)
class Name:
    """A name of the pickle: what it makes of the arguments of a call."""

    text: str
    make: Callable[..., Any]


def _numpy_dtype(code: Any, *_: Any) -> _DType:
    if not isinstance(code, str) or code[:1] not in "biufc" or not code[1:].isdecimal():
        raise ValueError(f"the dtype {shortened(code)} of numpy is none of numbers")
    return _DType(code)


def _numpy_scalar(dtype: Any, data: Any) -> Any:
    return np.frombuffer(data, dtype=_finished(dtype), count=1)[0].item()


def _shape(value: Any) -> tuple[int, ...]:
    value = tuple(value)
    if any(type(each) is not int or each < 0 for each in value):
        raise ValueError(f"{shortened(value)} is no shape")
    return value


def _text_bytes(text: Any, encoding: Any = "latin1") -> bytes:
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {shortened(encoding)}")
    return str(text).encode("latin1")


def _path(*parts: Any) -> str:
    return "/".join(str(part) for part in parts)


def _record(name: str) -> Callable[..., Any]:
    return lambda *_: PickledObject(name)


def _enum_value(value: Any) -> Any:
    return value


_STORAGES = {
    "float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage", "float64": "DoubleStorage",
    "int64": "LongStorage", "int32": "IntStorage", "int16": "ShortStorage", "int8": "CharStorage",
    "uint8": "ByteStorage", "bool": "BoolStorage",
}  # fmt: skip
_CALLS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": dict,
    "collections defaultdict": lambda *_: {},
    "collections deque": lambda items=(), *_: list(items),
    "builtins set": lambda items=(): set(map(_key, items)),
    "__builtin__ set": lambda items=(): set(map(_key, items)),
    "builtins frozenset": lambda items=(): frozenset(map(_key, items)),
    "__builtin__ frozenset": lambda items=(): frozenset(map(_key, items)),
    "torch Size": lambda dims=(): _shape(dims),
    "torch device": lambda *parts: ":".join(str(part) for part in parts),
    "torch._utils _rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils _rebuild_parameter_with_state": lambda tensor, *_: tensor,
    # A tensor or a parameter with attributes, which are left out.
    "torch._tensor _rebuild_from_type_v2": lambda rebuild, kind, arguments, state: _of(Name, rebuild).make(*arguments),
    "torch.serialization _get_layout": lambda name: str(name),
    "_codecs encode": _text_bytes,
    "numpy dtype": _numpy_dtype,
    "numpy ndarray": lambda *_: NumpyArray(),
    "numpy.core.multiarray _reconstruct": lambda *_: NumpyArray(),
    "numpy._core.multiarray _reconstruct": lambda *_: NumpyArray(),
    "numpy.core.multiarray scalar": _numpy_scalar,
    "numpy._core.multiarray scalar": _numpy_scalar,
    "pathlib PosixPath": _path,
    "deepspeed.runtime.zero.config ZeroStageEnum": _enum_value,
    "argparse Namespace": _record("argparse Namespace"),
    "types SimpleNamespace": _record("types SimpleNamespace"),
    "deepspeed.utils.tensor_fragment fragment_address": _record("fragment_address"),
    "deepspeed.runtime.fp16.loss_scaler LossScaler": _record("LossScaler"),
    "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler": _record("DynamicLossScaler"),
    "deepspeed.checkpoint SubparamShape": _record("SubparamShape"),
    "deepspeed.checkpoint.utils SubparamShape": _record("SubparamShape"),
    "deepspeed.checkpoint.universal_checkpoint SubparamShape": _record("SubparamShape"),
}
_VALUES: dict[str, Any] = {
    **{f"torch {name}": StorageType(getattr(torch, dtype)) for dtype, name in _STORAGES.items()},
    "torch Tensor": "Tensor", "torch._tensor Tensor": "Tensor", "torch.nn.parameter Parameter": "Parameter",
    **{f"torch {str(dtype).removeprefix('torch.')}": dtype for dtype in DTYPES.values()},
}


class PickleReader:
    """Reads one pickle.

    tensor: makes what stands for a tensor, from the arguments of `torch._utils._rebuild_tensor_v2`. storage: makes what
    stands for a storage, from its persistent id.
    """

    def __init__(self, tensor: Callable[..., Any], storage: Callable[[Any], Any]) -> None:
        self._storage = storage
        self._names = {**_CALLS, "torch._utils _rebuild_tensor_v2": tensor}
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._copied = 0

    def read(self, data: bytes) -> Any:
        """Return the pickle's value. ValueError where it is none of those that are read."""
        with warnings.catch_warnings():
            # Of a backslash in a name.
            warnings.simplefilter("ignore", DeprecationWarning)
            return self._read(data)

    def _read(self, data: bytes) -> Any:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
            if count > _COUNT_MAX:
                raise ValueError(f"it has more than {_COUNT_MAX:,} instructions")
            if opcode.name == "STOP":
                if len(self._stack) != 1 or self._stack[0] is _MARK:
                    raise ValueError("its instructions do not fit together")
                return _finished(self._stack.pop())
            if opcode.name in _CONSTANTS:
                self._stack.append(_CONSTANTS[opcode.name]())
            elif opcode.name in _LITERALS:
                self._stack.append(argument)
            else:
                self._carry_out(opcode.name, argument)
        raise ValueError("it ends before its value is complete")

    def _carry_out(self, name: str, argument: Any) -> None:
        stack, memo = self._stack, self._memo
        match name:
            case "PROTO" | "FRAME":
                pass
            case "MARK":
                stack.append(_MARK)
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "TUPLE":
                stack.append(tuple(map(_finished, self._to_mark())))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                count = int(name[-1])
                stack[-count:] = [tuple(map(_finished, stack[-count:]))]
            case "APPEND" | "APPENDS":
                items = [_finished(each) for each in ([stack.pop()] if name == "APPEND" else self._to_mark())]
                _of(list | Unloaded, stack[-1]).extend(items)
            case "ADDITEMS":
                items = self._to_mark()
                _of(set, stack[-1]).update(map(_key, items))
            case "FROZENSET":
                stack.append(frozenset(map(_key, self._to_mark())))
            case "SETITEM" | "SETITEMS":
                items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else self._to_mark()
                pairs = [*zip(map(_key, items[::2]), map(_finished, items[1::2]), strict=True)]
                _of(dict | Unloaded, stack[-1]).update(pairs)
            case "GLOBAL" | "STACK_GLOBAL":
                text = argument if name == "GLOBAL" else " ".join((str(stack.pop(-2)), str(stack.pop())))
                stack.append(self._named(text))
            case "BINPERSID":
                stack.append(self._storage(stack.pop()))
            case "REDUCE" | "NEWOBJ":
                arguments, made = _of(tuple, stack.pop()), _of(Name, stack.pop())
                self._count_copy(arguments)
                stack.append(made.make(*arguments))
            case "BUILD":
                self._build(_finished(stack.pop()))
            case _:
                raise ValueError(f"it holds the instruction {name}, which no checkpoint needs")

    def _to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise ValueError("its instructions do not fit together")
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def _named(self, text: str) -> Any:
        if text in _VALUES:
            return _VALUES[text]
        if text not in self._names and _is_foreign(text):
            name = text.replace(" ", ".", 1)
            return Name(name, lambda *arguments: Unloaded(name, tuple(map(_finished, arguments))))
        if text not in self._names:
            name = text.replace(" ", ".", 1)
            raise ValueError(f"it holds a {shortened(name, 200)}, which is none of the types that are read")
        return Name(text, self._names[text])

    def _count_copy(self, arguments: tuple[Any, ...]) -> None:
        """Count what a call copies of its arguments: a few bytes can name the same list a million times."""
        for each in arguments:
            if isinstance(each, str | bytes | list | tuple | dict | set | frozenset):
                self._copied += len(each) * (1 if isinstance(each, str | bytes) else 8)
        if self._copied > _COPIED_MAX:
            raise ValueError(f"its values repeat each other: more than {_COPIED_MAX:,} bytes")

    def _build(self, state: Any) -> None:
        made = self._stack[-1]
        if isinstance(made, NumpyArray | _DType):
            self._count_copy(_of(tuple, state))
            made.build(state)
        elif isinstance(made, Unloaded):
            made.build(state)
        elif isinstance(made, PickledObject):
            made.attributes.update(_of(dict, state))
        elif not isinstance(made, dict):
            # A state dict has attributes, too, which are left out.
            raise ValueError(f"it gives a {type(made).__name__} attributes")


_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None, "NEWTRUE": lambda: True, "NEWFALSE": lambda: False, "EMPTY_DICT": dict, "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple, "EMPTY_SET": set,
}  # fmt: skip
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip


def _is_foreign(text: str) -> bool:
    """Return whether a name (module, space, name) is of a program's or a library's own, so that an object of it may be
    left out. Of Python itself, torch, numpy and DeepSpeed a checkpoint needs those that are read; of a few of their
    modules programs keep values, too.
    """
    module, _, name = text.partition(" ")
    if not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        return False
    if module in _MODULES_OF_VALUES or module.startswith(("torch.nn.", "torch.optim.")):
        return True
    return module.partition(".")[0] not in _OTHERS


# `__builtin__` and others: names of Python 2, which a protocol of that time still writes.
_OTHERS = {*sys.stdlib_module_names, "__builtin__", "copy_reg", "commands", "torch", "numpy", "deepspeed"}
_MODULES_OF_VALUES = {"datetime", "decimal", "fractions", "uuid", "zoneinfo"}


def _finished(value: Any) -> Any:
    """Return what an array or a dtype of numpy has become, and what stands for a name that is not called."""
    if isinstance(value, Name) and " " not in value.text:
        return Unloaded(value.text)
    if isinstance(value, NumpyArray):
        return value.value if value.value is not None else value
    return np.dtype(value.code) if isinstance(value, _DType) else value


def _key(value: Any) -> Any:
    """Return the key of a dictionary, or the item of a set. Deeply nested tuples would exhaust the stack."""
    parts = value if type(value) is tuple else (value,)
    if any(type(part) not in _KEYS for part in parts):
        raise ValueError(f"a {type(value).__name__} is a key")
    return value


_KEYS = {str, bytes, int, float, bool, type(None), Unloaded}


def _of(kind: type[Any] | UnionType, value: Any) -> Any:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise ValueError(f"its instructions do not fit together (a {type(value).__name__} for a {wanted})")
    return value


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
