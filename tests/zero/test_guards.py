"""What a program does to a model behind the engine's back: it is told what to do instead, and nothing is lost."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_model
from torch import nn

import infinity
from infinity.engine import Engine
from infinity.errors import ConfigError, StateError
from tests.support.hub import hf_model
from tests.support.models import mlp, vector_batch

# Stage, and home of parameters.
PLACES = [(0, "none"), (2, "none"), (3, "none"), (3, "cpu"), (3, "nvme")]
places = pytest.mark.parametrize(("stage", "home"), PLACES)


@contextmanager
def trained(folder: Path, stage: int, home: str, model: nn.Module | None = None) -> Iterator[Engine]:
    """An engine that has done a step."""
    zero: dict[str, Any] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_param"] = {"device": home, **({"nvme_path": str(folder)} if home == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}, "zero_optimization": zero,
        "bf16": {"enabled": True}, "log_level": "error",
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=mlp() if model is None else model, config=config)
    with engine:
        step(engine, 0)
        yield engine


def step(engine: Engine, number: int) -> None:
    engine.backward(engine(**batch(number)))
    engine.step()


def batch(number: int) -> dict[str, torch.Tensor]:
    return {name: value.bfloat16() for name, value in vector_batch(0, number).items()}


PICKLERS: dict[str, Callable[[Any], Any]] = {
    "pickle": pickle.dumps,
    "pickle, protocol 2": lambda what: pickle.dumps(what, protocol=2),
    "torch.save": lambda what: torch.save(what, io.BytesIO()),
}


@places
@pytest.mark.parametrize("pickler", PICKLERS)
def test_a_model_with_an_engine_is_not_pickled(tmp_path, stage, home, pickler):
    """No byte of it is written, and the error says how else to keep it."""
    with trained(tmp_path, stage, home) as engine:
        for what in (engine.module, engine, {"model": engine.module}):
            with pytest.raises(StateError, match=r"pickle .*engine\.state_dict.*engine\.export.*save_checkpoint"):
                PICKLERS[pickler](what)
        step(engine, 1)


@places
def test_neither_is_a_part_of_one(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        for what in (engine.module.enter, engine.module.enter.weight, {"weight": engine.module.leave.bias}):
            with pytest.raises(StateError, match=r"infinity\.read"):
                pickle.dumps(what)
        torch.save(engine.state_dict(), io.BytesIO())
        step(engine, 1)


@places
def test_a_copy_of_a_model_is_pickled_and_runs_without_an_engine(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        with infinity.read(engine.module):
            twin = copy.deepcopy(engine.module)
        again = pickle.loads(pickle.dumps(twin))
        assert torch.equal(again(**batch(1)), twin(**batch(1)))
        assert not any(module._forward_pre_hooks or module._forward_hooks for module in twin.modules())
        expected = engine.state_dict()
        assert all(torch.equal(value, expected[name]) for name, value in again.state_dict().items())


def test_a_copy_keeps_the_programs_own_hooks(tmp_path):
    model, seen = mlp(), []
    model.enter.register_forward_hook(lambda *_: seen.append(1))
    with trained(tmp_path, 3, "cpu", model) as engine:
        with infinity.read(model):
            twin = copy.deepcopy(model)
        seen.clear()
        twin(**batch(1))
        assert seen == [1]
        step(engine, 1)


@pytest.mark.parametrize("stage", [0, 2])
def test_whole_weights_of_a_closed_engine_are_pickled(tmp_path, stage):
    with trained(tmp_path, stage, "none") as engine:
        expected = engine.state_dict()
    found = pickle.loads(pickle.dumps(engine.module)).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_partitioned_weights_of_a_closed_engine_say_why_not(tmp_path):
    with trained(tmp_path, 3, "cpu") as engine:
        pass
    with pytest.raises(StateError, match="was left on its tier when the engine was closed"):
        pickle.dumps(engine.module)


SAVERS: dict[str, Callable[[Engine, Path], Any]] = {
    "model.save_pretrained": lambda engine, path: engine.module.save_pretrained(path),
    "engine.save_pretrained": lambda engine, path: engine.save_pretrained(path),
    "part.save_pretrained": lambda engine, path: engine.module.model.save_pretrained(path),
    "torch.save": lambda engine, path: torch.save(engine.module.state_dict(), path),
    "torch.save of a part": lambda engine, path: torch.save(engine.module.model.layers[0].state_dict(), path),
    "safetensors": lambda engine, path: save_model(engine.module, str(path)),
}


@contextmanager
def hub_model(folder: Path, home: str, stage: int = 3) -> Iterator[Engine]:
    """An engine over a transformers model."""
    offload = {"offload_param": {"device": home, "nvme_path": str(folder)}} if stage == 3 else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **offload}
    config = {"zero_optimization": zero, "log_level": "error"}
    with infinity.initialize(model=hf_model("llama"), config=config)[0] as engine:
        yield engine


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_saving_a_partitioned_model_names_the_engines_verbs_and_leaves_nothing(tmp_path, home):
    with hub_model(tmp_path / "drive", home) as engine:
        for saver in SAVERS.values():
            target = tmp_path / "saved"
            with pytest.raises(StateError, match=r"engine\.export\(folder\).*engine\.state_dict\(\)"):
                saver(engine, target)
            assert not target.exists()
        ids = torch.arange(8).view(1, 8)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


@pytest.mark.parametrize(("stage", "home"), [(2, "none"), (3, "cpu")])
def test_a_model_whose_values_are_there_saves_itself(tmp_path, stage, home):
    with hub_model(tmp_path / "drive", home, stage) as engine:
        model: Any = engine.module
        whole = engine.state_dict()
        model.save_pretrained(tmp_path / "given", state_dict=dict(whole))
        with infinity.read(model):
            model.save_pretrained(tmp_path / "read")
            torch.save(model.state_dict(), tmp_path / "read.pt")
            copy.deepcopy(model).save_pretrained(tmp_path / "copy")
        for found in (
            *(load_file(tmp_path / name / "model.safetensors") for name in ("given", "read", "copy")),
            torch.load(tmp_path / "read.pt"),
        ):
            assert all(torch.equal(value, whole[name]) for name, value in found.items())
        assert model.state_dict(keep_vars=True).keys() == whole.keys()
    assert "save_pretrained" not in vars(model)


@places
@pytest.mark.parametrize("through", ["model", "submodule", "engine"])
def test_load_state_dict_outside_modify_is_refused(tmp_path, stage, home, through):
    """The next step would write the old masters over what was loaded."""
    zeros = {name: torch.zeros_like(value) for name, value in mlp().state_dict().items()}
    with trained(tmp_path, stage, home) as engine:
        before = engine.state_dict()
        with pytest.raises(StateError, match=r"belongs to an engine.*with infinity\.modify.*engine\.load_checkpoint"):
            if through == "model":
                engine.module.load_state_dict(zeros)
            elif through == "submodule":
                engine.module.enter.load_state_dict({"weight": zeros["enter.weight"], "bias": zeros["enter.bias"]})
            else:
                engine.load_state_dict({f"module.{name}": value for name, value in zeros.items()})
        after = engine.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        step(engine, 1)


@places
def test_load_state_dict_inside_modify_survives_the_next_step(tmp_path, stage, home):
    loaded = mlp(seed=7).state_dict()
    with trained(tmp_path, stage, home) as engine:
        with infinity.modify(engine.module):
            engine.module.load_state_dict(loaded)
        found = engine.state_dict()
        assert all(torch.equal(found[name], value.bfloat16()) for name, value in loaded.items())
        step(engine, 1)
        found = engine.state_dict()
        assert all((found[name] - value).abs().max() < 0.01 for name, value in loaded.items())
        with pytest.raises(StateError, match="belongs to an engine"):
            engine.module.load_state_dict(loaded)


def test_what_no_engine_trains_is_loaded_as_ever(tmp_path):
    model = mlp()
    model.enter.register_buffer("seen", torch.zeros(3))
    with trained(tmp_path, 3, "cpu", model) as engine:
        model.load_state_dict({"enter.seen": torch.ones(3)}, strict=False)
        assert model.enter.seen.sum() == 3
    plain = mlp()
    plain.load_state_dict(mlp(seed=3).state_dict())
    with trained(tmp_path, 0, "none") as engine:
        pass
    engine.module.load_state_dict(mlp(seed=3).state_dict())


@places
def test_a_removed_module_is_named_and_comes_back(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        step(engine, 1)
        expected = engine.state_dict()
    with trained(tmp_path, stage, home) as engine:
        kept = engine.module.layers[1]
        engine.module.layers[1] = nn.Identity()
        said = r"layers\.1\.weight, layers\.1\.bias left the model.*Put the module back"
        for use in (lambda: engine.save_checkpoint(tmp_path), lambda: engine.state_dict()):
            with pytest.raises(StateError, match=said):
                use()
        engine.backward(engine(**batch(1)))
        with pytest.raises(StateError, match=said):
            engine.step()
        engine.zero_grad()
        engine.module.layers[1] = kept
        step(engine, 1)
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def of_jit(kind: str) -> nn.Module:
    model: Any = mlp()
    if kind == "script":
        model.layers[0] = torch.jit.script(model.layers[0])
    elif kind == "trace":
        model.layers[0] = torch.jit.trace(model.layers[0], torch.zeros(4, 64))
    else:
        model = torch.jit.script(model.enter)
    return model


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(("kind", "path"), [("script", "layers.0"), ("trace", "layers.0"), ("whole", "the model")])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_script_module_is_refused_by_its_path(tmp_path, kind, path, stage):
    with pytest.raises(ConfigError, match=f"{path} is a ScriptModule.*pass the Python module"):
        infinity.initialize(model=of_jit(kind), config={"zero_optimization": {"stage": stage}, "log_level": "error"})


@places
def test_a_graph_module_trains_as_the_module_that_it_was_made_of(tmp_path, stage, home):
    with trained(tmp_path, stage, home) as engine:
        expected = engine.state_dict()
    with trained(tmp_path, stage, home, torch.fx.symbolic_trace(mlp())) as engine:
        found = engine.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
