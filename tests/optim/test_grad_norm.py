"""Norms of gradients whose partitions have different homes: some on the device, some in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from infinity.ops.adam import GradStats
from infinity.plan.types import Key, Kind, Tier
from infinity.step import norms
from infinity.step.norms import Norms

# Elements of each unit's gradient, and where it lies; `meta` stands for a device.
UNITS = [(3, "cpu"), (5, "meta"), (7, "cpu"), (11, "meta")]


def refusing(tensors: Sequence[Tensor]) -> list[GradStats]:
    """As `grad_stats`, which takes tensors of one home; it counts elements."""
    if len({tensor.device for tensor in tensors}) > 1:
        raise ValueError(f"tensors lie on {[str(tensor.device) for tensor in tensors]}: one device a call")
    return [GradStats(float(tensor.numel()), tensor.numel() % 2) for tensor in tensors]


class Store:
    @contextmanager
    def read(self, *keys: Key, by: Any) -> Iterator[list[Any]]:
        partitions = []
        for key in keys:
            numel, device = UNITS[key.index]
            grad = torch.empty(numel, device=device)
            partitions.append(SimpleNamespace(view=lambda kind, grad=grad: grad if kind is Kind.GRAD else None))
        yield partitions


@pytest.fixture
def mixed(monkeypatch: pytest.MonkeyPatch) -> Norms:
    monkeypatch.setattr(norms, "grad_stats", refusing)

    def overlaps(index: int) -> Any:
        slot = SimpleNamespace(name=f"param{index}")
        return lambda first, end: [SimpleNamespace(slot=slot.name, range_start=0, numel=end - first)]

    layouts = [
        SimpleNamespace(
            index=index, trainable=True, slots=(), partition_start=lambda parts, own: 0, overlaps=overlaps(index)
        )
        for index in range(len(UNITS))
    ]
    placement = SimpleNamespace(units=[SimpleNamespace(parts=1, grad=Tier.CPU) for _ in UNITS])
    plan = SimpleNamespace(layouts=layouts, placement=placement, pipeline=None, told_elsewhere=frozenset())
    groups = SimpleNamespace(data=SimpleNamespace(index=0))
    return Norms(plan, Store(), groups)  # type: ignore[arg-type]


def test_a_norm_over_mixed_homes_is_taken_home_by_home(mixed):
    assert mixed.by_unit() == {index: (float(numel), 1) for index, (numel, _) in enumerate(UNITS)}


def test_norms_by_parameter_over_mixed_homes_keep_their_order(mixed):
    found = mixed.by_parameter(None)
    assert [(unit, stats.sum_of_squares) for (unit, _), stats in found.items()] == [
        (index, float(numel)) for index, (numel, _) in enumerate(UNITS)
    ]


def test_a_unit_whose_gradients_change_leaves_the_batch_that_waits(mixed, monkeypatch):
    """A second backward of a step begins to write what would be measured behind the program."""
    monkeypatch.setattr(norms, "_BATCH_UNITS_MAX", 3)
    monkeypatch.setattr(Store, "__getitem__", lambda self, key: SimpleNamespace(spec=SimpleNamespace(nbytes=4)), False)
    assert mixed.batch(0) == [] and mixed.batch(1) == []
    mixed.unqueue(0)
    assert mixed.batch(2) == []
    assert mixed.batch(3) == [1, 2, 3]


def test_a_unit_whose_gradients_change_is_measured_again(mixed, monkeypatch):
    mixed.measure([0, 1], None)
    monkeypatch.setattr(norms, "grad_stats", lambda tensors: [GradStats(0.5, 0) for _ in tensors])
    mixed.forget(0)
    assert mixed.by_unit() == {0: (0.5, 0), 1: (5.0, 1), 2: (0.5, 0), 3: (0.5, 0)}
