"""`infinity.Init`: constructors run as they are, values are the ordinary ones, memory is bounded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import infinity
from infinity.errors import ConfigError, StateError
from infinity.memory import scratch
from infinity.zero import deferred_init
from infinity.zero.parameter import is_released
from tests.support.spawn import RankPool
from tests.zero.test_transformers import config_of


def config(folder: str, tier: str = "nvme") -> dict[str, Any]:
    home = {"device": tier, "nvme_path": folder}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": home, "offload_optimizer": home},
    }


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that holds a fraction of a tiny model."""
    monkeypatch.setattr(deferred_init, "WINDOW_NBYTES", 20_000)


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_values_are_those_of_an_ordinary_construction(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config_of(name))
    torch.manual_seed(0)
    with infinity.Init(config=config(str(tmp_path))):
        model = AutoModelForCausalLM.from_config(config_of(name))
    assert sum(is_released(param) for param in model.parameters()) > len(list(model.parameters())) // 2
    assert len(os.listdir(tmp_path)) == 1
    engine, *_ = infinity.initialize(model=model, config=config(str(tmp_path)))
    with engine:
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.state(ours).master, theirs.detach())
    assert os.listdir(tmp_path) == []


class Large(nn.Module):
    """Parameters beyond the window, one with a few elements more than whole parts, beside small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(5, 1027))
        self.second = nn.Parameter(torch.empty(301, 40))
        self.third = nn.Parameter(torch.empty(9, 1000))
        self.small = nn.Linear(10, 10)
        nn.init.normal_(self.first, std=0.3)
        nn.init.uniform_(self.third)
        with torch.no_grad():
            self.second.fill_(0.5)
            self.second.normal_(std=0.02, generator=torch.Generator().manual_seed(3))


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize("trained", ["bf16", "fp32"])
def test_a_parameter_beyond_the_window_is_never_whole_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: str
) -> None:
    """It is filled and read in parts, with the values of the whole; what draws after it draws the same."""
    home, options = {"device": "nvme", "nvme_path": str(tmp_path)}, {"train_micro_batch_size_per_gpu": 1}
    zero = {"stage": 3, "offload_param": home, "offload_optimizer": home, "sub_group_size": 3000}
    asked = {**options, "zero_optimization": zero, "bf16": {"enabled": trained == "bf16"}}
    monkeypatch.setattr(deferred_init, "WINDOW_NBYTES", 10_000)
    monkeypatch.setattr(deferred_init, "_SPAN_NBYTES", 1 << 13 if trained == "bf16" else 1 << 16)
    monkeypatch.setattr(scratch, "PART_NBYTES", 1 << 12)
    torch.manual_seed(0)
    plain = Large()
    drawn = torch.rand(3)
    whole = deferred_init.DeferredInit._load

    def load(self: deferred_init.DeferredInit, place: Any) -> torch.Tensor:
        assert place.nbytes <= deferred_init.WINDOW_NBYTES, place.shape
        return whole(self, place)

    monkeypatch.setattr(deferred_init.DeferredInit, "_load", load)
    monkeypatch.setattr(deferred_init, "_OVERWRITES", set())
    torch.manual_seed(0)
    with infinity.Init(config=asked):
        model = Large()
    assert all(is_released(param) for param in (model.first, model.second, model.third))
    assert torch.equal(drawn, torch.rand(3))
    engine, *_ = infinity.initialize(model=model, config=asked)
    with engine:
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(infinity.state(ours).master, theirs.detach()), name


@pytest.mark.usefixtures("narrow")
def test_code_that_changes_weights_after_construction_is_heard(tmp_path: Path) -> None:
    with infinity.Init(config=config(str(tmp_path))):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        assert is_released(model[0].weight)
        nn.init.constant_(model[0].weight, 0.25)
        with torch.no_grad():
            model[1].weight[3] = 2.0
            model[2].weight.copy_(model[1].weight)
            model[3].bias.data.fill_(1.5)
        model[4].weight = model[5].weight
    engine, *_ = infinity.initialize(model=model, config=config(str(tmp_path)))
    with engine:
        master = lambda param: infinity.state(param).master  # noqa: E731
        assert (master(model[0].weight) == 0.25).all()
        assert (master(model[1].weight)[3] == 2.0).all()
        assert torch.equal(master(model[2].weight), master(model[1].weight))
        assert (master(model[3].bias) == 1.5).all()
        assert model[4].weight is model[5].weight


@pytest.mark.usefixtures("narrow")
def test_a_drive_with_less_room_than_a_usual_swap_file_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 40 << 20
    real = os.statvfs(tmp_path)
    small = os.statvfs_result((4096, 4096, room >> 12, room >> 12, room >> 12, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda _: small)
    with infinity.Init(config=config(str(tmp_path))):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    assert is_released(model[0].weight)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == room // 4
    infinity.initialize(model=model, config=config(str(tmp_path)))[0].close()


@pytest.mark.parametrize("tier", ["none", "cpu"])
def test_without_a_drive_values_stay_in_memory(tier: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    torch.manual_seed(0)
    with infinity.zero.Init(config_dict_or_path=config(str(tmp_path), tier)):
        model = nn.Linear(8, 8)
    engine, *_ = infinity.initialize(model=model, config=config(str(tmp_path), tier))
    with engine:
        assert torch.equal(infinity.state(model.weight).master, plain.weight.detach())


@pytest.mark.usefixtures("narrow")
def test_a_parameter_that_was_tied_to_another_keeps_no_room(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}},
    }
    with infinity.Init(config=config):
        first, second = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        gone = id(second.weight)
        owner = first.weight.__dict__["_infinity_owner"]
        assert gone in owner._places
        second.weight = first.weight
        # Parameters made now may have the number of the one that is gone.
        third = nn.Linear(64, 64, bias=False)
        assert len(owner._places) == 2
        assert owner.holds(first.weight) and owner.holds(third.weight)


def test_an_error_while_building_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="constructor"), infinity.Init(config=config(str(tmp_path))):
        nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
        raise RuntimeError("constructor")
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("narrow")
def test_between_init_and_initialize_data_is_not_touched_by_accident(tmp_path: Path) -> None:
    with infinity.Init(config=config(str(tmp_path))):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)])
    with pytest.raises(StateError, match=r"infinity\.initialize"):
        model[0].weight.sum()


def test_a_meta_model_is_refused_with_the_way_out() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"meta device.*infinity\.Init"):
        infinity.initialize(model=model, config=None)


def build_on_ranks(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    deferred_init.WINDOW_NBYTES = 20_000
    # Ranks that seed differently: rank 0's values win.
    torch.manual_seed(rank)
    with infinity.Init(config=config(folder)):
        model = AutoModelForCausalLM.from_config(config_of("llama"))
    engine, *_ = infinity.initialize(model=model, config=config(folder))
    with engine:
        return [infinity.state(param).master for param in model.parameters()]


def test_ranks_build_the_same_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config_of("llama"))
    with RankPool(2) as pool:
        for masters in pool.run(build_on_ranks, str(tmp_path)):
            assert all(torch.equal(a, b.detach()) for a, b in zip(masters, plain.parameters(), strict=True))
    assert os.listdir(tmp_path) == []
