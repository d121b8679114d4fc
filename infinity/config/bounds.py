"""Bounds on what may be a configuration. What exceeds them is something else: another file, a structure that contains
itself, an experiment's whole record. It is refused before anything walks through it.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError

TEXT_LENGTH_MAX = 4 << 20
DEPTH_MAX = 64
VALUES_MAX = 10_000
# No float is greater.
_INT_BITS_MAX = 1024

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 200
_repr.maxlong = 400
_repr.maxlevel = 6
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 20


def shown(value: object) -> str:
    """`repr` of a value for a message, cut where it is long or deep."""
    return _repr.repr(value)


def check_text(origin: str, length: int) -> None:
    """ConfigError for a text of `length` bytes that is too long to be a configuration."""
    if length > TEXT_LENGTH_MAX:
        raise ConfigError(
            f"{origin}: {length:,} bytes are too many for a configuration, which has at most {TEXT_LENGTH_MAX:,}: give "
            "the path of the JSON file with infinity's or DeepSpeed's keys"
        )


def check_structure(origin: str, raw: Mapping[Any, Any]) -> None:
    """ConfigError for nesting, a number of values or an integer that no configuration has."""
    count = 0
    left: list[tuple[str, int, Any]] = [("", 0, raw)]
    while left:
        path, depth, value = left.pop()
        count += 1
        if count > VALUES_MAX:
            raise ConfigError(
                f"{origin}: a configuration has at most {VALUES_MAX:,} values: pass only the keys in "
                "docs/configuration.md"
            )
        if depth > DEPTH_MAX:
            raise ConfigError(
                f"{origin}: {'.'.join(path.split('.')[:4])}... goes deeper than {DEPTH_MAX} levels (does the structure "
                "contain itself?): no key of the configuration is nested that far"
            )
        if isinstance(value, int) and value.bit_length() > _INT_BITS_MAX:
            raise ConfigError(f"{origin}: {path}: an integer of {value.bit_length()} bits is too great for any setting")
        if isinstance(value, Mapping):
            left += [(f"{path}.{key}" if path else f"{key}", depth + 1, inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            left += [(path, depth + 1, inner) for inner in value]
