"""A program's values as JSON, and back: client state, schedulers, hyper-parameters, random states.

JSON has no tuples, bytes, infinities or keys other than strings. Each of these becomes an object with one key that
begins with "$". Tensors and numpy arrays become references, by their path; their bytes go into a safetensors file. An
argparse.Namespace becomes the dictionary of its values, and stays one.
"""

from __future__ import annotations

import argparse
import base64
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from infinity.memory.partition import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_NOT_FINITE = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class NotSerializable(ValueError):
    """A value that cannot be encoded; the message names its path and its type."""


class NotDecodable(ValueError):
    """JSON that `encode` never returns."""


def encode(value: Any, tensors: dict[str, Tensor] | None = None, path: str = "") -> Any:
    """Return a value as JSON, and put tensors and arrays of more than one element into `tensors`, by path.

    NotSerializable for a value that would have to be pickled, and for an array where `tensors` is None.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        # A member of an IntEnum must not become a plain number.
        if value is None or type(value) in (bool, int, str):
            return value
        raise _unspeakable(value, path)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Tensor | np.ndarray):
        return _encode_array(value, tensors, path)
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{path}[{at}]") for at, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, tensors, path)
    if isinstance(value, argparse.Namespace):
        return _encode_mapping(vars(value), tensors, path)
    raise _unspeakable(value, path)


def decode(value: Any, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return the value that `encode` was given, with its `tensors` by path. NotDecodable for any other JSON."""
    try:
        return _decode(value, tensors or {})
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise NotDecodable(f"a value is encoded in an unknown way ({type(error).__name__}: {error})") from error


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        match key:
            case "$float":
                return _NOT_FINITE[inner]
            case "$bytes":
                return base64.b64decode(inner, validate=True)
            case "$tuple":
                return tuple(_decode(item, tensors) for item in _of(list, inner))
            case "$pairs":
                return {_decode(name, tensors): _decode(item, tensors) for name, item in _of(list, inner)}
            case "$counter":
                return Counter({_decode(name, tensors): _of(int, count) for name, count in _of(list, inner)})
            case "$scalar":
                dtype, shape, number = _of(list, inner)
                return torch.tensor(_decode(number, {}), dtype=DTYPES[dtype], device="cpu").view(_of(list, shape))
            case "$tensor":
                return tensors[inner]
            case "$array":
                return tensors[inner].numpy()
    return {name: _decode(item, tensors) for name, item in value.items()}


def _of(kind: type[Any], value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} where a {kind.__name__} is written")
    return value


def _encode_array(value: Tensor | np.ndarray[Any, Any], tensors: dict[str, Tensor] | None, path: str) -> Any:
    if isinstance(value, Tensor):
        flat = value.detach().cpu()
        if tensors is None and flat.numel() == 1 and flat.dtype in _NAMES:
            return {"$scalar": [_NAMES[flat.dtype], list(flat.shape), encode(flat.item())]}
    else:
        try:
            flat = torch.from_numpy(np.array(value, order="C"))
        except (TypeError, ValueError) as error:
            raise _unspeakable(value, path) from error
    if tensors is None or flat.layout is not torch.strided:
        raise _unspeakable(value, path)
    name, count = path, 1
    # Two values may share a path: {"a": {"b": ...}, "a.b": ...}.
    while name in tensors:
        count += 1
        name = f"{path} ({count})"
    tensors[name] = flat.contiguous()
    return {"$tensor" if isinstance(value, Tensor) else "$array": name}


def _encode_mapping(value: Mapping[Any, Any], tensors: dict[str, Tensor] | None, path: str) -> Any:
    if type(value) is Counter:
        return {"$counter": [[encode(key, None, path), count] for key, count in value.items()]}
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    if plain:
        return {key: encode(item, tensors, f"{path}.{key}" if path else key) for key, item in value.items()}
    return {
        "$pairs": [[encode(key, None, path), encode(item, tensors, f"{path}[{key!r}]")] for key, item in value.items()]
    }


def _unspeakable(value: Any, path: str) -> NotSerializable:
    kind = type(value)
    return NotSerializable(
        f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which could only be pickled: keep numbers, "
        "texts, lists, tuples, dictionaries, tensors and numpy arrays there"
    )
