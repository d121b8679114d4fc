"""Embeddings: their backward does not need their weights, and gathers none; where something else needs them it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import infinity
from estimators.traffic import uses
from infinity.engine import Engine
from infinity.plan.prefetch import UnitAccess
from infinity.zero.unit import GatherState, Unit
from tests.support.oracle import ADAM, join, settings

WORDS, WIDTH, STEPS = 64, 32, 4


class Speaker(nn.Module):
    """An embedding, two layers and a head; `tied` to the embedding, which `odd` also uses as no module does."""

    def __init__(self, *, tied: bool = False, odd: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.odd = odd
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.words(ids))))
        logits = F.linear(hidden, self.words.weight) if self.odd else self.head(hidden)
        return F.cross_entropy(logits.flatten(0, -2), ids.flatten())


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randint(WORDS, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))


def engine_of(model: nn.Module, folder: Path | str, tier: str = "nvme", live: int = 9000) -> Engine:
    zero = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1500}
    config = settings(folder, param=tier, optimizer=tier, zero=zero)
    engine, *_ = infinity.initialize(model=model, config=config)
    return engine


def gathers(engine: Engine) -> Counter[str]:
    """How often each unit is gathered from now on, by name."""
    counts: Counter[str] = Counter()
    for unit in engine.units:

        def counted(unit: Unit = unit, start: Callable[..., None] = unit.start_gather, **how: bool) -> None:
            counts[unit.layout.name] += unit.state is GatherState.PARTITIONED
            start(**how)

        unit.start_gather = counted  # type: ignore[method-assign]
    return counts


def train(engine: Engine, rank: int = 0) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = engine(batch(step, rank))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def train_plainly(model: nn.Module, world: int = 1) -> list[float]:
    """Losses on rank 0's data of plain torch on all ranks'."""
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for step in range(STEPS):
        everyone = [model(batch(step, rank)) for rank in range(world)]
        (sum(everyone) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(everyone[0].detach()))
    return losses


def counted(rank: int, world: int, folder: str) -> list[tuple[Counter[str], int, list[float]]]:
    """(gathers of a pass by unit, passes that went otherwise than planned, losses), not tied and tied."""
    join(world)
    found = []
    for tied in (False, True):
        with engine_of(Speaker(tied=tied), folder) as engine:
            counts = gathers(engine)
            losses = train(engine, rank)
            # The third step gathers one more to see how long it takes.
            found.append((counts, engine.coordinator.mismatches, losses))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_backward_of_an_embedding_gathers_nothing(rank_pools: Any, tmp_path: Path, world: int) -> None:
    found = rank_pools[world].run(counted, str(tmp_path))[0]
    for tied, (counts, mismatches, losses) in zip((False, True), found, strict=True):
        # The head is there still when its backward begins.
        expected = {"words": STEPS, "first": 2 * STEPS, "second": 2 * STEPS, "head": STEPS}
        if tied:
            expected = {"words": 2 * STEPS, "first": 2 * STEPS, "second": 2 * STEPS}
        (timed,) = counts - Counter(expected)
        assert counts - Counter({timed: 1}) == expected
        assert mismatches == 0, "the plan knew"
        assert losses == pytest.approx(train_plainly(Speaker(tied=tied), world), rel=1e-5)


def test_what_is_read_of_an_embedding_is_what_the_plan_says(tmp_path: Path) -> None:
    with engine_of(Speaker(), tmp_path) as engine:
        assert [use for use in engine.plan.schedule.uses if not use.needed] == [UnitAccess(0, needed=False)]
        times = Counter(unit for _, unit, gathered in uses(engine.plan) if gathered)
        assert times == {0: 1, 1: 2, 2: 2, 3: 1}


def hooked(module: nn.Embedding, ids: tuple[Tensor], output: Tensor) -> Tensor:
    return output * (1 + module.weight.square().mean())


@pytest.mark.parametrize("user", ["another module", "a hook", "a later hook"])
def test_weights_of_an_embedding_that_something_else_needs_are_there(tmp_path: Path, user: str) -> None:
    def model() -> Speaker:
        made = Speaker(odd=user == "another module")
        if user == "a hook":
            made.words.register_forward_hook(hooked)
        return made

    plain = model()
    with engine_of(model(), tmp_path) as engine:
        for each in (plain, engine.module) if user == "a later hook" else ():
            each.words.register_forward_hook(hooked)
        losses = train(engine)
    assert losses == pytest.approx(train_plainly(plain), rel=1e-5)


def hooked_on_one(rank: int, world: int, folder: str) -> list[float]:
    join(world)
    model = Speaker()
    if rank == 0:
        model.words.register_forward_hook(lambda *_: None)
    with engine_of(model, folder) as engine:
        return train(engine, rank)


def test_a_hook_on_one_rank_does_not_part_the_ranks(rank_pools: Any, tmp_path: Path) -> None:
    losses = rank_pools[2].run(hooked_on_one, str(tmp_path))[0]
    assert losses == pytest.approx(train_plainly(Speaker(), 2), rel=1e-5)


def test_an_embedding_in_tiles_is_gathered_once(tmp_path: Path) -> None:
    with engine_of(Speaker(), tmp_path, "cpu", live=1500) as engine:
        tiles = [unit.layout.name for unit in engine.units if unit.layout.is_tile and "words" in unit.layout.name]
        assert len(tiles) > 2
        counts = gathers(engine)
        losses = train(engine)
        assert max(counts[name] for name in tiles) <= STEPS + 1 and engine.coordinator.mismatches == 0
    assert losses == pytest.approx(train_plainly(Speaker()), rel=1e-5)


def test_one_that_looks_like_an_embedding_is_none(tmp_path: Path) -> None:
    """The plan goes by its name and what it holds; what runs goes by what it is."""

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.1)

        def forward(self, ids: Tensor) -> Tensor:
            return F.one_hot(ids, WORDS).float() @ (self.weight * self.weight)

    def model() -> nn.Module:
        made = Speaker()
        torch.manual_seed(1)
        made.words = Embedding()  # type: ignore[assignment]
        return made

    with engine_of(model(), tmp_path) as engine:
        losses = train(engine)
        assert engine.coordinator.mismatches == 1
    assert losses == pytest.approx(train_plainly(model()), rel=1e-5)
