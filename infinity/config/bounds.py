"""Size limits of a configuration, checked before any other code walks through it.

An input beyond these limits is not a configuration but, for example, a wrong file, a structure that contains itself or
an experiment's whole record.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from infinity.errors import ConfigError

TEXT_LENGTH_MAX = 4 << 20
DEPTH_MAX = 64
VALUES_MAX = 10_000
# The largest float is below 2**1024.
_INT_BITS_MAX = 1024


class _Repr(reprlib.Repr):
    """`repr` with limits that leave the value of any setting whole."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 200
        self.maxlong = 400
        self.maxlevel = 6
        self.maxlist = self.maxtuple = self.maxdict = 20


_repr = _Repr()


def shown(value: object) -> str:
    """Return `repr(value)` for a message, cut where it is long or deep."""
    return _repr.repr(value)


def check_text(origin: str, length: int) -> None:
    """Raise ConfigError if a text of `length` bytes from `origin` is too long for a configuration."""
    if length > TEXT_LENGTH_MAX:
        raise ConfigError(
            f"{origin}: {length:,} bytes are too many for a configuration, which has at most {TEXT_LENGTH_MAX:,}: give "
            "the path of the JSON file with infinity's or DeepSpeed's keys"
        )


def check_structure(origin: str, raw: Mapping[Any, Any]) -> None:
    """Raise ConfigError if `raw` is nested too deeply, has too many values or holds an integer beyond every float."""
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
