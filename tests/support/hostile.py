"""Seeded damage to metadata: what a broken drive, another program or an attacker puts into files that are read.

A mutation changes one place of a JSON value, or the bytes of a file. The checksum is made to fit afterwards, so that
the values are looked at and not only their bytes.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

from infinity.ops.crc32c import checksum

NAMES = (
    "../x", "/abs", "", "a/b", "a\0b", "..", ".", "../../outside.bin", ".hidden", "x" * 5000, "a\nb", "manifest.json",
    "\ud800",
)  # fmt: skip
NUMBERS = (0, 1, -1, 7, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63), 1.0, 0.5, -1.5, 1e308, True, False)
OTHERS = (
    None, [], {}, [[]], [0], ["../x"], {"a": 1}, {"$tensor": "x"}, {"$float": "inf"}, {"$float": []}, {"$tuple": 3},
    {"$bytes": "%"}, {"$pairs": [[[1], 2]]}, {"$scalar": ["fp32", [-1], "x"]}, {"$counter": [1]}, {"$array": None},
    {"nbytes": -1, "name": "../x", "crc32c": 0},
)  # fmt: skip
VALUES = (*NAMES, *NUMBERS, *OTHERS)
# Texts that replace a marker in JSON: values outside of JSON, or misleading ones.
MARKER = "a marker of the mutation"
TEXTS = (
    "NaN", "Infinity", "-Infinity", "1e999", "-0", "9" * 5000, "[" * 3000 + "]" * 3000, '{"a":' * 400 + "1" + "}" * 400,
    "[" * 100_000, '{"a":1,"a":2}', "'x'", "", "nul", "\\", '"\\ud800"',
)  # fmt: skip


def mutated(value: Any, chance: random.Random) -> bytes:
    """Return the JSON text of a value with one to three mutations."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        changed = _mutate(changed, chance)
    text = json.dumps(changed, sort_keys=True, separators=(",", ":"))
    marker = json.dumps(MARKER)
    if marker in text:
        text = text.replace(marker, chance.choice(TEXTS), 1)
    return text.encode("utf-8", "surrogatepass")


def damaged(data: bytes, chance: random.Random) -> bytes:
    """Return bytes with flipped bits, truncated, repeated or replaced."""
    out = bytearray(data)
    kind = chance.randrange(5)
    at = chance.randrange(len(out))
    if kind == 0:
        for _ in range(chance.randrange(1, 4)):
            out[chance.randrange(len(out))] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del out[at:]
    elif kind == 2:
        del out[at : at + chance.randrange(1, 40)]
    elif kind == 3:
        out[at:at] = out[at : at + chance.randrange(1, 60)]
    else:
        out[at : at + 8] = struct.pack("<q", chance.choice([number for number in NUMBERS if -(2**63) <= number < 2**63
                                                            and type(number) is int]))  # fmt: skip
    return bytes(out)


def sealed(text: bytes) -> bytes:
    """Return a metadata file with the right checksum for any body."""
    return b'{"body":' + text + b',"crc32c":%d}\n' % checksum(text)


def headed(text: bytes, data: bytes, chance: random.Random | None = None) -> bytes:
    """Return a safetensors file with this header; with `chance` the header's length is sometimes wrong."""
    length = len(text)
    if chance is not None and chance.random() < 0.1:
        length = chance.choice((0, 1, length - 1, length + 1, length + len(data) + 1, 2**31, 2**63, 2**64 - 1))
    return length.to_bytes(8, "little") + text + data


def _mutate(value: Any, chance: random.Random) -> Any:
    """Return a value with one change at a random place, found by a walk from the root."""
    if not isinstance(value, dict | list) or not value or chance.random() < 0.15:
        return _other(value, chance)
    key = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    if isinstance(value[key], dict | list) and value[key] and chance.random() < 0.8:
        value[key] = _mutate(value[key], chance)
        return value
    chance.choice(_CHANGES)(value, key, chance)
    return value


def _replace(value: Any, key: Any, chance: random.Random) -> None:
    value[key] = _other(value[key], chance)


def _remove(value: Any, key: Any, chance: random.Random) -> None:
    del value[key]


def _repeat(value: Any, key: Any, chance: random.Random) -> None:
    if isinstance(value, list):
        value.insert(key, copy.deepcopy(value[key]))
    else:
        value[chance.choice((*NAMES, f"{key} again"))] = copy.deepcopy(value[key])


def _rename(value: Any, key: Any, chance: random.Random) -> None:
    if isinstance(value, dict):
        value[chance.choice(NAMES)] = value.pop(key)
    else:
        value.reverse()


def _swap(value: Any, key: Any, chance: random.Random) -> None:
    other = chance.choice(list(value) if isinstance(value, dict) else range(len(value)))
    value[key], value[other] = value[other], value[key]


_CHANGES: tuple[Callable[[Any, Any, random.Random], None], ...] = (_replace, _replace, _replace, _remove, _repeat,
                                                                   _rename, _swap)  # fmt: skip


def _other(value: Any, chance: random.Random) -> Any:
    """Return a replacement of a value, mostly of another type or size."""
    if type(value) is int and chance.random() < 0.4:
        return chance.choice((-value, value + 1, value - 1, value * 2, value * 10**25, float(value), str(value),
                              value + 4096))  # fmt: skip
    if isinstance(value, str) and chance.random() < 0.4:
        return chance.choice(NAMES)
    if chance.random() < 0.1:
        return MARKER
    return copy.deepcopy(chance.choice(VALUES))
