"""Reading a pickle that an attacker may have written.

`pickletools` decodes one instruction after the other, and this module carries out those that data needs, on plain
values. A name in the pickle is looked up in `_CALLS` and `_VALUES`, and nothing is imported: each name there stands for
a function of this module that makes a plain value, or for a value. A name of a program's own (`_is_foreign`) becomes an
`Unloaded`, which holds what the pickle would have given to it. Any other name, and any other instruction, is an error
that names it.
"""

from __future__ import annotations

import pickletools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

import numpy as np
import torch

from infinity.config.untrusted import shortened
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
