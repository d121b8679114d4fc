"""The differences between two checkpoints, from whatever topology, stage and tiers each was saved.

Values are compared element by element: masters in fp32, joined from what each side keeps, then each kind of optimizer
state, then buffers. A block of elements of each side is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.files import ExtentReader
from infinity.checkpoint.format import BUFFER, MASTER, PARAM, REMAINDER, Manifest, check_files
from infinity.checkpoint.restore import CheckpointSource

WEIGHT = "weight"
_BLOCK_NUMEL = 1 << 20
_OF_MASTERS = (PARAM, REMAINDER, MASTER)


@dataclass(frozen=True, slots=True)
class Change:
    """One kind of a tensor that differs: elements that do, and the largest difference (nan where one side is)."""

    tensor: str
    kind: str
    numel: int
    changed: int
    largest: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """`compared` counts tensors by kind. `unlike` are (tensor, first's kinds, second's) where one side keeps what the
    other does not. `counters` are (name, first, second) of what differs about the run.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    reshaped: tuple[str, ...]
    unlike: tuple[tuple[str, str, str], ...]
    compared: Mapping[str, int]
    changes: tuple[Change, ...]
    counters: tuple[tuple[str, Any, Any], ...]

    @property
    def same(self) -> bool:
        """Whether the two are equal."""
        return not (self.added or self.removed or self.reshaped or self.unlike or self.changes or self.counters)


def compare_checkpoints(
    first: tuple[Path, Manifest], second: tuple[Path, Manifest],
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:  # fmt: skip
    """Compare two checkpoints, verifying every block that is read. tell: called with (elements done, all elements)."""
    (one_folder, one), (two_folder, two) = first, second
    both = [name for name in one.tensors if name in two.tensors]
    alike = [name for name in both if one.tensors[name].shape == two.tensors[name].shape]
    work = [(name, kind) for name in alike for kind in _kinds(one, two, name)]
    total = sum(one.tensors[name].numel for name, _ in work)
    compared: dict[str, int] = {}
    changes = []
    done = 0
    with (
        ExtentReader(one_folder, one, check_files(one_folder, one)) as left,
        ExtentReader(two_folder, two, check_files(two_folder, two)) as right,
    ):
        sources = CheckpointSource(left), CheckpointSource(right)
        for name, kind in work:
            numel, changed, largest = one.tensors[name].numel, 0, 0.0
            compared[kind] = compared.get(kind, 0) + 1
            for a, b in zip(*(_blocks(source, name, kind) for source in sources), strict=True):
                count, distance = _distance(a, b)
                changed += count
                largest = distance if math.isnan(distance) or math.isnan(largest) else max(largest, distance)
                done += a.numel()
                tell(done, total)
            if changed:
                changes.append(Change(name, kind, numel, changed, largest))
    return Comparison(
        added=tuple(name for name in two.tensors if name not in one.tensors),
        removed=tuple(name for name in one.tensors if name not in two.tensors),
        reshaped=tuple(name for name in both if name not in set(alike)),
        unlike=tuple(_unlike(one, two, alike)),
        compared=compared, changes=tuple(changes), counters=tuple(_run_differences(one, two)),
    )  # fmt: skip


def _kinds(one: Manifest, two: Manifest, name: str) -> list[str]:
    """Return the kinds of a tensor that both sides keep."""
    kinds = [set(manifest.tensors[name].kinds) for manifest in (one, two)]
    shared = kinds[0] & kinds[1]
    found = [WEIGHT] if PARAM in shared else []
    return found + sorted(shared - set(_OF_MASTERS))


def _unlike(one: Manifest, two: Manifest, names: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield tensors of which one side keeps fewer kinds; REMAINDER and MASTER, which follow the precision, aside."""
    for name in names:
        kinds = [set(manifest.tensors[name].kinds) - {REMAINDER, MASTER} for manifest in (one, two)]
        if kinds[0] != kinds[1]:
            first, second = (", ".join(sorted(each)) or "nothing" for each in kinds)
            yield name, first, second


def _blocks(source: CheckpointSource, name: str, kind: str) -> Iterator[Tensor]:
    numel = source.tensors[name].numel
    for start in range(0, numel, _BLOCK_NUMEL):
        count = min(_BLOCK_NUMEL, numel - start)
        if kind == WEIGHT:
            yield source.masters(name, start, count)
            continue
        values = source.values(name, kind, start, count)
        yield values.float() if kind != BUFFER and values.is_floating_point() else values


def _distance(a: Tensor, b: Tensor) -> tuple[int, float]:
    """Return the number of elements that differ in their bits, and the largest absolute difference."""
    if a.dtype is b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return 0, 0.0
    a, b = a.double(), b.double()
    other = (a != b) & ~(a.isnan() & b.isnan())
    if not bool(other.any()):
        return 0, 0.0
    difference = (a[other] - b[other]).abs()
    return int(other.sum()), float(difference.max())


def _run_differences(one: Manifest, two: Manifest) -> Iterator[tuple[str, Any, Any]]:
    left, right = (dict(_flat("", {**each.engine, "client_state": each.client_state})) for each in (one, two))
    for name in {**left, **right}:
        if left.get(name) != right.get(name):
            yield name, left.get(name), right.get(name)
    tensors = [None if each.client is None else f"crc32c {each.client.crc32c:08x}" for each in (one, two)]
    if tensors[0] != tensors[1]:
        yield "tensors of client_state", tensors[0], tensors[1]


def _flat(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        for at, inner in enumerate(value):
            yield from _flat(f"{path}[{at}]", inner)
    else:
        yield path, value
