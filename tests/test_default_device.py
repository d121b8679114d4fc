"""A program may set a default device: nothing in infinity is made there by accident.

`meta` stands for an accelerator: a tensor made on it by accident has no values, and whatever reads it fails.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._device import _device_constructors

import infinity
from tests.support.models import token_batch
from tests.support.oracle import CLIP, Case, join, settings, train

ROOT = Path(__file__).resolve().parents[1]
# What torch makes on the default device, and modules that make parameters.
FACTORIES = {function.__name__ for function in _device_constructors()} | {"Linear", "Embedding", "LayerNorm"}


def unplaced(tree: ast.Module) -> Iterator[str]:
    """Calls of torch's factories, and of the modules that it builds, that name no device."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, name = ast.unparse(node.func.value), node.func.attr
        makes = owner in ("torch", "nn", "torch.nn") and name in FACTORIES
        if makes and all(keyword.arg != "device" for keyword in node.keywords):
            yield f"{node.lineno}: {ast.unparse(node.func)}"


@pytest.mark.parametrize("text", ["torch.empty(3)", "torch.tensor(values, dtype=x)", "nn.Linear(2, 2)"])
def test_a_factory_without_a_device_is_found(text):
    assert len(list(unplaced(ast.parse(text)))) == 1
    assert not list(unplaced(ast.parse(text[:-1] + ", device=there)")))


def test_every_factory_call_names_its_device():
    found = [
        f"{path.relative_to(ROOT)}:{call}"
        for path in sorted((ROOT / "infinity").rglob("*.py"))
        for call in unplaced(ast.parse(path.read_text()))
    ]
    assert not found, "\n".join(found)


@contextmanager
def default_device(name: str = "meta") -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


class OnCpu(Case):
    """The program builds its model and its batches where it wants them."""

    def model(self) -> Any:
        with torch.device("cpu"):
            return super().model()

    def losses(self, call: Any, rank: int, micro: int) -> Any:
        with torch.device("cpu"):
            batch = token_batch(rank, micro, positions=8)
        yield call(**batch)


HOMES = [("gpu", "gpu"), ("cpu", "cpu"), ("nvme", "nvme")]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("param", "optimizer"), HOMES)
def test_training_is_the_same_under_a_default_device(tmp_path, param, optimizer, dtype):
    config = settings(tmp_path, param=param, optimizer=optimizer, dtype=dtype, clip=CLIP)
    expected = train(OnCpu(), config, steps=2)
    with default_device():
        found = train(OnCpu(), config, steps=2)
    assert found.digest == expected.digest


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("optimizer", ["gpu", "cpu"])
def test_the_lower_stages_train_under_a_default_device(tmp_path, stage, optimizer):
    config = settings(tmp_path, stage=stage, optimizer=optimizer, dtype="bf16", accumulation=2)
    expected = train(OnCpu(), config, steps=2)
    with default_device():
        found = train(OnCpu(), config, steps=2)
    assert found.digest == expected.digest


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "NAdam", "Lion"])
def test_every_optimizer_steps_under_a_default_device(tmp_path, kind):
    config = settings(tmp_path, dtype="bf16", optimizer="cpu") | {"optimizer": {"type": kind, "params": {"lr": 1e-3}}}
    losses = [losses_of(config, device) for device in ("cpu", "meta")]
    assert losses[0] == losses[1]


def losses_of(config: dict[str, Any], device: str) -> list[float]:
    with default_device(device):
        case = OnCpu()
        engine, *_ = infinity.initialize(model=case.model(), config=config)
        found = []
        with engine:
            for micro in range(3):
                (loss,) = case.losses(engine, 0, micro)
                engine.backward(loss)
                engine.step()
                found.append(float(loss.detach()))
        return found


def of_ranks(rank: int, world: int, folder: str, meta: bool) -> list[str]:
    join(world)
    digests = []
    for param, optimizer in HOMES:
        config = settings(folder, param=param, optimizer=optimizer, dtype="bf16", clip=CLIP)
        if meta:
            with default_device():
                digests.append(train(OnCpu(), config, rank=rank, steps=2).digest)
        else:
            digests.append(train(OnCpu(), config, rank=rank, steps=2).digest)
    return digests


def test_two_ranks_train_under_a_default_device(rank_pools, tmp_path):
    assert rank_pools[2].run(of_ranks, str(tmp_path), True) == rank_pools[2].run(of_ranks, str(tmp_path), False)


@pytest.mark.parametrize("built", ["plainly", "under Init"])
@pytest.mark.parametrize(("param", "optimizer"), HOMES)
def test_everything_beside_the_loop_works_under_a_default_device(tmp_path, param, optimizer, built):
    config = settings(tmp_path / "swap", param=param, optimizer=optimizer, dtype="bf16")
    case = OnCpu()
    data = [{name: row[0] for name, row in token_batch(0, micro, batch=1).items()} for micro in range(4)]
    with default_device():
        if built == "plainly":
            model = case.model()
        else:
            with infinity.Init(config=config):
                model = case.model()
        engine, _, loader, _ = infinity.initialize(model=model, config=config, training_data=data)
        with engine:
            for batch in loader:
                engine.backward(engine(**batch))
                engine.step()
            name, weight = next(iter(model.named_parameters()))
            state = infinity.state(weight)
            for what in ("master", "exp_avg", "exp_avg_sq"):
                setattr(state, what, getattr(state, what) * 0.5)
                assert getattr(state, what).device.type == "cpu"
            with infinity.modify(weight):
                weight.mul_(0.5)
            with infinity.read(weight):
                kept = weight.detach().clone()
            engine.get_grad_norms()
            engine.save_checkpoint(tmp_path, tag="one")
            engine.save_checkpoint(tmp_path, tag="two", asynchronous=True)
            engine.finish_saving()
            engine.load_checkpoint(tmp_path)
            assert torch.equal(engine.state_dict()[name], kept)
            str(engine.memory())
