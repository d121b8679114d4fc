"""A model leaves its engine with its weights, and goes to the next: any stages and tiers, in bounded memory."""

from __future__ import annotations

import gc
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.config import DEEPSPEED
from infinity.engine import handover
from infinity.errors import CapacityError, ConfigError, StateError, TransferError
from infinity.memory.tiers.nvme import NvmeTier
from infinity.plan.capacity import Capacity
from infinity.zero import deferred_init
from infinity.zero.parameter import is_released
from tests.support.cells import covered, kept
from tests.support.models import TinyLlama, token_batch
from tests.support.oracle import Case, join, settings
from tests.support.private_memory import own_nbytes
from tests.support.spawn import RankPool, run_ranks

HOMES = [(0, "gpu", "gpu"), (2, "gpu", "cpu"), (3, "gpu", "gpu"), (3, "cpu", "cpu"), (3, "nvme", "nvme")]
TILED = {"stage3_max_live_parameters": 400, "tile_parameters": 200}


def engine_of(
    model: nn.Module, folder: Path | str, home: tuple[int, str, str], top: dict[str, Any] | None = None, **options: Any
) -> Any:  # fmt: skip
    stage, param, optimizer = home
    config = {**settings(folder, stage=stage, param=param, optimizer=optimizer, **options), **(top or {})}
    engine, *_ = infinity.initialize(model=model, config=config, model_parameters=Case().groups(model))
    return engine


def step(engine: Any, rank: int = 0, micro: int = 0) -> None:
    engine.backward(engine(**token_batch(rank, micro, positions=8)))
    engine.step()


def little_room(monkeypatch: pytest.MonkeyPatch, nbytes: int = 0) -> None:
    monkeypatch.setattr(handover, "free_for_rank", lambda **_: Capacity(process=nbytes))
    monkeypatch.setattr(deferred_init, "WINDOW_NBYTES", 8_000)


def assert_ordinary(model: nn.Module, ids: list[int]) -> None:
    """The parameters are the objects that they were, and nothing of an engine is left on them."""
    assert [id(param) for param in model.parameters()] == ids
    for param in model.parameters():
        assert type(param) is nn.Parameter and not [name for name in param.__dict__ if name.startswith("_infinity")]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.head.weight is model.embedding.weight and not model.fixed.weight.requires_grad


@pytest.mark.parametrize(*covered(first=HOMES, second=HOMES, dtype=("fp32", "bf16", "fp16")))
def test_a_model_goes_from_engine_to_engine(
    first: tuple[int, str, str], second: tuple[int, str, str], dtype: str, tmp_path: Path
) -> None:
    model = Case().model()
    ids = [id(param) for param in model.parameters()]
    # Fit, validate, fit again.
    for home in (first, second, first):
        given = {name: value.detach().clone() for name, value in model.state_dict().items()}
        engine = engine_of(model, tmp_path, home, dtype=dtype)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, given[name].to(value.dtype)), name
        step(engine)
        trained = engine.state_dict()
        engine.destroy()
        engine.destroy()
        engine.close()
        assert_ordinary(model, ids)
        for name, value in model.state_dict().items():
            # As DeepSpeed leaves them: in the precision of computation.
            assert value.dtype is trained[name].dtype and torch.equal(value, trained[name]), name
        assert not any(engine._runtime.store.ledger.now.values()) and os.listdir(tmp_path) == []
        assert all(unit.full.numel() == 0 or not unit.placed.whole for unit in engine.units)
        model(**token_batch(0, 0, positions=8))


def test_a_second_engine_goes_on_as_the_first_would_in_fp32(tmp_path: Path) -> None:
    """Without optimizer states a step depends on the weights only, and fp32 weights are their own masters."""
    plain = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    found = []
    for parts in ((4,), (2, 2), (1, 3)):
        model, micro = Case().model(), 0
        for index, count in enumerate(parts):
            with engine_of(model, tmp_path, HOMES[index + 3], plain) as engine:
                for _ in range(count):
                    step(engine, micro=micro)
                    micro += 1
                engine.close(keep_weights=True)
        found.append(model.state_dict())
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]) and torch.equal(value, found[2][name]), name


@pytest.mark.parametrize("home", [(3, "gpu", "gpu"), (3, "nvme", "nvme")])
def test_weights_in_tiles_become_whole(home: tuple[int, str, str], tmp_path: Path) -> None:
    model = Case().model()
    ids = [id(param) for param in model.parameters()]
    engine = engine_of(model, tmp_path, home, zero=TILED)
    assert any(layout.is_tile for layout in engine.plan.layouts)
    step(engine)
    trained = engine.state_dict()
    engine.destroy()
    assert_ordinary(model, ids)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name


@pytest.mark.parametrize("second", [(0, "gpu", "gpu"), (3, "cpu", "cpu"), (3, "nvme", "nvme")])
def test_what_memory_does_not_hold_goes_through_a_spool(
    second: tuple[int, str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Case().model()
    ids = [id(param) for param in model.parameters()]
    engine = engine_of(model, tmp_path, (3, "nvme", "nvme"), dtype="bf16")
    step(engine)
    trained = engine.state_dict()
    with monkeypatch.context() as patch:
        little_room(patch)
        engine.destroy()
        assert any(is_released(param) for param in model.parameters())
        assert len(os.listdir(tmp_path)) == 1
        again = engine_of(model, tmp_path, second, dtype="bf16")
    with again:
        assert [id(param) for param in model.parameters()] == ids
        for name, value in again.state_dict().items():
            assert torch.equal(value, trained[name]), name
        step(again)
        again.destroy()
    assert_ordinary(model, ids)
    assert os.listdir(tmp_path) == []


def test_an_error_on_the_way_out_leaves_the_engine_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Case().model()
    engine = engine_of(model, tmp_path, (3, "cpu", "nvme"), dtype="bf16")
    step(engine)
    engine.synchronize()
    trained, files = engine.state_dict(), os.listdir(tmp_path)
    write, count = NvmeTier.write, 0

    def full(*arguments: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count > 3:
            raise TransferError("write", path="swap", offset=0, nbytes=0, errno=28, reason="no space left on device")
        return write(*arguments, **options)

    with monkeypatch.context() as patch:
        little_room(patch)
        patch.setattr(NvmeTier, "write", full)
        with pytest.raises(TransferError):
            engine.destroy()
    assert count > 3 and os.listdir(tmp_path) == files
    for name, value in engine.state_dict().items():
        assert torch.equal(value, trained[name]), name
    engine.store.check()
    step(engine)
    engine.destroy()
    assert not any(is_released(param) for param in model.parameters())


def test_states_are_given_up_where_only_that_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Case().model()
    engine = engine_of(model, tmp_path, (3, "cpu", "cpu"), dtype="bf16")
    trained = engine.state_dict()
    little_room(monkeypatch, nbytes=1)
    engine.destroy()
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    # And where not even that does, nothing happens.
    model = Case().model().requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=settings(tmp_path, param="cpu"))
    with pytest.raises(CapacityError, match=r"they take .* kB.* Name one \(zero_optimization"):
        engine.destroy()
    engine(**token_batch(0, 0, positions=8))
    engine.close()


def test_a_broken_engine_hands_nothing_over_and_can_be_destroyed(tmp_path: Path) -> None:
    model = Case().model()
    engine = engine_of(model, tmp_path, (3, "nvme", "nvme"))
    engine._runtime.health.mark_broken("its latest step ended for lack of memory")
    with pytest.raises(StateError, match="cannot hand the weights to the module: its latest step"):
        engine.close(keep_weights=True)
    # A program calls this when it ends, after an error too: nothing may be left then.
    engine.destroy()
    with pytest.raises(StateError, match="this engine was closed"):
        engine.step()
    assert os.listdir(tmp_path) == []
    with pytest.raises(StateError, match=r"left on its tier.*close\(keep_weights=True\)"):
        model.norm.weight.sum()


def ranks_hand_over(rank: int, world: int, folder: str, spooled: bool) -> bool:
    join(world)
    model = Case().model()
    before: dict[str, torch.Tensor] = {}
    for home in ((3, "nvme", "nvme"), (3, "cpu", "gpu"), (1, "gpu", "gpu"), (3, "gpu", "gpu")):
        with pytest.MonkeyPatch.context() as patch:
            engine = engine_of(model, folder, home, dtype="bf16")
            with infinity.read(engine.module):
                for name, value in before.items():
                    assert torch.equal(dict(model.named_parameters())[name], value), name
            step(engine, rank)
            with infinity.read(engine.module):
                before = {name: param.detach().clone() for name, param in model.named_parameters()}
            if spooled and home[1] == "nvme":
                little_room(patch)
            engine.destroy()
            if not spooled:
                assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    return all(torch.equal(param, before[name]) for name, param in model.named_parameters())


@pytest.mark.parametrize("spooled", [False, True])
def test_every_rank_has_the_weights(spooled: bool, tmp_path: Path, rank_pools: dict[int, RankPool]) -> None:
    assert rank_pools[2].run(ranks_hand_over, str(tmp_path), spooled) == [True, True]
    assert os.listdir(tmp_path) == []


def growth(rank: int, world: int, folder: str, home: str, spooled: bool) -> tuple[int, int]:
    """Bytes by which this process grows with a model that its engine has left, and those of the weights it holds."""
    torch.set_num_threads(1)
    for dim in (64, 512, 512):
        # The first two load what a process loads once, some of it only for models of some size.
        before = own_nbytes()
        model = TinyLlama(dim=dim, layers=8, hidden=dim * 11 // 4)
        config = settings(folder, param=home, optimizer=home, dtype="bf16")
        # No name for the optimizer, which holds its parameters: the next round must begin without this model.
        engine = infinity.initialize(model=model, config=config)[0]
        step(engine)
        with pytest.MonkeyPatch.context() as patch:
            if spooled:
                little_room(patch)
                patch.setattr(deferred_init, "WINDOW_NBYTES", 4 << 20)
            engine.destroy()
        del engine
        found = own_nbytes() - before, sum(param.nbytes for param in model.parameters())
        if spooled:
            # The second engine takes them from the drive.
            infinity.initialize(model=model, config=config)[0].close()
        del model
    return found


@pytest.mark.parametrize("home", kept(["gpu", "cpu", "nvme"], ["nvme"]))
def test_the_process_keeps_the_weights_and_nothing_else(home: str, tmp_path: Path) -> None:
    ((grown, held),) = run_ranks(growth, 1, str(tmp_path), home, False)
    assert held > 50e6 and held - 2e6 <= grown <= held + 4e6
    assert os.listdir(tmp_path) == []


@pytest.mark.matrix
def test_a_spool_keeps_them_out_of_memory(tmp_path: Path) -> None:
    ((grown, held),) = run_ranks(growth, 1, str(tmp_path), "nvme", True)
    assert grown < 0.25 * held
    assert os.listdir(tmp_path) == []


# Programs that close no engine: Lightning's second one validates what the first has trained.


@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
@pytest.mark.parametrize("first", HOMES)
def test_under_deepspeeds_conventions_the_second_engine_takes_the_model_from_the_first(first, dropped, tmp_path):
    model = Case().model()
    engine = engine_of(model, tmp_path / "first", first)
    step(engine)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    if dropped:
        # Only the model knows of it.
        del engine
        gc.collect()
    config = settings(tmp_path / "second", stage=3, param="cpu")
    del config["optimizer"]
    second, optimizer, *_ = infinity.initialize(model=model, config=config, conventions=DEEPSPEED)
    with second:
        assert optimizer is None
        torch.testing.assert_close(second.state_dict(), expected, rtol=0, atol=0)
        if not dropped:
            with pytest.raises(StateError, match="closed"):
                engine(**token_batch(0, 0, positions=8))
    assert list((tmp_path / "first").rglob("*.swp")) == []


def test_the_first_engine_goes_on_if_the_second_ones_configuration_is_refused(tmp_path):
    model = Case().model()
    with engine_of(model, tmp_path, (3, "cpu", "cpu")) as engine:
        with pytest.raises(ConfigError):
            infinity.initialize(model=model, config={"zero_optimization": {"stage": 7}}, conventions=DEEPSPEED)
        step(engine)
        assert engine.global_steps == 1


def test_a_model_whose_hooks_a_program_has_cleared_goes_to_the_second_engine(tmp_path):
    model = Case().model()
    engine = engine_of(model, tmp_path, (3, "cpu", "cpu"))
    step(engine)
    expected = {name: value.clone() for name, value in engine.state_dict().items()}
    for module in model.modules():
        # As Lightning does before it makes an engine that only runs.
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        module._state_dict_hooks, module._load_state_dict_pre_hooks = OrderedDict(), OrderedDict()
    with infinity.initialize(model=model, config=settings(tmp_path), conventions=DEEPSPEED)[0] as second:
        torch.testing.assert_close(second.state_dict(), expected, rtol=0, atol=0)
        step(second)
