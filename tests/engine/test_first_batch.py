"""A micro-batch whose activations do not fit is refused before anything is lost, whatever the module is."""

from __future__ import annotations

import copy
import random
import re
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
import infinity.memory.drives
from infinity.base.sizes import parse_bytes
from infinity.engine.activation_forecast import LiveBytes, measure_call
from infinity.errors import CapacityError
from tests.conftest import RankPools
from tests.support.models import MLP

MB = 10**6


class Images(nn.Module):
    """Convolutions with batch norm and dropout, which keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Conv2d(8, 3, 1)
        )
        self.calls: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(x)
        random.random()
        return self.net(x).square().mean()


class Routed(nn.Module):
    """Which layers run depends on values, as in a mixture of experts: no shapes tell what it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if x.sum().item() == x.sum().item():
                x = F.gelu(layer(x))
        return x.square().mean()


CASES: dict[str, tuple[type[nn.Module], Any]] = {
    "images": (Images, lambda n: (torch.randn(n, 3, 32, 32),)),
    "routed": (Routed, lambda n: (torch.randn(100 * n, 32),)),
    "mlp": (MLP, lambda n: (torch.randn(100 * n, 32), torch.randn(100 * n, 32))),
}


def machine(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(infinity.memory.drives, "free_cpu_nbytes", lambda: nbytes)


def trained(engine: infinity.Engine, batch: Any) -> float:
    loss = engine(*batch)
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@pytest.mark.parametrize("free", [60 * MB, 72 * MB], ids=["tight", "not tight"])
@pytest.mark.parametrize("case", CASES)
def test_a_batch_that_does_not_fit_is_refused_and_a_smaller_one_trains(monkeypatch, case, free):
    """Measured on shapes where memory is short and the module allows it, else counted as forward runs. The weights are
    those of a run that never saw the large batch.
    """
    machine(monkeypatch, free)
    make, batch = CASES[case]
    losses = []
    for refused in (False, True):
        torch.manual_seed(0)
        engine, *_ = infinity.initialize(model=make(), config={"zero_optimization": {"stage": 3}})
        with engine:
            if refused:
                said = r"activations of this micro-batch take .* left .*states are as they were: go on with a smaller"
                with pytest.raises(CapacityError, match=said):
                    engine(*batch(800))
            torch.manual_seed(1)
            losses.append([trained(engine, batch(2)) for _ in range(2)])
            known = engine.memory()
            assert 0 < known.activations_predicted < 2 * MB and known.activations_source
            if refused:
                # A larger one later is looked at again, and so is one that fits.
                with pytest.raises(CapacityError):
                    engine(*batch(800))
            trained(engine, batch(4))
            assert engine.memory().activations_predicted > known.activations_predicted
            assert f"activations: {engine.plan.activations}" in engine.plan.explain()
            assert engine.memory().predicted > known.predicted
    assert losses[0] == losses[1]


def test_a_refusal_names_all_that_it_has_added_up(monkeypatch):
    """Batches grow in small steps, so that the first one refused is so for the gaps between what it takes."""
    machine(monkeypatch, 72 * MB)
    make, batch = CASES["routed"]
    engine, *_ = infinity.initialize(model=make(), config={"zero_optimization": {"stage": 3}})
    amount = r"(\d[\d.]* \w?B)"
    with engine, pytest.raises(CapacityError) as refusal:
        for n in range(100, 1000, 5):
            engine(*batch(n))
    said = re.search(rf"take {amount} \(.*\) and {amount} of gaps in the heap, but {amount} of ", str(refusal.value))
    assert said is not None, refusal.value
    taken, gaps, left = map(parse_bytes, said.groups())
    assert taken < left < 1.01 * (taken + gaps), "amounts are written in three digits"


def refused_on_all(rank: int, world: int, case: str, free: int) -> tuple[str, bool, bool, float]:
    """Rank 1 has no room for its batch: all ranks refuse, and go on with less. Says whether the last layer ran, and
    whether something keeps the batch.
    """
    torch.manual_seed(0)
    make, batch = CASES[case]
    with pytest.MonkeyPatch.context() as patch:
        machine(patch, free)
        config = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
        engine, *_ = infinity.initialize(model=make(), config=config)
    with engine:
        ran: list[object] = []
        last = list(engine.module.modules())[-1]
        refused = batch(800 if rank else 2)
        kept = weakref.ref(refused[0])
        with last.register_forward_hook(lambda *_: ran.append(last)):
            try:
                engine(*refused)
                text = ""
            except CapacityError as error:
                text = str(error)
        del refused
        return text, bool(ran), kept() is not None, trained(engine, batch(2))


@pytest.mark.parametrize(("case", "free"), [("mlp", 120 * MB), ("routed", 150 * MB)])
def test_all_ranks_refuse_what_one_has_no_room_for(rank_pools: RankPools, case: str, free: int) -> None:
    """On shapes before the forward, and as it is counted in front of each gather."""
    answers = rank_pools[2].run(refused_on_all, case, free)
    assert all("activations of this micro-batch" in text for text, *_ in answers)
    assert not any(reached for _, reached, *_ in answers), "the refusal has come behind the last layer"
    assert not any(kept for _, _, kept, _ in answers), "an error that is gone keeps what its forward has made"


def test_a_pass_on_shapes_leaves_nothing_behind():
    model, x = Images(), torch.randn(4, 3, 32, 32)
    seen: list[Any] = []
    model.net[0].register_forward_hook(lambda *_: seen.append(1))
    model(x).backward()
    tensors = [*model.parameters(), *model.buffers()]
    before = copy.deepcopy(model.state_dict()), [(each._version, each.grad) for each in tensors]
    state = torch.get_rng_state(), random.getstate(), len(model.calls), len(seen)
    found = measure_call(model, (x,), {})
    assert found.nbytes > 4 * 3 * 32 * 32 * 4
    assert [(each._version, each.grad) for each in tensors] == before[1]
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    after = torch.get_rng_state(), random.getstate(), len(model.calls), len(seen)
    assert torch.equal(after[0], state[0]) and after[1:] == state[1:]


@pytest.mark.parametrize("case", ["images", "mlp"])
def test_what_is_counted_is_what_backward_has(case: str) -> None:
    """The count, which ends with forward, is within a tenth of the pass on shapes, which runs backward."""
    make, batch = CASES[case]
    model, args = make(), batch(8)
    live = LiveBytes(model, [], lambda _: None)
    with live.counting():
        output = model(*args)
    expected = measure_call(model, args, {}, holds_output=True)
    assert output.requires_grad and live.found("").nbytes == pytest.approx(expected.nbytes, rel=0.1)


def test_training_data_tell_at_the_start_where_memory_is_short(monkeypatch):
    """At 60 MB a batch of 800 is refused by `initialize`, before the data's order moves; one of 2 is known."""
    machine(monkeypatch, 60 * MB)
    data = [CASES["mlp"][1](1) for _ in range(8)]

    def start(count: int) -> Any:
        collate = lambda rows: CASES["mlp"][1](count)  # noqa: E731
        return infinity.initialize(model=MLP(), config={}, training_data=data, collate_fn=collate)

    with pytest.raises(CapacityError, match=r"It would fit without the activations: .*every = 1"):
        start(800)
    engine, _, loader, _ = start(2)
    with engine:
        assert engine.memory().activations_source == "200 x 32, measured"
        assert loader.state_dict()["drawn"] == 0
