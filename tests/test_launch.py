"""Scripts written for DeepSpeed: what they say before they train is taken for what it means, or refused."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import infinity
from infinity.engine.launch import configuration_of
from infinity.errors import ConfigError
from tests.support.spawn import run_ranks

CONFIG = {
    "train_batch_size": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {"stage": 3},
}


def script(rank: int, world_size: int, config: str) -> tuple[int, list[float]]:
    """A script as tutorials have it: `import deepspeed` replaced, and not a word more."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = infinity.add_config_arguments(parser)
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", config])
    infinity.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    net = nn.Linear(8, 4)
    data = TensorDataset(torch.randn(16, 8), torch.randint(0, 4, (16,)))
    parameters = filter(lambda param: param.requires_grad, net.parameters())
    model_engine, _optimizer, trainloader, __ = infinity.initialize(
        args=args, model=net, model_parameters=parameters, training_data=data, dist_init_required=False
    )
    criterion, losses = nn.CrossEntropyLoss(), []
    for inputs, labels in trainloader:
        loss = criterion(model_engine(inputs), labels)
        model_engine.backward(loss)
        model_engine.step()
        losses.append(loss.item())
    model_engine.close()
    return dist.get_rank(), losses


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_usual_script_trains_without_a_launcher(config: str) -> None:
    try:
        rank, losses = script(0, 1, config)
    finally:
        dist.destroy_process_group()
    assert rank == 0
    assert len(losses) == 4


@pytest.mark.slow
def test_a_usual_script_trains_on_two_ranks(config: str) -> None:
    (first, left), (second, right) = run_ranks(script, 2, config)
    assert (first, second) == (0, 1)
    assert len(left) == len(right) == 4
    assert left != right


def test_the_group_is_opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: opened.append(options["world_size"]))
    infinity.init_distributed()
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    infinity.init_distributed()
    assert opened == [1]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mpu": object()}, "mpu: infinity makes the groups of its axes itself: leave it out, and set parallel.tensor"),
        ({"mesh": object()}, "mesh: infinity makes the groups"),
        ({"mesh_param": (2, 2)}, "mesh_param: infinity makes the groups"),
        ({"distributed_port": 29501}, "the launcher chooses the port; leave it out, and give torchrun"),
        ({"args": argparse.Namespace()}, "start the script with --deepspeed_config FILE"),
        ({"args": argparse.Namespace(deepspeed_config="a.json"), "config": {}}, "config and args.deepspeed_config"),
        ({"config_params": {}, "config": {}}, "config and config_params: keep one of them"),
    ],
)
def test_an_argument_that_cannot_be_meant_is_refused_with_the_next_step(arguments: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(model=nn.Linear(2, 2), **arguments)
    assert sentence in str(caught.value)


def test_arguments_that_say_nothing_are_taken() -> None:
    engine, *_ = infinity.initialize(
        model=nn.Linear(2, 2), config_params=CONFIG, mpu=None, mesh_param=None, distributed_port=29500,
        dist_init_required=True, args=argparse.Namespace(local_rank=-1),
    )  # fmt: skip
    with engine:
        assert engine.train_batch_size() == 4


def test_a_model_in_the_second_place_is_deepspeeds_order() -> None:
    with pytest.raises(ConfigError, match="name the arguments: initialize"):
        infinity.initialize(argparse.Namespace(), nn.Linear(2, 2))


def test_an_argument_that_nobody_knows_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'modle'"):
        infinity.initialize(modle=nn.Linear(2, 2))


def test_a_group_that_the_script_should_have_opened_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"call infinity\.init_distributed\(\) before"):
        infinity.initialize(model=nn.Linear(2, 2), dist_init_required=False)


def test_a_configuration_comes_from_any_one_place() -> None:
    args = argparse.Namespace(deepspeed_config="a.json")
    assert configuration_of("a.json", None, None) == configuration_of(None, "a.json", None) == "a.json"
    assert configuration_of(None, None, args) == "a.json"
    assert configuration_of(None, None, None) is None


@pytest.mark.parametrize(
    ("raw", "sentence"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}, 'optimizer.params.lr: "auto" is refused'),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
            'scheduler.params.warmup_num_steps: "auto" is refused',
        ),
    ],
)
def test_auto_is_settled_by_what_the_program_brings_or_refused(raw: dict[str, Any], sentence: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        infinity.initialize(model=model, config=raw)
    assert sentence in str(caught.value)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    engine, *_ = infinity.initialize(
        model=model, config=raw, optimizer=optimizer, lr_scheduler=torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    )
    with engine:
        assert engine.get_lr() == [3e-4]


def test_the_start_up_line_says_the_rates_and_whether_anybody_chose_them(caplog: pytest.LogCaptureFixture) -> None:
    def told(config: Any, **weight: float) -> str:
        caplog.clear()
        model = nn.Linear(2, 2)
        groups = [{"params": [model.weight], **weight}, {"params": [model.bias]}]
        with caplog.at_level("INFO", "infinity"):
            engine, *_ = infinity.initialize(model=model, model_parameters=groups, config=config)
        engine.close()
        return caplog.text

    assert "AdamW at 0.01, stepped in one native pass; parameters on" in told(CONFIG)
    assert "AdamW at 0.0001 and 0.01, stepped in one native pass; parameters on" in told(CONFIG, lr=1e-4)
    assert "AdamW at 0.001 (default), stepped in one native pass; parameters on" in told(None)
