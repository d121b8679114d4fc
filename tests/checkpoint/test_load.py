"""What fits is loaded, exactly; what does not is refused whole, before anything is changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file
from torch import nn

import infinity
from infinity.errors import CheckpointError, StateError
from infinity.integrations.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from infinity.zero import GatheredParameters, safe_get_full_fp32_param, safe_get_local_fp32_param
from tests.checkpoint.test_format import flip
from tests.support.models import token_batch
from tests.support.oracle import Case, SmallModel, settings


def engine_of(folder: Path, *, model: nn.Module | None = None, **options: Any) -> Any:
    """An engine on the small model, or another one."""
    if model is None:
        torch.manual_seed(options.pop("seed", 0))
        model = SmallModel()
    given = {name: options.pop(name) for name in ("optimizer_given", "lr_scheduler") if name in options}
    if "optimizer_given" in given:
        given["optimizer"] = given.pop("optimizer_given")
    else:
        given["model_parameters"] = Case().groups(model)
    return infinity.initialize(model=model, config=settings(folder / "nvme", **options), **given)[0]


def train(engine: Any, steps: int = 2) -> None:
    for step in range(steps):
        engine.backward(engine(**token_batch(0, step, positions=8)))
        engine.step()


def states(engine: Any) -> dict[str, list[torch.Tensor]]:
    """Masters and moments by name."""
    found = {}
    for name, param in engine.module.named_parameters():
        state = infinity.state(param)
        found[name] = [state.master, *((state.exp_avg, state.exp_avg_sq) if param.requires_grad else ())]
    return found


def same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> bool:
    return one.keys() == other.keys() and all(
        len(one[name]) == len(other[name]) and all(map(torch.equal, one[name], other[name])) for name in one
    )


@pytest.fixture
def saved(tmp_path) -> tuple[Path, dict[str, list[torch.Tensor]]]:
    """A checkpoint in bf16, and what is in it."""
    with engine_of(tmp_path, dtype="bf16") as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out", client_state={"note": ("a", 1)})
        return tmp_path / "out", states(engine)


@pytest.mark.parametrize(
    ("source", "targets"), [("fp32", ["bf16", "fp16"]), ("bf16", ["fp32", "fp16"]), ("fp16", ["bf16"])]
)
def test_masters_and_moments_are_exact_in_every_precision(tmp_path, source, targets):
    with engine_of(tmp_path, dtype=source) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out")
        expected = states(engine)
    for target in targets:
        with engine_of(tmp_path, dtype=target, param="nvme", optimizer="nvme", seed=3) as engine:
            engine.load_checkpoint(tmp_path / "out")
            found = states(engine)
            fixed = {name for name, values in expected.items() if len(values) == 1}
            assert all(
                torch.equal(mine, theirs)
                for name in expected.keys() - fixed
                for mine, theirs in zip(found[name], expected[name], strict=True)
            )
            # Frozen ones have no master: they are as the run's precision keeps them.
            assert all(torch.allclose(found[name][0], expected[name][0], atol=1e-2) for name in fixed)
            train(engine, 1)


@pytest.mark.parametrize(
    ("folder", "tag", "told"),
    [
        ("out", "typo", r"typo: there is no complete checkpoint. Pass one of the tags that are there: good\.$"),
        ("out", 7, r"7: there is no complete checkpoint. Pass one of the tags that are there: good\.$"),
        ("nowhere", "good", r"nowhere.good: there is no complete checkpoint. Load from another folder\.$"),
        ("file", None, r"file: it is a file. Name the folder that save_checkpoint\(\) was given\.$"),
        ("out/good", None, r"good: it is a checkpoint itself. Load from .*out with tag='good'\.$"),
    ],
)
def test_what_was_named_and_is_not_there_is_an_error(tmp_path, folder, tag, told):
    (tmp_path / "file").touch()
    with engine_of(tmp_path) as engine:
        engine.save_checkpoint(tmp_path / "out", tag="good")
        before = states(engine)
        with pytest.raises(CheckpointError, match=told):
            engine.load_checkpoint(tmp_path / folder, tag=tag)
        assert same(states(engine), before)


def test_nothing_is_loaded_where_there_is_nothing(tmp_path, caplog):
    with engine_of(tmp_path) as engine:
        before = states(engine)
        caplog.set_level("WARNING", logger="infinity")
        assert engine.load_checkpoint(tmp_path / "nowhere") == (None, {})
        assert "nothing loaded" in caplog.text
        engine.save_checkpoint(tmp_path / "out", tag="a", save_latest=False)
        caplog.clear()
        assert engine.load_checkpoint(tmp_path / "out") == (None, {})
        assert "no `latest`" in caplog.text and "there are a" in caplog.text
        assert engine.load_checkpoint(tmp_path / "out", tag="a")[0] == str(tmp_path / "out" / "a")
        assert same(states(engine), before)


class Renamed(SmallModel):
    """One parameter has another name, one another shape, one is new."""

    def __init__(self) -> None:
        super().__init__()
        self.final_norm = self.norm
        del self.norm
        self.positions = nn.Parameter(torch.zeros(16, 16))
        self.extra = nn.Parameter(torch.zeros(3))


def test_all_that_does_not_fit_is_one_error_and_nothing_is_changed(tmp_path, saved):
    torch.manual_seed(5)
    model = Renamed()
    with engine_of(tmp_path, model=model, dtype="bf16") as engine:
        before = states(engine)
        with pytest.raises(CheckpointError) as caught:
            engine.load_checkpoint(saved[0])
        text = str(caught.value)
        for words in (
            "missing in the checkpoint: ", "final_norm.weight (did you mean norm.weight?)", "extra",
            "not in the model: norm.weight", "positions is [16, 16] in the model and [32, 16] here",
            "Nothing was loaded",
        ):  # fmt: skip
            assert words in text, words
        assert same(states(engine), before) and engine.global_steps == 0


class Buffered(SmallModel):
    """One parameter is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        values = self.positions.detach().clone()
        del self.positions
        self.register_buffer("positions", values)


def test_a_buffer_does_not_load_into_a_parameter_and_a_parameter_does_into_a_buffer(tmp_path, saved):
    with engine_of(tmp_path, model=Buffered(), dtype="bf16") as engine:
        engine.load_checkpoint(saved[0], load_optimizer_states=False)
        assert torch.allclose(engine.module.positions.float(), saved[1]["positions"][0], atol=1e-2)
        engine.save_checkpoint(tmp_path / "buffered")
    with engine_of(tmp_path, dtype="bf16") as engine:
        before = states(engine)
        with pytest.raises(CheckpointError, match="positions is a parameter in the model and a buffer here"):
            engine.load_checkpoint(tmp_path / "buffered", load_module_strict=False)
        assert same(states(engine), before)


class Longer(SmallModel):
    """One parameter more."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Parameter(torch.full((3,), 7.0))


class Wrapped(nn.Module):
    """A model whose parameters have names that no file system takes for a file."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("wrapper" * 50, SmallModel())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, "wrapper" * 50)(*args, **kwargs)


def test_names_longer_than_a_files_may_be_are_trained_saved_and_loaded(tmp_path):
    with engine_of(tmp_path, model=Wrapped(), param="nvme", optimizer="nvme") as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out")
        expected = states(engine)
        assert all(len(name) > 255 for name in expected)
    with engine_of(tmp_path, model=Wrapped(), param="nvme", optimizer="nvme") as engine:
        engine.load_checkpoint(tmp_path / "out")
        assert same(states(engine), expected)


@pytest.mark.parametrize("place", ["gpu", "nvme"])
def test_without_strict_what_matches_is_loaded(tmp_path, saved, place):
    torch.manual_seed(5)
    with engine_of(tmp_path, model=Longer(), dtype="bf16", param=place, optimizer=place) as engine:
        with pytest.raises(CheckpointError, match=r"(?s)missing.*extra.*load_module_strict=False"):
            engine.load_checkpoint(saved[0])
        engine.load_checkpoint(saved[0], load_module_strict=False)
        found = states(engine)
        assert torch.equal(found.pop("extra")[0], torch.full((3,), 7.0))
        assert same(found, saved[1])
        assert engine.global_steps == 2


def test_another_optimizer_is_refused_and_its_weights_are_offered(tmp_path, saved):
    given = {"optimizer_given": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9)}
    with engine_of(tmp_path, dtype="bf16", seed=4, **given) as engine:
        with pytest.raises(CheckpointError, match=r"AdamW, and this .* with SGD.*load_optimizer_states=False"):
            engine.load_checkpoint(saved[0])
        engine.load_checkpoint(saved[0], load_optimizer_states=False)
        for name, param in engine.module.named_parameters():
            assert torch.equal(infinity.state(param).master, saved[1][name][0])


def test_parts_of_a_checkpoint_are_loaded_alone(tmp_path, saved):
    for options, steps in ((({"load_optimizer_states": False}), 2), ({"load_module_only": True}, 0)):
        with engine_of(tmp_path, dtype="bf16", seed=4) as engine:
            path, client = engine.load_checkpoint(saved[0], **options)
            assert path is not None and client == {"note": ("a", 1)}
            found = states(engine)
            assert all(torch.equal(found[name][0], saved[1][name][0]) for name in found)
            assert all(not value.any() for values in found.values() for value in values[1:])
            assert engine.global_steps == steps


def test_a_checkpoint_without_frozen_parameters_takes_them_from_the_model(tmp_path):
    with engine_of(tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out", exclude_frozen_parameters=True)
        expected = states(engine)
    assert not list((tmp_path / "out" / "global_step2").glob("*frozen*"))
    with engine_of(tmp_path, param="cpu", seed=8) as engine:
        own = states(engine)
        engine.load_checkpoint(tmp_path / "out")
        found = states(engine)
        for name in found:
            kept = own if name.startswith("fixed") else expected
            assert all(map(torch.equal, found[name], kept[name])), name


def test_a_parameter_that_was_frozen_begins_its_moments(tmp_path):
    with engine_of(tmp_path) as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out")
        expected = states(engine)
    torch.manual_seed(6)
    model = SmallModel()
    model.fixed.requires_grad_(True)
    with engine_of(tmp_path, model=model) as engine:
        engine.load_checkpoint(tmp_path / "out")
        found = states(engine)
        assert torch.equal(found["fixed.weight"][0], expected["fixed.weight"][0])
        assert not found["fixed.weight"][1].any()
        assert torch.equal(found["norm.weight"][1], expected["norm.weight"][1])
        train(engine, 1)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_folder_of_safetensors_is_weights(tmp_path, dtype):
    torch.manual_seed(11)
    model = SmallModel()
    tensors = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    (tmp_path / "hf").mkdir()
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with engine_of(tmp_path, dtype=dtype, param="nvme", optimizer="cpu", seed=1) as engine:
        train(engine)
        path, client = engine.load_checkpoint(tmp_path / "hf", load_optimizer_states=False)
        assert (path, client) == (str(tmp_path / "hf"), {})
        for name, param in engine.module.named_parameters():
            found = infinity.state(param).master
            assert torch.equal(found, tensors[name] if param.requires_grad else tensors[name].to(param.dtype).float())


def readers(engine: Any, weight: nn.Parameter) -> dict[str, Callable[[], Any]]:
    """Every way to an engine's values."""

    def inside(block: Any) -> Callable[[], Any]:
        def enter() -> None:
            with block(weight):
                pass

        return enter

    whole = {"module.state_dict": engine.module.state_dict} if engine.config.stage < 3 else {}
    return {
        "engine.state_dict": engine.state_dict, **whole,
        "read": inside(infinity.read), "modify": inside(infinity.modify), "gathered": inside(GatheredParameters),
        "master": lambda: infinity.state(weight).master, "moment": lambda: infinity.state(weight).exp_avg,
        "full": lambda: safe_get_full_fp32_param(weight), "local": lambda: safe_get_local_fp32_param(weight),
        "set": lambda: infinity.state(weight).set_full("master", torch.ones(weight.shape)),
    }  # fmt: skip


@pytest.mark.parametrize(("stage", "param", "optimizer"), [(0, "gpu", "gpu"), (2, "gpu", "cpu"), (3, "cpu", "cpu")])
def test_values_are_not_handed_out_after_a_step_that_was_cut_short(tmp_path, stage, param, optimizer):
    """They are a mixture of two steps."""
    with engine_of(tmp_path, stage=stage, param=param, optimizer=optimizer) as engine:
        train(engine, 1)
        for read in readers(engine, engine.module.norm.weight).values():
            read()
        engine._runtime.health.mark_broken("its latest step was cut short")
        for name, read in readers(engine, engine.module.norm.weight).items():
            with pytest.raises(StateError, match="its latest step was cut short"):
                read()
                pytest.fail(name)


class Table(nn.Module):
    """Layers that share a table, one of them without keeping it, and one layer that has two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        table = torch.arange(4.0)
        for index, layer in enumerate(self.layers):
            layer.register_buffer("table", table, persistent=index > 0)
        self.again = self.layers[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + layer.table.sum()
        return x


@pytest.mark.parametrize(("stage", "param"), [(0, "gpu"), (3, "nvme")])
def test_a_buffer_that_modules_share_keeps_its_names_and_loads_back(tmp_path, stage, param):
    model = Table()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"stage": stage, "param": param, "optimizer": param}

    def open_engine(model: nn.Module) -> Any:
        return infinity.initialize(model=model, config=settings(tmp_path / "nvme", **options))[0]

    with open_engine(model) as engine:
        found = engine.state_dict()
        assert found.keys() == expected.keys()
        assert same_tensors(found, expected)
        engine.save_checkpoint(tmp_path / "saved")
        engine.export(tmp_path / "export", dtype="fp32")
    assert get_fp32_state_dict_from_zero_checkpoint(tmp_path / "saved").keys() == expected.keys()
    other = Table()
    other.layers[0].table.zero_()
    load_model(other, tmp_path / "export" / "model.safetensors")
    assert same_tensors(other.state_dict(), expected)
    for folder in ("saved", "export"):
        with open_engine(Table()) as engine:
            engine.module.layers[0].table.zero_()
            engine.load_checkpoint(tmp_path / folder)
            assert same_tensors(engine.state_dict(), expected)


def same_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], value) for name, value in expected.items())


def test_damage_found_while_loading_is_named_and_the_engine_waits_for_a_good_load(tmp_path):
    with engine_of(tmp_path, param="nvme", optimizer="nvme") as engine:
        train(engine)
        engine.save_checkpoint(tmp_path / "out", tag="good")
        good = states(engine)
        train(engine)
        engine.save_checkpoint(tmp_path / "out", tag="bad")
        (name,) = (tmp_path / "out" / "bad").glob("*states.bin")
        flip(name, random.Random(0).randrange(name.stat().st_size))
        with pytest.raises(CheckpointError, match=rf"(?s)overwritten.*{name.name}"):
            engine.load_checkpoint(tmp_path / "out")
        weight = engine.module.norm.weight
        for verb in (lambda: engine(**token_batch(0, 0, positions=8)), *readers(engine, weight).values()):
            with pytest.raises(StateError, match="no load has succeeded since"):
                verb()
        engine.load_checkpoint(tmp_path / "out", tag="good")
        assert same(states(engine), good)
        train(engine, 1)


def test_a_missing_file_is_found_before_anything_is_changed(tmp_path, saved):
    (name,) = (saved[0] / "global_step2").glob("*weights.bin")
    name.rename(name.with_suffix(".away"))
    with engine_of(tmp_path, dtype="bf16", seed=2) as engine:
        before = states(engine)
        with pytest.raises(CheckpointError, match=rf"{name.name}: it is missing"):
            engine.load_checkpoint(saved[0])
        assert same(states(engine), before)
        train(engine, 1)


def test_torch_schedulers_and_optimizers_go_on(tmp_path):
    """A rule of torch's that keeps single values, a scheduler with a counter as its state, and a rate set by hand."""

    def make(seed: int) -> Any:
        return engine_of(
            tmp_path, seed=seed, param="cpu", dtype="bf16",
            optimizer_given=lambda p: torch.optim.NAdam(p, lr=1e-3),
            lr_scheduler=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 4], gamma=0.5),
        )  # fmt: skip

    with make(0) as engine:
        train(engine, 2)
        engine.optimizer.param_groups[0]["lr"] *= 1.5
        engine.save_checkpoint(tmp_path / "out")
        train(engine, 3)
        expected, rate = states(engine), engine.get_lr()
    with make(1) as engine:
        engine.load_checkpoint(tmp_path / "out")
        train(engine, 3)
        assert same(states(engine), expected)
        assert engine.get_lr() == rate
