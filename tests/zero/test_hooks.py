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
from infinity.errors import StateError
from infinity.zero.hooks import register_post_backward, replace_tensors, tensors_in
from tests.support.oracle import settings


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
    passed = register_post_backward(needed, lambda: None)
    passed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        passed.sum().backward()


@pytest.mark.parametrize(("stage", "threshold"), [(2, 0), (3, 1000), (3, 0)])
def test_a_double_backward_is_plain_torchs_or_refused(tmp_path: Path, stage: int, threshold: int) -> None:
    """A penalty on the gradient of the inputs; weights that are released must not be read by the second backward."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8, requires_grad=True)
    zero = {"stage3_param_persistence_threshold": threshold, "stage3_max_live_parameters": 100}
    engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, stage=stage, param="cpu", zero=zero))

    def penalty(call: nn.Module) -> Tensor:
        (slope,) = torch.autograd.grad(call(x).sum(), x, create_graph=True)
        return slope.square().sum()

    with engine:
        (slope,) = torch.autograd.grad(engine(x).sum(), x)
        assert slope.any()
        if (stage, threshold) == (3, 0):
            with pytest.raises(StateError, match=r"double backward .* goes through \d.*threshold above \d+"):
                engine.backward(penalty(engine))
            return
        engine.zero_grad()
        engine.backward(penalty(engine))
        penalty(plain).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert theirs.grad is None or torch.equal(infinity.state(ours).grad, theirs.grad)


@pytest.mark.parametrize("wrap", [
    lambda a, b: (a, b), lambda a, b: [a, {"x": b}], lambda a, b: {"a": a, "b": [b]}, Pair,
    lambda a, b: (Record(a), {"r": Record(b)}), lambda a, b: ((a,), 3, None, "s", (b,)),
])  # fmt: skip
def test_every_structure_announces_its_end_once(wrap: Any) -> None:
    leaves = [torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)]
    ended: list[int] = []
    structure = register_post_backward(wrap(*leaves), lambda: ended.append(1))
    found = tensors_in(structure)
    assert len(found) == 2
    assert type(structure) is type(wrap(*leaves))
    sum(tensor.sum() for tensor in found).backward()
    assert ended == [1]
    assert all(torch.equal(leaf.grad, torch.ones(2)) for leaf in leaves)


def test_a_structure_without_tensors_is_passed_on() -> None:
    record = {"a": 1, "b": ["c", None]}
    assert replace_tensors(record, lambda tensor: tensor) == record
    assert register_post_backward((torch.ones(2), record), lambda: None) is None
