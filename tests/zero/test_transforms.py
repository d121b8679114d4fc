"""torch.func over an engine and its modules: plain torch's bits where weights are whole, refused in words elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacrev, jvp, vmap

import infinity
from infinity.errors import StateError


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().sum()


X = torch.linspace(-1, 1, 8)
BATCH = torch.stack([X, X + 0.1, X - 0.1])


def per_sample(_: Any, model: nn.Module) -> Tensor:
    weights = {name: param.detach() for name, param in model.named_parameters()}
    of_sample = grad(lambda given, x: functional_call(model, given, (x,)))
    return vmap(of_sample, (None, 0))(weights, BATCH)["layers.0.weight"]


# What each does with the engine (or the plain model), and with the model.
TRANSFORMS: dict[str, Callable[[Any, Any], Tensor]] = {
    "grad": lambda call, _: grad(lambda x: call(x))(X),
    "grad_and_value": lambda call, _: grad_and_value(lambda x: call(x))(X)[1],
    "jacrev": lambda call, _: jacrev(lambda x: call(x))(X),
    "hessian": lambda call, _: hessian(lambda x: call(x))(X),
    "jvp": lambda call, _: jvp(lambda x: call(x), (X,), (X,))[1],
    "vmap of grad": lambda call, _: vmap(grad(lambda x: call(x)))(BATCH),
    "grad of a module": lambda _, model: grad(lambda x: model.layers[0](x).sum())(X),
    "gradients by sample": per_sample,
}


def engine_of(model: nn.Module, stage: int, tier: str, folder: Path, **more: Any) -> Any:
    home = {"device": tier, "nvme_path": str(folder)}
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_optimizer": home} if stage else {}
    zero |= {"offload_param": home} if stage == 3 else {}
    config = {
        "train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": zero, "log_level": "error", **more,
    }  # fmt: skip
    return infinity.initialize(model=model, config=config)[0]


def after_a_step(engine: Any) -> Model:
    """Return a plain model with the weights of the engine after a step, which whole units follow at their next use."""
    engine.backward(engine(X))
    engine.step()
    plain = Model()
    plain.load_state_dict({name: infinity.state(param).master for name, param in engine.module.named_parameters()})
    return plain


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (1, "cpu"), (2, "nvme")])
def test_transforms_have_plain_torch_s_bits_where_weights_are_whole(stage: int, tier: str, tmp_path: Path) -> None:
    model = Model()
    with engine_of(model, stage, tier, tmp_path) as engine:
        plain = after_a_step(engine)
        for name, transform in TRANSFORMS.items():
            assert torch.equal(transform(engine, model), transform(plain, plain)), name
        # A penalty on the gradient trains.
        loss, expected = (TRANSFORMS["grad"](call, None).square().sum() for call in (engine, plain))
        engine.backward(loss)
        expected.backward()
        for name, param in plain.named_parameters():
            assert torch.equal(infinity.state(model.get_parameter(name)).grad, param.grad), name
        engine.step()


def test_transforms_are_refused_where_weights_are_released_and_work_while_a_block_keeps_them(tmp_path: Path) -> None:
    model = Model()
    with engine_of(model, 3, "nvme", tmp_path) as engine:
        plain = after_a_step(engine)
        for name, transform in TRANSFORMS.items():
            with pytest.raises(StateError, match=r"torch\.func.*infinity\.read|is partitioned"):
                transform(engine, model)
            with torch.no_grad(), infinity.read(model):
                assert torch.equal(transform(engine, model), transform(plain, plain)), name
        with torch.no_grad():
            assert torch.equal(vmap(engine)(BATCH), vmap(plain)(BATCH))
        engine.backward(engine(X))
        engine.step()


def test_recomputed_blocks_run_once_under_a_transform(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
    plain = copy.deepcopy(model)
    with engine_of(model, 2, "cpu", tmp_path, activation_checkpointing={"every": 1}) as engine:
        found, expected = (grad(lambda x, call=call: call(x).sum())(X[None]) for call in (engine, plain))
        assert torch.equal(found, expected)
