"""Hooks leave a module what it was: in-place operations, and structures of inputs and outputs."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.zero.hooks import announce_end, replace_tensors, tensors_in


class Pair(NamedTuple):
    """Two tensors."""

    first: Tensor
    second: Tensor


@dataclass
class Record:
    """A tensor among other things."""

    tensor: Tensor
    name: str = "record"


class Changes(nn.Module):
    """A block whose first operation changes its input in place, as pre-activation networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.relu_(x))


def test_a_block_may_change_its_input_in_place(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), *[Changes() for _ in range(3)])
    model = copy.deepcopy(plain)
    inputs = torch.randn(4, 8)
    plain(inputs).square().sum().backward()
    home = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_param_persistence_threshold": 0}
    engine, *_ = infinity.initialize(model=model, config={"zero_optimization": zero})
    with engine:
        engine.backward(engine(inputs).square().sum())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.state(ours).grad, theirs.grad)


def test_a_change_in_place_of_what_backward_needs_is_still_an_error() -> None:
    needed = torch.ones(3, requires_grad=True).exp()
    passed = announce_end(needed, lambda: None)
    passed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.sum().backward()


@pytest.mark.parametrize("wrap", [
    lambda a, b: (a, b), lambda a, b: [a, {"x": b}], lambda a, b: {"a": a, "b": [b]}, Pair,
    lambda a, b: (Record(a), {"r": Record(b)}), lambda a, b: ((a,), 3, None, "s", (b,)),
])  # fmt: skip
def test_every_structure_announces_its_end_once(wrap: Any) -> None:
    leaves = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    ended: list[int] = []
    structure = announce_end(wrap(*leaves), lambda: ended.append(1))
    found = tensors_in(structure)
    assert len(found) == 2
    assert type(structure) is type(wrap(*leaves))
    sum(tensor.sum() for tensor in found).backward()
    assert ended == [1]
    assert all(torch.equal(leaf.grad, torch.ones(2)) for leaf in leaves)


def test_a_structure_without_tensors_is_passed_on() -> None:
    record = {"a": 1, "b": ["c", None]}
    assert replace_tensors(record, lambda tensor: tensor) == record
    assert announce_end((torch.ones(2), record), lambda: None) is None
