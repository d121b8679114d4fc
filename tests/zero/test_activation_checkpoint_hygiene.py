"""Whatever becomes of a forward, its checkpoints leave nothing behind; and the program's model is only borrowed."""

from __future__ import annotations

import copy
import inspect
import json
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, StateError, TierMemoryError
from infinity.memory import scratch
from infinity.plan.spec import module_tree, repeated_blocks
from tests.support.hub import hf_model
from tests.support.models import token_batch
from tests.support.oracle import settings, swap_files
from tests.zero.test_activation_checkpoint import INPUT_NBYTES, LAYERS, ROWS, WIDTH, Model, wish


@pytest.fixture(params=["cpu", "nvme"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """An engine at stage 3 with every block's inputs on a tier."""
    made = start(tmp_path, wish(request.param, tmp_path))
    yield made
    made.close()
    assert not swap_files(tmp_path)


def start(folder: Path, section: dict[str, Any], **more: Any) -> Engine:
    torch.manual_seed(0)
    made, *_ = infinity.initialize(model=Model(), config=settings(folder, **section, **more))
    return made


def batch(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return torch.randn(ROWS, WIDTH)


def kept(engine: Engine) -> int:
    """Bytes of checkpoints on all tiers, once the drive has let go of what is no longer wanted."""
    until = time.monotonic() + 5
    while True:
        held = sum(kinds.get("activation", 0) for kinds in engine.memory().now.values())
        if not held or time.monotonic() > until:
            return held
        time.sleep(0.01)


def now(engine: Engine) -> int:
    return sum(kinds.get("activation", 0) for kinds in engine.memory().now.values())


def test_the_ledger_has_them_between_forward_and_backward(engine):
    loss = engine(batch())
    # Two tensors of every block need a gradient: its input, and the scale, a page.
    assert now(engine) == LAYERS * (INPUT_NBYTES + 4096)
    engine.backward(loss)
    assert kept(engine) == 0
    engine.step()


def test_a_forward_that_raises_leaves_nothing(engine):
    block = engine.module.blocks[3]
    block.fails = True
    with pytest.raises(ArithmeticError):
        engine(batch())
    assert kept(engine) == 0
    block.fails = False
    train_a_step(engine)


def test_a_backward_that_raises_leaves_nothing(engine):
    loss = engine(batch())
    engine.module.blocks[1].fails = True
    with pytest.raises(ArithmeticError):
        engine.backward(loss)
    del loss
    assert kept(engine) == 0
    engine.module.blocks[1].fails = False
    engine.zero_grad()
    train_a_step(engine)


def test_a_forward_without_backward_leaves_nothing(engine):
    engine.eval()
    for _ in range(3):
        loss = engine(batch())
        assert now(engine) > 0
        del loss
    assert kept(engine) == 0
    engine.train()
    train_a_step(engine)


def test_memory_and_files_do_not_grow(engine, tmp_path):
    sizes = []
    for step in range(6):
        loss = engine(batch(step))
        # A second graph lives at the same time; the first of two backwards keeps its own.
        other = engine(batch(step + 100))
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.backward(other)
        del loss, other
        engine.step()
        assert kept(engine) == 0
        pools = {tier: kinds.get("pool", 0) for tier, kinds in engine.memory().now.items()}
        sizes.append((pools, [path.stat().st_size for path in swap_files(tmp_path)]))
    assert sizes[1:] == sizes[1:2] * 5


def test_what_a_closed_engine_had_is_a_clear_error(tmp_path):
    engine = start(tmp_path, wish("nvme", tmp_path))
    loss = engine(batch())
    engine.close()
    with pytest.raises(StateError, match="run its backward before close"):
        loss.backward()
    assert not swap_files(tmp_path)


def test_a_limit_is_kept(tmp_path, monkeypatch):
    """By the step that exceeds it, where the batch alone can tell."""
    monkeypatch.setattr(scratch, "FILE_NBYTES", 4096)
    limit = {"memory": {"nvme": {"max_bytes": LAYERS * INPUT_NBYTES // 2}}}
    with start(tmp_path, wish("nvme", tmp_path), **limit) as engine:
        with pytest.raises(TierMemoryError, match="activation checkpoints"):
            engine(batch())
        assert kept(engine) == 0


def train_a_step(engine: Engine) -> None:
    engine.backward(engine(batch()))
    engine.step()
    assert engine.was_step_applied()
    assert kept(engine) == 0


def alive_after_forward(engine: Engine) -> int:
    """How many of the blocks' inputs still have memory on the device."""
    inputs: list[weakref.ref[Any]] = []
    handles = [
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
        for block in engine.module.blocks
    ]
    loss = engine(batch())
    found = sum(ref() is not None for ref in inputs)
    for handle in handles:
        handle.remove()
    engine.backward(loss)
    return found


def test_inputs_of_blocks_leave_the_device(engine, tmp_path):
    assert alive_after_forward(engine) == 0
    with start(tmp_path / "plain", wish("gpu", tmp_path)) as plain:
        assert alive_after_forward(plain) == LAYERS


def test_every_kth_block_is_computed_again(tmp_path):
    for every, calls in ((1, [2] * LAYERS), (2, [2, 1, 2, 1, 2]), (4, [2, 1, 1, 1, 2]), (0, [1] * LAYERS)):
        with start(tmp_path, wish("gpu", tmp_path, every=every)) as engine:
            train_a_step(engine)
            assert [block.calls for block in engine.module.blocks] == calls


def test_results_of_chosen_operators_are_kept(tmp_path):
    """The matrix products of a block run once, all else twice."""

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[func] = counts.get(func, 0) + 1
            return func(*args, **(kwargs or {}))

    found = []
    for keep in ([], ["aten.addmm"]):
        counts: dict[Any, int] = {}
        with start(tmp_path, wish("gpu", tmp_path, keep_ops=keep)) as engine, Count():
            engine.backward(engine(batch()))
            found.append((counts[torch.ops.aten.addmm.default], counts[torch.ops.aten.gelu.default]))
    assert found == [(4 * LAYERS + 2, 2 * LAYERS), (2 * LAYERS + 2, 2 * LAYERS)]


def test_the_model_is_only_borrowed(tmp_path):
    model = hf_model("gpt2").train()
    model.config.use_cache = True
    signature = inspect.signature(model.forward)
    engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, stage=0, **wish("nvme", tmp_path)))
    with engine:
        assert inspect.signature(model.forward) == signature
        loss = engine(**token_batch(0, 0)).loss
        twin = copy.deepcopy(model)
        assert torch.equal(twin(**token_batch(0, 0)).loss, loss)
        engine.backward(loss)
        assert all(param.grad is None for param in twin.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_cache_in_evaluation_is_filled_once(tmp_path):
    """With gradients too, as a program has them that has forgotten no_grad."""
    model = hf_model("llama").eval()
    engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, stage=0, **wish("gpu", tmp_path)))
    ids = token_batch(0, 0)
    with engine:
        output = engine(**ids, use_cache=True)
        engine.backward(output.loss)
        assert output.past_key_values.get_seq_length() == ids["input_ids"].shape[1]


def test_blocks_are_what_a_model_repeats():
    def of(model: nn.Module, **options: Any) -> tuple[str, ...]:
        return repeated_blocks(module_tree(model, compute_dtype="fp32"), **options)

    assert of(hf_model("llama")) == ("model.layers.0", "model.layers.1")
    assert of(hf_model("mixtral")) == ("model.layers.0", "model.layers.1")
    assert of(Model()) == tuple(f"blocks.{index}" for index in range(LAYERS))
    assert of(Model(), every=2) == ("blocks.0", "blocks.2", "blocks.4")
    assert of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ()
    assert of(nn.Sequential(Model()), classes=("Model",)) == ("0",)
    assert of(nn.Sequential(Model(), Model())) == ("0", "1")
    inside = tuple(f"{at}.blocks.{index}" for at in (0, 1) for index in range(LAYERS))
    assert of(nn.Sequential(Model(), Model()), classes=(type(Model().blocks[0]).__name__,)) == inside


def test_what_cannot_be_meant_is_refused(tmp_path):
    plain = settings(tmp_path, stage=0)
    with pytest.raises(ConfigError, match="Linear has no blocks that it repeats"):
        infinity.initialize(model=nn.Linear(2, 2), config={**plain, "activation_checkpointing": {"every": 1}})
    with pytest.raises(ConfigError, match="torch has no operator"):
        start(tmp_path, wish("gpu", tmp_path, keep_ops=["aten.nothing"]))
    assert not swap_files(tmp_path)


def test_the_timeline_shows_their_transfers(tmp_path):
    with start(tmp_path, wish("nvme", tmp_path)) as engine:
        train_a_step(engine)
        path = tmp_path.parent / "timeline.json"
        with engine.timeline(path):
            train_a_step(engine)
    text = json.dumps(json.loads(path.read_text()))
    assert "NVMe writes" in text
    assert f"checkpoint {2 * LAYERS}" in text
