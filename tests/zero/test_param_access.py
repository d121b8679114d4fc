"""Parameters look whole while they are partitioned; `read`, `modify` and `state` give and take their data."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.errors import StateError
from infinity.zero.parameter import ReleasedParameter
from tests.support.late_copies import copies_are_late
from tests.support.spawn import RankPool


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(20, 16), *blocks, nn.Linear(16, 20))
    model[1][0].bias.requires_grad_(False)
    return model


def config(tier: str, dtype: str, folder: str, stage: int = 3) -> dict[str, Any]:
    home = {"device": tier, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": home, "stage3_param_persistence_threshold": 0}
    if stage == 3:
        zero["offload_param"] = home
    precision = {} if dtype == "fp32" else {dtype: {"enabled": True}}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        **precision,
    }


def train(engine: Any, steps: int = 1) -> None:
    for step in range(steps):
        tokens = torch.randint(0, 20, (4, 6), generator=torch.Generator().manual_seed(step))
        logits = engine(tokens).float().view(-1, 20)
        engine.backward(nn.functional.cross_entropy(logits, tokens.view(-1)))
        engine.step()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    engine, *_ = infinity.initialize(model=build(), config=config("nvme", "bf16", str(tmp_path)))
    with engine:
        train(engine)
        yield engine


def test_a_partitioned_parameter_looks_whole(engine: Any) -> None:
    weight = engine.module[1][0].weight
    assert type(weight) is ReleasedParameter
    assert isinstance(weight, nn.Parameter)
    assert (tuple(weight.shape), weight.numel(), weight.ndim, weight.size(0)) == ((32, 16), 512, 2, 32)
    assert weight.dtype is torch.bfloat16
    assert weight.requires_grad
    assert weight.grad is None
    assert not weight.is_cuda
    assert len(weight) == 32
    assert "1.0.weight" in repr(weight)
    assert "partitioned" in repr(weight)
    sizes = [sum(param.numel() for param in model.parameters()) for model in (engine.module, build())]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "use",
    [
        lambda weight: weight + 1,
        lambda weight: weight[0],
        lambda weight: weight.sum(),
        lambda weight: weight.data,
        lambda weight: weight.detach(),
        lambda weight: weight.tolist(),
        lambda weight: torch.stack([weight, weight]),
        lambda weight: copy.deepcopy(weight),
        lambda weight: weight.normal_(),
        lambda weight: weight.data_ptr(),
    ],
)
def test_touching_its_data_names_the_parameter_and_the_fix(engine: Any, use: Any) -> None:
    with pytest.raises(StateError, match=r"1\.0\.weight is partitioned.*infinity\.read"):
        use(engine.module[1][0].weight)


def test_state_dict_of_the_module_is_an_error_and_of_the_engine_is_whole(engine: Any) -> None:
    with pytest.raises(StateError, match=r"infinity\.read"):
        engine.module.state_dict()
    whole = engine.state_dict()
    assert whole.keys() == build().state_dict().keys()
    with infinity.read(engine.module):
        inside = {name: value.clone() for name, value in engine.module.state_dict().items()}
    assert all(torch.equal(whole[name], inside[name]) for name in whole)
    build().to(torch.bfloat16).load_state_dict(whole)


def test_read_gives_data_and_takes_it_away_again(engine: Any) -> None:
    weight = engine.module[1][0].weight
    with infinity.read(weight):
        assert type(weight) is nn.Parameter
        assert torch.isfinite(weight).all()
        copied = weight.detach().clone()
    assert type(weight) is ReleasedParameter
    assert torch.equal(copied.float(), infinity.state(weight).master.bfloat16().float())


def test_changing_a_parameter_inside_read_is_an_error(engine: Any) -> None:
    weight = engine.module[1][0].weight
    message = r"1\.0\.weight was changed inside infinity\.read.*modify"
    with pytest.raises(StateError, match=message), infinity.read(weight):
        weight.data.mul_(2)
        with torch.no_grad():
            weight.add_(1)
    assert type(weight) is ReleasedParameter


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize(("dtype", "stage"), [("fp32", 3), ("bf16", 3), ("fp16", 3), ("bf16", 2), ("bf16", 0)])
def test_modify_survives_the_next_step_and_keeps_other_masters(
    tier: str, dtype: str, stage: int, tmp_path: Path
) -> None:
    engine, *_ = infinity.initialize(model=build(), config=config(tier, dtype, str(tmp_path), stage))
    with engine:
        train(engine, 2)
        weight = engine.module[1][0].weight
        before = infinity.state(weight).master
        with infinity.modify(weight):
            weight[3, 4] = 7.5
        after = infinity.state(weight).master
        expected = before.clone()
        expected[3, 4] = 7.5
        assert torch.equal(after, expected)
        train(engine)
        assert abs(infinity.state(weight).master[3, 4].item() - 7.5) < 0.1
        with infinity.read(weight):
            assert abs(weight[3, 4].item() - 7.5) < 0.1


@pytest.mark.parametrize(("tier", "stage"), [("cpu", 3), ("nvme", 3), ("cpu", 2)])
def test_values_are_changed_while_the_host_runs_ahead_of_copies(
    tier: str, stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_are_late(monkeypatch)
    engine, *_ = infinity.initialize(model=build(), config=config(tier, "bf16", str(tmp_path), stage))
    with engine:
        train(engine)
        weight = engine.module[1][0].weight
        with infinity.modify(engine.module):
            weight[3, 4] = 7.5
        with torch.no_grad():
            engine(torch.zeros(1, 1, dtype=torch.long))
        state = infinity.state(weight)
        state.master = state.master * 2
        state.master = state.master + 1
        with infinity.read(engine.module):
            assert weight[3, 4] == 16
            assert not any(unit.leasing for unit in engine.units), "their buffers in the pool are in use"
        train(engine)


@pytest.mark.parametrize("tier", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_states_are_read_and_set_at_every_tier(tier: str, dtype: str, tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=build(), config=config(tier, dtype, str(tmp_path)))
    with engine:
        train(engine)
        state = infinity.state(engine.module[2][0].weight)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            value = getattr(state, kind)
            assert value.shape == (32, 16)
            changed = value * 1.5 + 0.001
            setattr(state, kind, changed)
            assert torch.equal(getattr(state, kind), changed)
        assert not state.grad.any()
        frozen = infinity.state(engine.module[1][0].bias)
        assert frozen.master.shape == (32,)
        with pytest.raises(StateError, match=r"1\.0\.bias is frozen"):
            _ = frozen.exp_avg
        with pytest.raises(ValueError, match="shape"):
            state.master = torch.zeros(3)


def test_gradients_are_visible_between_backward_and_step(tmp_path: Path) -> None:
    plain = build()
    tokens = torch.arange(6).view(1, 6)
    nn.functional.cross_entropy(plain(tokens).view(-1, 20), tokens.view(-1)).backward()
    engine, *_ = infinity.initialize(model=build(), config=config("nvme", "fp32", str(tmp_path)))
    with engine:
        engine.backward(nn.functional.cross_entropy(engine(tokens).view(-1, 20), tokens.view(-1)))
        for ours, theirs in zip(engine.module.parameters(), plain.parameters(), strict=True):
            if theirs.requires_grad:
                torch.testing.assert_close(infinity.state(ours).grad, theirs.grad, atol=1e-7, rtol=1e-6)


def test_a_weight_used_outside_its_module_is_fetched(tmp_path: Path) -> None:
    class Borrower(nn.Module):
        """Uses another module's weight directly, as tied heads written by hand do."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            hidden = self.embedding(tokens)
            for block in self.blocks:
                hidden = hidden + block(hidden)
            return nn.functional.linear(hidden, self.embedding.weight)

    torch.manual_seed(1)
    plain = Borrower()
    model = copy.deepcopy(plain)
    tokens = torch.arange(12).view(2, 6)
    nn.functional.cross_entropy(plain(tokens).view(-1, 20), tokens.view(-1)).backward()
    engine, *_ = infinity.initialize(model=model, config=config("nvme", "fp32", str(tmp_path)))
    with engine:
        engine.backward(nn.functional.cross_entropy(engine(tokens).view(-1, 20), tokens.view(-1)))
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(infinity.state(ours).grad, theirs.grad, atol=1e-7, rtol=1e-6)
        assert all(type(param) is ReleasedParameter for param in model.parameters())


def test_after_close_a_partitioned_parameter_says_so(tmp_path: Path) -> None:
    engine, *_ = infinity.initialize(model=build(), config=config("nvme", "fp32", str(tmp_path)))
    engine.close()
    engine.close()
    with pytest.raises(StateError, match="engine was closed"):
        engine.module[1][0].weight.sum()
    with pytest.raises(StateError, match="engine was closed"):
        engine(torch.zeros(1, 1, dtype=torch.long))


def ranks_agree(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    torch.manual_seed(rank)
    model = build()
    if rank == 1:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    engine, *_ = infinity.initialize(model=model, config=config("nvme", "bf16", folder))
    with engine:
        start = infinity.state(model[3].weight).master
        train(engine)
        with infinity.GatheredParameters(model[3].weight, modifier_rank=0):
            model[3].weight.fill_(rank + 1)
        with infinity.modify(model[1][0].weight, source=1):
            model[1][0].weight.fill_(rank + 1)
        message = ""
        try:
            with infinity.read(model[2][0].weight), torch.no_grad():
                if rank == 1:
                    model[2][0].weight.add_(1)
        except StateError as error:
            message = str(error)
        masters = [infinity.state(layer.weight).master for layer in (model[3], model[1][0])]
        return {"start": start, "set": masters, "message": message}


def test_the_source_wins_and_a_stray_change_raises_on_every_rank(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        first, second = pool.run(ranks_agree, str(tmp_path))
    assert torch.equal(first["start"], build()[3].weight)
    assert torch.equal(first["start"], second["start"])
    for of_rank in (first, second):
        for values, expected in zip(of_rank["set"], (1.0, 2.0), strict=True):
            assert (values == expected).all()
    assert "was changed inside" in first["message"]
    assert "was changed inside" in second["message"]
