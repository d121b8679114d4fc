"""A weight in tiles trains as the whole one does, whoever uses it, and no more of it than the budget is gathered."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.errors import StateError
from tests.engine.cases import CASES, LEAF
from tests.engine.test_oracle_parity import check
from tests.support.cells import kept
from tests.support.oracle import Case, join, settings, swap_files, train

# Smaller than every matrix of the cases, so that all of them are in tiles.
TILES = {**LEAF, "tile_parameters": 200}
PLACES = [("cpu", "cpu"), ("nvme", "nvme"), ("gpu", "gpu"), ("cpu", "nvme")]
# What several ranks add: order of collectives, gradients that wait for their turn.
OF_TWO = [
    "everything awkward", "experts chosen by rank", "another order each step", "a layer never used",
    "two forwards, two backwards", "evaluation goes another way", "read in training", "changed in training",
    "checkpointed together, reentrant", "checkpointed together, not reentrant",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("world", kept([1, 2], [1]))
def test_models_of_every_habit_train_in_tiles(rank_pools: Any, tmp_path: Path, world: int) -> None:
    cells = []
    for name, (param, optimizer) in zip(
        OF_TWO if world == 2 else set(CASES) - {"a layer on one rank only"}, itertools.cycle(PLACES), strict=False
    ):
        options = {"accumulation": 2, "param": param, "optimizer": optimizer, "zero": TILES}
        cells.append((f"{name} {options}", name, options))
    check(rank_pools, tmp_path, world, cells, steps=2)


def digests(rank: int, world: int, folder: str, dtype: str) -> list[str]:
    join(world)
    found = []
    nvme: dict[str, Any] = {"param": "nvme", "optimizer": "nvme"}
    for row in ({"param": "cpu", "optimizer": "gpu"}, nvme, {**nvme, "overlap": False}):
        tiles: list[int] = []
        result = train(
            Case(), settings(folder, dtype=dtype, zero=TILES, **row), rank=rank, steps=2,
            look=lambda engine, tiles=tiles: tiles.append(sum(layout.is_tile for layout in engine.plan.layouts)),
        )  # fmt: skip
        assert tiles[0] >= 20
        found.append(result.digest)
    return found


@pytest.mark.parametrize(("world", "dtype"), kept([(1, "bf16"), (2, "fp32")], [(2, "fp32")]))
def test_where_tiles_live_does_not_matter(rank_pools: Any, tmp_path: Path, world: int, dtype: str) -> None:
    everyone = rank_pools[world].run(digests, str(tmp_path / "nvme"), dtype)
    assert len({digest for found in everyone for digest in found}) == 1
    assert swap_files(tmp_path / "nvme") == []


class Wide(nn.Module):
    """Most of it is one layer; `odd` uses its weight as no layer does."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32, padding_idx=3)
        self.wide = nn.Linear(32, 512)

    def forward(self, ids: Tensor, odd: bool = False) -> Tensor:
        hidden = self.words(ids)
        logits = hidden @ self.wide.weight.t() if odd else self.wide(hidden)
        return F.cross_entropy(logits.flatten(0, -2).float(), ids.flatten())


LIVE = 32 * 512 // 4


def config(folder: Path | str, tier: str = "cpu", dtype: str = "fp32", **zero: Any) -> dict[str, Any]:
    bounds = {"stage3_max_live_parameters": LIVE, "stage3_prefetch_bucket_size": LIVE // 2, **zero}
    return settings(folder, param=tier, optimizer=tier, dtype=dtype, zero=bounds)


def peaks(rank: int, world: int, folder: str) -> list[tuple[str, float, float, list[float]]]:
    """(tier and dtype, budgets gathered by the ledger and by the plan, losses) of each cell."""
    join(world)
    found = []
    for tier, dtype in itertools.product(("cpu", "nvme"), ("fp32", "bf16")):
        torch.manual_seed(0)
        engine, *_ = infinity.initialize(model=Wide(), config=config(folder, tier, dtype))
        with engine:
            losses = []
            for step in range(4):
                ids = torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
                loss = engine(ids)
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
            budget = LIVE * (4 if dtype == "fp32" else 2)
            planned = engine.plan.pools.gathered_nbytes
            assert sum(layout.is_tile for layout in engine.plan.layouts) == 16
            found.append((f"{tier} {dtype}", engine.memory().peak["gpu"]["full"] / budget, planned / budget, losses))
    return found


@pytest.mark.parametrize("world", kept([1, 2], [2]))
def test_no_more_than_the_budget_is_gathered_of_a_layer_four_times_its_size(
    rank_pools: Any, tmp_path: Path, world: int
) -> None:
    everyone = rank_pools[world].run(peaks, str(tmp_path))
    for cell, gathered, planned, losses in itertools.chain(*everyone):
        assert 0.2 < gathered <= planned <= 1, cell
        assert losses == everyone[0][0][3] or "bf16" in cell or world == 2
        assert all(abs(loss - 6.2) < 0.6 for loss in losses), (cell, losses)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Wide(), config=config(tmp_path))
    with engine:
        yield engine


IDS = torch.tensor([[3, 7, 49, 0]])


def test_the_parameter_looks_whole(engine: Any) -> None:
    weight = engine.module.wide.weight
    torch.manual_seed(0)
    plain = Wide()
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.numel(), weight.dtype) == ((512, 32), 512 * 32, torch.float32)
    assert "partitioned by infinity: wide.weight, shape=(512, 32)" in repr(weight)
    assert sum(param.numel() for param in engine.parameters()) == sum(param.numel() for param in plain.parameters())
    whole = engine.state_dict()
    assert whole.keys() == plain.state_dict().keys()
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    with infinity.read(engine.module):
        assert torch.equal(weight, plain.wide.weight)
        twin = copy.deepcopy(engine.module)
    assert type(twin.wide.weight) is nn.Parameter
    assert torch.equal(twin(IDS), plain(IDS))


def test_states_are_read_and_set_whole(engine: Any) -> None:
    weight = engine.module.wide.weight
    plain = Wide()
    plain.load_state_dict(engine.state_dict())
    plain(IDS).backward()
    engine.backward(engine(IDS))
    state = infinity.state(weight)
    assert torch.allclose(state.grad, plain.wide.weight.grad, atol=1e-8)
    assert torch.allclose(infinity.state(engine.module.words.weight).grad, plain.words.weight.grad, atol=1e-8)
    engine.step()
    moments = torch.arange(512.0 * 32).view(512, 32)
    state.exp_avg = moments
    assert torch.equal(state.exp_avg, moments)
    assert torch.equal(state.local("exp_avg"), moments.view(-1))
    state.set_local("exp_avg_sq", moments.view(-1) + 1)
    assert torch.equal(state.exp_avg_sq, moments + 1)
    with infinity.modify(weight):
        weight[500] = 7.0
        weight.data = weight.data * 2
    with infinity.read(weight):
        assert torch.equal(weight[500], torch.full((32,), 14.0))
    assert torch.equal(state.master[500], torch.full((32,), 14.0))
    with pytest.raises(StateError, match=r"wide\.weight was changed inside"), infinity.read(weight), torch.no_grad():
        weight.zero_()
    assert float(state.master.abs().max()) == 14.0
    with pytest.raises(ValueError, match=r"wide\.weight has shape"):
        state.master = moments.t()


def test_a_use_that_needs_all_of_it_is_refused_with_the_way_out(engine: Any) -> None:
    with pytest.raises(StateError, match=r"wide\.weight is executed in 16 tiles.*tile_parameters to 0"):
        engine(IDS, odd=True)
    # Nothing is left open.
    engine.backward(engine(IDS))
    engine.step()
    with pytest.raises(StateError, match=r"infinity\.read"):
        engine.module.wide.weight.sum()
    with pytest.raises(IndexError, match="out of range"):
        engine(IDS + 1)
    engine.close()
    with pytest.raises(StateError, match="when the engine was closed"):
        engine.module.wide.weight.sum()


def test_tiles_are_switched_off(tmp_path: Path) -> None:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Wide(), config=config(tmp_path, tile_parameters=0))
    with engine:
        assert not any(layout.is_tile for layout in engine.plan.layouts)
        assert "wide.weight is gathered whole" in engine.plan.explain()
        engine(IDS, odd=True)


def test_frozen_tiles_have_no_gradient_and_refuse_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 512))
    model[1].requires_grad_(False)
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path))
    with engine:
        frozen = [unit for unit in engine.units if unit.layout.is_tile]
        assert len(frozen) == 16
        assert not any(unit.layout.trainable for unit in frozen)
        before = infinity.state(model[1].weight).master
        engine.backward(engine(torch.randn(4, 32)).square().mean())
        engine.step()
        assert torch.equal(infinity.state(model[1].weight).master, before)
        model[1].requires_grad_(True)
        with pytest.raises(StateError, match=r"1\.bias and \d+ more|1\.weight and \d+ more"):
            engine.backward(engine(torch.randn(4, 32)).square().mean())
        model[1].requires_grad_(False)


def test_under_autocast_a_layer_in_tiles_is_the_same_layer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 512))
    plain = copy.deepcopy(model)
    x = torch.randn(4, 32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
        (expected.float().square().mean()).backward()
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path))
    with engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = engine(x)
            loss = found.float().square().mean()
        assert found.dtype is torch.bfloat16
        assert torch.equal(found, expected)
        engine.backward(loss)
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            grad = infinity.state(mine).grad
            assert torch.allclose(grad, other.grad, rtol=2e-2, atol=1e-6)


def test_a_model_that_is_built_in_its_tiers_is_cut_there(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Wide()
    torch.manual_seed(0)
    with infinity.Init(config=config(tmp_path, "nvme")):
        model = Wide()
    engine, *_ = infinity.initialize(model=model, config=config(tmp_path, "nvme"))
    with engine:
        assert any(layout.is_tile for layout in engine.plan.layouts)
        found = engine.state_dict()
        assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def trained(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = engine(torch.randint(50, (2, 8), generator=torch.Generator().manual_seed(step)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(("saved", "loaded"), [({}, {}), ({}, {"tile_parameters": 0}), ({"tile_parameters": 0}, {})])
def test_a_checkpoint_of_tiles_is_one_of_whole_weights(tmp_path: Path, saved: Any, loaded: Any) -> None:
    torch.manual_seed(0)
    engine, *_ = infinity.initialize(model=Wide(), config=config(tmp_path / "nvme", **saved))
    with engine:
        trained(engine, range(2))
        engine.save_checkpoint(str(tmp_path / "saved"))
        expected = trained(engine, range(2, 5))
    engine, *_ = infinity.initialize(model=Wide(), config=config(tmp_path / "nvme", **loaded))
    with engine:
        engine.load_checkpoint(str(tmp_path / "saved"))
        found = trained(engine, range(2, 5))
    assert found == expected or (saved != loaded and found == pytest.approx(expected, rel=1e-6))


class Projection(torch.autograd.Function):
    """A product that saves the parameter itself and reads it again in backward, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        with infinity.read(weight):
            return grad @ weight, grad.t() @ x


class ReadsItsHead(nn.Module):
    """Computes with its head's weight by itself, in one of several ways."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 32)
        self.head = nn.Linear(32, 512, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids: Tensor, way: str) -> Tensor:
        hidden, weight = self.words(ids).flatten(0, 1), self.head.weight
        with infinity.read(weight):
            loss = weight.square().mean() if way == "squares" else hidden.new_zeros(())
            logits = Projection.apply(hidden, weight) if way == "a function" else hidden @ weight.t()
        if way == "and as a layer":
            logits = logits + self.head(hidden)
        return loss + F.cross_entropy(logits, ids.flatten())


WAYS = ("a product", "squares", "a function", "and as a layer")


def read_heads(rank: int, world: int, folder: str, tile_parameters: int | str) -> list[list[float]]:
    """Values of the head after training in each way, of a tied and of another model."""
    join(world)
    found = []
    for tied, way in itertools.product((False, True), WAYS):
        torch.manual_seed(0)
        chosen = settings(
            folder, param="nvme", optimizer="nvme", accumulation=2,
            zero={"stage3_max_live_parameters": LIVE, "tile_parameters": tile_parameters},
        )  # fmt: skip
        engine, *_ = infinity.initialize(model=ReadsItsHead(tied=tied), config=chosen)
        with engine:
            for step in range(4):
                ids = torch.randint(512, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
                engine.backward(engine(ids, way))
                engine.step()
            assert any(layout.is_tile for layout in engine.plan.layouts) == (tile_parameters != 0)
            found.append(infinity.state(engine.module.head.weight).master[::37, ::5].flatten().tolist())
    return found


@pytest.mark.parametrize("world", kept([1, 2], [1]))
def test_a_weight_that_a_program_reads_whole_in_training_is_trained(
    rank_pools: Any, tmp_path: Path, world: int
) -> None:
    whole = rank_pools[world].run(read_heads, str(tmp_path), 0)[0]
    in_tiles = rank_pools[world].run(read_heads, str(tmp_path), "auto")[0]
    for name, mine, other in zip(itertools.product(("", "tied"), WAYS), in_tiles, whole, strict=True):
        assert mine == pytest.approx(other, rel=1e-4, abs=1e-5), name
