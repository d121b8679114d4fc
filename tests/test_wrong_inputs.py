"""Wrong inputs to the command line and to the public calls: each is told what, where and the next step.

A row is what is done and what the message says of it, in this order. Commands end with 2 and one line, without a
traceback; calls raise an error of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.cli.main import main
from infinity.errors import InfinityError
from tests import hostile_doors

# Words of a command; {} is a folder with the files of `folder`. What, where, next step.
COMMANDS: dict[str, tuple[list[str], list[str]]] = {
    "explain: no file": (["config", "explain", "nope.json"], ["nope.json", "cannot be read", "Give a path"]),
    "explain: a folder": (["config", "explain", "{}"], ["cannot be read", "Give a path to a JSON file"]),
    "explain: no JSON": (["config", "explain", "{}/text.json"], ["text.json", "line 1", "not valid JSON"]),
    "explain: a comment": (["config", "explain", "{}/comment.json"], ["line 1", "Comments", "remove them"]),
    "explain: a typo": (["config", "explain", "{}/typo.json"], ["gradient_clipp1ng", "did you mean"]),
    "explain: a wrong value": (["config", "explain", "{}/stage.json"], ["zero_optimization.stage", "expected"]),
    "explain: no ranks": (["config", "explain", "{}/good.json", "--ranks", "0"], ["--ranks 0", "at least 1"]),
    "explain: no key": (["config", "explain", "{}/good.json", "--only", "x"], ["--only x", "leave it out"]),
    "bench: too short": (["bench", "--seconds", "1"], ["--seconds 1", "at least 5"]),
    "bench: no drive of a --tbw": (["bench", "--tbw", "3"], ["--tbw", "give it once a --drive"]),
    "bench: no folder of --output": (["bench", "--output", "{}/none/p.json"], ["--output", "there is no folder"]),
    "estimate: no model": (["estimate"], ["--list", "config.json"]),
    "estimate: an unknown name": (["estimate", "llama-9"], ["llama-9", "--list shows the names"]),
    "estimate: an empty folder": (["estimate", "{}/empty"], ["config.json", "cannot be read"]),
    "estimate: no configuration": (["estimate", "gpt2", "--config", "nope.json"], ["nope.json", "Give a path"]),
    "estimate: no profile": (["estimate", "gpt2", "--profile", "nope"], ["nope", "infinity bench"]),
    "estimate: two GPUs": (["estimate", "gpt2", "--gpu", "1GB", "--no-gpu"], ["--gpu and --no-gpu", "keep one"]),
    "estimate: no rank": (["estimate", "gpt2", "--lora", "0"], ["rank", "is 0", "such as 16"]),
    "estimate: a rank too large": (["estimate", "gpt2", "--lora", "769"], ["rank 769", "768 wide", "at most 768"]),
    "estimate: targets, no rank": (["estimate", "gpt2", "--lora-targets", "c_fc"], ["--lora-targets", "--lora 16"]),
    "estimate: unknown targets": (
        ["estimate", "gpt2", "--lora", "8", "--lora-targets", "c_attn,q_proj"],
        ["no linear layer 'q_proj'", "takes c_attn, c_fc, c_proj, or all-linear"],
    ),
    "estimate: no default targets": (
        ["estimate", "phi-4", "--lora", "8"], ["no default targets for phi3", "--lora-targets", "qkv_proj"],
    ),
    "estimate: adapters of experts": (
        ["estimate", "deepseek-v3", "--lora", "8", "--lora-targets", "all-linear"],
        ["the experts of deepseek_v3", "name layers of attention", "o_proj"],
    ),
    "estimate: adapters of no decoder": (
        ["estimate", "{}/bert.json", "--lora", "8"], ["model_type 'bert' is not one that can be sized", "--layers"],
    ),
    "estimate: a capped loss": (
        ["estimate", "gemma-2-2b", "--config", "{}/good.json", "--tiled-loss"],
        ["gemma2", "caps its logits", "leave --tiled-loss out"],
    ),
    "export: nothing there": (["export", "{}/none", "{}/out"], ["none"]),
    "export: no checkpoint": (["export", "{}/empty", "{}/out"], ["empty", "manifest.json"]),
    "ckpt: nothing there": (["ckpt", "inspect", "{}/none"], ["none"]),
    "ckpt: an empty folder": (["ckpt", "verify", "{}/empty"], ["empty"]),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Files that are wrong in one way each."""
    (tmp_path / "empty").mkdir()
    for name, text in {
        "text": "hello", "comment": "// a comment\n{}", "typo": '{"gradient_clipp1ng": 1}', "good": "{}",
        "stage": '{"zero_optimization": {"stage": 4}}', "bert": '{"model_type": "bert", "hidden_size": 8}',
    }.items():  # fmt: skip
        (tmp_path / f"{name}.json").write_text(text)
    return tmp_path


@pytest.mark.parametrize("row", COMMANDS)
def test_a_command_ends_with_two_and_one_line(row: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, told = COMMANDS[row]
    assert main([word.replace("{}", str(folder)) for word in words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1 and said.err.startswith("infinity")
    assert [text for text in told if text not in said.err] == [], said.err
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["empty"], "nothing was made"


def _offloaded(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", **keys}}}


def _initialize(model: Any = None, **given: Any) -> Any:
    return infinity.initialize(model=nn.Linear(2, 2) if model is None else model, **given)


# What is done in a folder, and what, where, next step.
CALLS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a name for a model": (lambda _: _initialize("org/name"), ["'org/name'", "infinity.load_hf(folder, config)"]),
    "a class for a model": (lambda _: _initialize(nn.Linear), ["the class Linear", "pass an instance"]),
    "no model": (lambda _: infinity.initialize(), ["NoneType", "pass the model"]),
    "no configuration file": (lambda _: _initialize(config="nope.json"), ["nope.json", "Give a path"]),
    "a folder for a configuration": (lambda at: _initialize(config=at), ["cannot be read", "Give a path"]),
    "a number for a configuration": (lambda _: _initialize(config=3), ["not int", "expected a path"]),
    "a typo": (lambda _: _initialize(config={"bf15": {}}), ["bf15", "did you mean"]),
    "two configurations": (
        lambda _: _initialize(config={}, config_params={}), ["config and config_params", "keep one"],
    ),
    "batches that do not divide": (
        lambda _: _initialize(config={"train_batch_size": 3, "train_micro_batch_size_per_gpu": 2}),
        ["train_batch_size 3", "the nearest train_batch_size is 2 or 4"],
    ),
    "parameters offloaded at stage 2": (
        lambda _: _initialize(config={"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}),
        ["offload_param needs stage 3", "set zero_optimization.stage to 3"],
    ),
    "no path": (lambda _: _initialize(config=_offloaded()), ["nvme_path", "a folder on the drive"]),
    "a file for a drive": (
        lambda at: _initialize(config=_offloaded(nvme_path=str(at / "good.json"))),
        ["offload_param.nvme_path", "good.json", "not a folder", "Name a folder on a drive"],
    ),
    "/proc for a drive": (
        lambda _: _initialize(config=_offloaded(nvme_path="/proc")),
        ["offload_param.nvme_path", "/proc", "keeps no files", "Name a folder on a drive"],
    ),
    "Init on a file": (
        lambda at: infinity.Init(config=_offloaded(nvme_path=str(at / "good.json"))).__enter__(),
        ["offload_param.nvme_path", "good.json", "Name a folder on a drive"],
    ),
    "workers' keys without workers": (
        lambda _: _initialize(config={"dataloader_persistent_workers": True}),
        ["dataloader_persistent_workers", "dataloader_num_workers", "leave"],
    ),
    "a mesh": (lambda _: _initialize(config={}, mesh=object()), ["mesh", "leave it out"]),
    "an optimizer that is none": (lambda _: _initialize(optimizer=3), ["torch.optim", "got int"]),
    "another model's parameters": (
        lambda _: _initialize(model_parameters=nn.Linear(2, 2).parameters()), ["model_parameters", "not in the model"],
    ),
    "a model without values": (
        lambda _: _initialize(nn.Linear(2, 2, device="meta")), ["weight", "meta device", "infinity.Init"],
    ),
    "an embedding with max_norm": (
        lambda _: _initialize(nn.Embedding(4, 4, max_norm=1.0)), ["max_norm=1", "Set max_norm to None"],
    ),
    "a name for load_hf": (lambda _: infinity.load_hf("org/name"), ["org/name", "not a folder", "snapshot_download"]),
    "a file for load_hf": (lambda at: infinity.load_hf(at / "good.json"), ["is a file", "name the folder"]),
    "an empty folder for load_hf": (lambda at: infinity.load_hf(at / "empty"), ["no config.json", "name the folder"]),
    "an unknown model for estimate": (lambda _: infinity.estimate("llama-9"), ["llama-9", "--list"]),
    "no configuration for estimate": (lambda _: infinity.estimate("gpt2", "nope.json"), ["nope.json", "Give a path"]),
}  # fmt: skip


@pytest.mark.parametrize("row", CALLS)
def test_a_call_says_what_where_and_the_next_step(row: str, folder: Path) -> None:
    done, told = CALLS[row]
    before = sorted(folder.rglob("*"))
    with pytest.raises(InfinityError) as raised:
        done(folder)
    assert [text for text in told if text not in str(raised.value)] == [], str(raised.value)
    assert sorted(folder.rglob("*")) == before, "nothing was made"


# What is done with an engine at stage 3, its parameters in CPU memory, and what, where, next step.
USES: dict[str, tuple[Callable[[Any, Path], Any], list[str]]] = {
    "backward of outputs": (
        lambda engine, _: engine.backward({"loss": engine(torch.ones(1, 2)).mean()}), ["got dict", 'pass its ["loss"]'],
    ),
    "backward of scores": (
        lambda engine, _: engine.backward(engine(torch.ones(1, 2))), ["shape (1, 2)", "reduce it"],
    ),
    "torch.save of the state": (
        lambda engine, at: torch.save(engine.module.state_dict(), at / "x.pt"),
        ["weight is partitioned", "engine.export(folder)", "engine.state_dict()"],
    ),
    "a tag that is not there": (
        lambda engine, at: engine.load_checkpoint(at, tag="typo"), ["typo", "no complete checkpoint", "Load from"],
    ),
    "a file of checkpoints": (
        lambda engine, at: engine.load_checkpoint(at / "good.json"), ["good.json", "is a file", "Name the folder"],
    ),
    "an export into a file": (lambda engine, at: engine.export(at / "good.json"), ["is a file", "name a folder"]),
    "an export to another dtype": (lambda engine, at: engine.export(at / "x", "int8"), ["'int8'", "bf16"]),
    "a weight that is away": (lambda engine, _: engine.module.weight.sum(), ["weight", "sum", "infinity.read"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Any:
    zero = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}
    with infinity.initialize(model=nn.Linear(2, 2), config=json.dumps({"zero_optimization": zero}))[0] as made:
        yield made


@pytest.mark.parametrize("row", USES)
def test_a_verb_says_what_where_and_the_next_step(row: str, engine: Any, folder: Path) -> None:
    done, told = USES[row]
    before = sorted(folder.rglob("*"))
    with pytest.raises(InfinityError) as raised:
        done(engine, folder)
    assert [text for text in told if text not in str(raised.value)] == [], str(raised.value)
    assert sorted(folder.rglob("*")) == before, "nothing was made"


def test_mutated_files_end_in_a_value_or_in_an_error_of_ours() -> None:
    """A cut of the two thousand that `tests.hostile_doors` tries by hand."""
    found = hostile_doors.go(132)
    assert found["wrong"] == []
    assert len(found["counts"]) > 15 and sum(found["counts"].values()) == 132
