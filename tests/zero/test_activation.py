"""Measured shapes of a pass: what counts, what does not, and that nothing of the model changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infinity import measure_activations
from infinity.errors import ConfigError


class Chain(nn.Module):
    """Two linear layers of 64 x 64 around a ReLU, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64, bias=False)
        self.second = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).sum()


def test_what_is_kept_is_counted_once_and_by_module():
    found = measure_activations(Chain(), {"x": torch.randn(1000, 64)})
    one = 1000 * 64 * 4
    # The input is the caller's, and ReLU's output is also what the second layer takes.
    assert found.parts["Chain"] == pytest.approx(one, rel=0.01)
    assert found.saved_nbytes == pytest.approx(one, rel=0.01)
    # The busiest moment is ReLU's backward: what it kept, and the gradients of its output and of its input.
    assert found.nbytes == pytest.approx(3 * one, rel=0.01)
    assert found.source == "measured shapes of one pass"


def test_gradients_of_parameters_do_not_count():
    """Also not the parts that autograd adds where a weight is used twice."""

    class Tied(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.second.weight = self.first.weight

    for model in (Chain(), Tied()):
        found = measure_activations(model, {"x": torch.randn(4, 64)})
        assert found.nbytes < 4 * 64 * 64


def test_neither_the_model_nor_its_gradients_change():
    model = Chain()
    before = {name: param.clone() for name, param in model.named_parameters()}
    measure_activations(model, {"x": torch.randn(10, 64)})
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name])
        assert param.grad is None
        assert type(param) is nn.Parameter
    assert not model._forward_hooks and not model.first._forward_hooks


def test_the_meta_device_measures_the_same():
    with torch.device("meta"):
        on_meta = Chain()
        x = torch.randn(100, 64)
    assert measure_activations(on_meta, {"x": x}) == measure_activations(Chain(), {"x": torch.randn(100, 64)})


def test_a_forward_that_depends_on_values_is_refused_with_the_way_out():
    class Depends(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[: int(x.sum().item())])

    with pytest.raises(ConfigError, match=r"Depends cannot be measured on shapes alone: .*closed forms"):
        measure_activations(Depends(), {"x": torch.randn(10, 64)})
