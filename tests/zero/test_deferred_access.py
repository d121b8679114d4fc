"""Parameters that no engine has yet: all ranks read and modify them together, and then keep slices of them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import infinity
from infinity.config import DEEPSPEED
from infinity.distributed import groups
from infinity.errors import ConfigError, DesyncError, StateError
from infinity.zero import deferred_init
from infinity.zero import deferred_init as value_slices
from infinity.zero.parameter import is_released
from tests.conftest import RankPools
from tests.zero.test_init import config

WINDOW = 20_000


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that holds a fraction of a tiny model."""
    monkeypatch.setattr(deferred_init, "WINDOW_NBYTES", WINDOW)


def layers(folder: str, tier: str = "nvme", count: int = 6) -> nn.Sequential:
    with infinity.Init(config=config(folder, tier)):
        return nn.Sequential(*[nn.Linear(64, 64) for _ in range(count)])


def masters(model: nn.Module, folder: str, tier: str = "nvme") -> list[Tensor]:
    engine, *_ = infinity.initialize(model=model, config=config(folder, tier))
    with engine:
        return [infinity.state(param).master for param in model.parameters()]


@pytest.mark.usefixtures("narrow")
def test_a_block_takes_what_programs_give_it(tmp_path: Path) -> None:
    model = layers(str(tmp_path))
    first, second = model[0].weight, model[1].weight
    assert is_released(first)
    with infinity.GatheredParameters([first, None, [second, first], torch.zeros(1)], modifier_rank=0):
        assert not is_released(first)
        first.fill_(1.0)
        second.data = torch.full_like(second, 2.0)
    with infinity.modify(param for param in [first]), infinity.modify(model), infinity.read({"a": second}):
        assert (first == 1).all()
        model[2].bias.fill_(3.0)
    with infinity.GatheredParameters(model[3].weight, modifier_rank=0, enabled=False):
        assert is_released(model[3].weight)
    with pytest.raises(ConfigError, match="got int"), infinity.read(3):  # type: ignore[arg-type]
        pass
    got = masters(model, str(tmp_path))
    assert [(got[index] == value).all() for index, value in ((0, 1.0), (2, 2.0), (5, 3.0))] == [True] * 3
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("narrow")
def test_an_error_in_a_block_loses_nothing_and_a_read_is_no_write(tmp_path: Path) -> None:
    model = layers(str(tmp_path))
    with infinity.read(model):
        before = [param.detach().clone() for param in model.parameters()]
    with pytest.raises(KeyError), infinity.modify(model[0]):
        model[0].bias.fill_(5.0)
        raise KeyError
    words = r"was changed inside infinity\.read"
    with pytest.raises(StateError, match=words), infinity.read(model[2]), torch.no_grad():
        model[2].weight.add_(0)
    with infinity.modify(model[4].weight), infinity.read(model[4].weight):
        pass
    got = masters(model, str(tmp_path))
    # Of the block that failed what it had written before may stay.
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got[2:], before[2:], strict=True))


@pytest.mark.usefixtures("narrow")
def test_a_large_parameter_of_other_strides_is_taken_over(tmp_path: Path) -> None:
    with infinity.Init(config=config(str(tmp_path))):
        model = nn.Linear(64, 64)
        model.weight = nn.Parameter(torch.arange(64.0 * 64).view(64, 64).t())
    assert is_released(model.weight)
    assert torch.equal(masters(model, str(tmp_path))[0].view(64, 64), torch.arange(64.0 * 64).view(64, 64).t())


@pytest.mark.usefixtures("narrow")
def test_a_state_dict_has_the_shapes_and_no_values(tmp_path: Path) -> None:
    model = layers(str(tmp_path))
    state = model.state_dict()
    assert {name: value.shape for name, value in state.items()} == {
        name: param.shape for name, param in model.named_parameters()
    }
    assert not state["0.weight"].requires_grad
    with pytest.raises(StateError, match=r"Linear\.weight is on its tier"):
        state["0.weight"].sum()
    with pytest.raises(StateError, match=r"infinity\.read"):
        torch.save(state, tmp_path / "x.pt")


@pytest.mark.usefixtures("narrow")
def test_parameters_of_several_contexts_are_one_model(tmp_path: Path) -> None:
    model = nn.Sequential(layers(str(tmp_path)), layers(str(tmp_path)), nn.Linear(64, 64))
    with infinity.modify(model):
        for index, param in enumerate(model.parameters()):
            param.fill_(index)
    with infinity.Init(config=config(str(tmp_path))):
        outer = nn.Linear(64, 64)
        with infinity.Init(config=config(str(tmp_path))):
            inner = nn.Linear(64, 64)
    assert outer.weight.__dict__["_infinity_owner"] is inner.weight.__dict__["_infinity_owner"]
    assert all((value == index).all() for index, value in enumerate(masters(model, str(tmp_path))))


@pytest.mark.usefixtures("narrow")
def test_an_existing_module_moves_to_its_tiers(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    values = [param.detach().clone() for param in model.parameters()]
    infinity.zero.Init(module=model, config_dict_or_path=config(str(tmp_path)))
    assert is_released(model[0].weight)
    assert len(os.listdir(tmp_path)) == 1
    assert all(torch.equal(a, b) for a, b in zip(masters(model, str(tmp_path)), values, strict=True))


def test_the_arguments_of_the_context(tmp_path: Path) -> None:
    folder = str(tmp_path)

    def made(**given: Any) -> torch.dtype:
        with infinity.Init(**{"config_dict_or_path": config(folder, "cpu"), **given}):
            return nn.Linear(4, 4).weight.dtype

    assert made() is torch.float32
    assert made(conventions=DEEPSPEED) is torch.bfloat16
    assert made(conventions=DEEPSPEED, config_dict_or_path=None) is torch.float32
    assert made(dtype=torch.half, remote_device="cpu", pin_memory=True, mem_efficient_linear=False) is torch.float16
    assert made(mpu=None, data_parallel_group=None, param_swapper=None, zero_param_parallel_group=None) is torch.float32
    auto = {**config(folder, "cpu"), "bf16": {"enabled": "auto"}, "train_batch_size": "auto"}
    auto |= {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
    assert made(conventions=DEEPSPEED, config_dict_or_path=auto) is torch.float32
    refused: list[tuple[dict[str, Any], str]] = [
        ({"dtype": torch.int8}, "torch.float32, torch.bfloat16 or torch.float16"),
        ({"param_swapper": object()}, "read and written by infinity itself"),
        ({"zero_quantized_weights": True}, "never quantized"),
        ({"remote_device": "nvme"}, "names no drive"),
        ({"tensor_overrides": 1}, "not supported"),
    ]
    for given, words in refused:
        with pytest.raises(ConfigError, match=words):
            made(**given)


def on_ranks(rank: int, world_size: int, folder: str, tier: str) -> dict[str, Any]:
    deferred_init.WINDOW_NBYTES, value_slices.PIECE_NBYTES = WINDOW, 4096
    torch.manual_seed(rank)
    model = layers(folder, tier, count=8)
    init = model[0].weight.__dict__["_infinity_owner"]
    with infinity.read(model):
        first = [param.detach().clone() for param in model.parameters()]
    held = sum(place.nbytes for place in init._places.values())
    # A set of tensors has another order on every rank.
    with infinity.modify({model[index].weight for index in range(8)}, source=1):
        model[3].weight.fill_(10.0 + rank)
        with infinity.read(model[4].weight), infinity.modify(model[4].weight):
            model[4].weight.fill_(20.0 + rank)
        inner = model[4].weight.mean().item()
    with pytest.raises(KeyError), infinity.modify([model[5].weight, model[6].bias]):
        model[5].weight.fill_(rank)
        raise KeyError
    message = ""
    try:
        with infinity.read(model[7].weight), torch.no_grad():
            if rank == 1:
                model[7].weight.add_(1)
    except StateError as error:
        message = str(error)
    ordinary = nn.Linear(4, 4)
    with infinity.GatheredParameters(ordinary.weight, modifier_rank=1):
        ordinary.weight.fill_(rank)
    taken = nn.Linear(64, 64)
    own = taken.weight.detach().clone()
    infinity.Init(module=taken, config=config(folder, tier))
    with infinity.read(taken):
        alike = taken.weight.detach().clone()
    with pytest.raises(ConfigError, match="rank 2"), infinity.modify(model, source=2):
        pass
    with pytest.raises(ConfigError, match="1 of 2 ranks"):
        infinity.Init(config=config(folder, tier), data_parallel_group=_alone(rank))
    return {
        "first": first, "held": held, "inner": inner, "message": message, "ordinary": ordinary.weight.detach().clone(),
        "own": own, "alike": alike, "last": masters(model, folder, tier),
    }  # fmt: skip


def _alone(rank: int) -> Any:
    return [dist.new_group([each]) for each in range(2)][rank]


@pytest.mark.parametrize("tier", ["nvme", "cpu"])
def test_ranks_keep_slices_of_what_they_have_agreed_on(tier: str, tmp_path: Path, rank_pools: RankPools) -> None:
    found = rank_pools[2].run(on_ranks, str(tmp_path), tier)
    torch.manual_seed(0)
    plain = [param.detach() for layer in range(8) for param in nn.Linear(64, 64).parameters()]
    total = sum(param.nbytes for param in plain)
    biases = sum(param.nbytes for param in plain[1::2])
    wanted = [*plain]
    wanted[6] = torch.full((64, 64), 11.0)
    # The inner block's values are rank 0's, and the outer block's are rank 1's, which are the same by then.
    wanted[8] = torch.full((64, 64), 20.0)
    for each in found:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(each["first"], plain, strict=True))
        assert each["held"] <= (total - biases) // 2 + biases
        assert each["inner"] == 20.0
        assert "was changed inside" in each["message"]
        assert (each["ordinary"] == 1).all()
        assert torch.equal(each["alike"], found[0]["own"])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(each["last"], wanted, strict=True))
    assert os.listdir(tmp_path) == []


def alone(rank: int, world_size: int) -> tuple[list[str], list[float]]:
    """What ranks are told that do not come together; values of a block in which they do."""
    dist.init_process_group("gloo")
    groups.PATIENCE_SECONDS, groups.REMIND_SECONDS = 1.0, 0.2
    layer = nn.Linear(3, 2)
    told = []

    def attempt(params: Any, error: Exception | None = None) -> None:
        try:
            with infinity.GatheredParameters(params, modifier_rank=0):
                layer.weight.fill_(rank)
                if error is not None:
                    raise error
        except (DesyncError, KeyError) as caught:
            told.append(f"{type(caught).__name__}: {caught}")

    if rank == 0:
        attempt([layer.weight, layer.bias])
        # Nothing that could be sent: no rank waits for another.
        attempt([nn.Parameter(torch.empty(2, device="meta")), None])
    dist.barrier()
    attempt(layer.bias if rank else layer.weight)
    dist.barrier()
    attempt(layer.weight, KeyError("mine") if rank == 0 else None)
    dist.barrier()
    attempt(layer)
    return told, layer.weight.flatten().tolist()


def test_a_rank_that_modifies_ordinary_parameters_alone_is_told(rank_pools: RankPools) -> None:
    (first, values), (second, same) = rank_pools[2].run(alone)
    assert values == same == [0.0] * 6
    late, other, own = first
    what = r"modifier_rank=0\), of a parameter of shape \(2, 3\) that no engine has and of 1 more"
    assert re.search(rf"rank 0 has waited 1 s for rank 1.*{what}", late)
    assert "enter the block" in late
    assert re.search(r"rank 1 has ended .*\(2,\) that no engine has where rank 0", other)
    assert own == "KeyError: 'mine'"
    assert re.search(r"rank 0 has ended .*\(2, 3\)", second[0]) and "rank 0 has raised KeyError" in second[1]
    assert [len(first), len(second)] == [3, 2]
