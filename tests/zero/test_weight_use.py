"""Weights that a program uses, keeps or changes in ways of its own: right on every tier, or refused, never lost."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError, StateError

TIERS = [(0, "none"), (1, "cpu"), (2, "nvme"), (3, "none"), (3, "cpu"), (3, "nvme")]
VOCABULARY, WIDTH = 64, 64
HYPER = {"lr": 0.05, "momentum": 0.9}


class Model(nn.Module):
    """An embedding and linear layers; `use` is what forward does beside them."""

    def __init__(self, use: Callable[[Model, Tensor], Tensor] | None = None, **embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(VOCABULARY, WIDTH, **embedding)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))
        self.use = use

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        if self.use is not None:
            x = self.use(self, x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def batch(step: int, rank: int = 0) -> Tensor:
    return torch.randint(VOCABULARY, (8,), generator=torch.Generator().manual_seed(100 * step + rank))


def make(model: nn.Module, stage: int, tier: str, folder: Path, *, dtype: str = "fp32", live: int = 10**9) -> Any:
    home = {"device": tier, "nvme_path": str(folder)}
    zero: dict[str, Any] = {
        "stage": stage, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": live, "stage3_prefetch_bucket_size": 4096,
    }  # fmt: skip
    if stage:
        zero["offload_optimizer"] = home
    if stage == 3:
        zero["offload_param"] = home
    config = {
        "train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "SGD", "params": HYPER}, "gradient_clipping": 0,
        "zero_optimization": zero, "bf16": {"enabled": dtype == "bf16"}, "log_level": "error",
    }  # fmt: skip
    return infinity.initialize(model=model, config=config)[0]


def plain(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], steps: int, world: int = 1) -> nn.Module:
    """The same in plain torch, on the batches of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), **HYPER)
    for step in range(steps):
        for rank in range(world):
            (loss_of(model, batch(step, rank)) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_equal(found: dict[str, Tensor], model: nn.Module, *, within: float = 1e-6) -> None:
    for name, param in model.named_parameters():
        error = float((found[name] - param.detach()).abs().max())
        assert error <= within, f"{name}: {error}"


# What autograd has saved inside `read`.


def penalty(model: Any, ids: Tensor, hidden: Tensor) -> Tensor:
    """A loss of the program's own, whose gradients need two weights, one of them again and again."""
    logits = F.linear(torch.tanh(hidden), model.words.weight)
    return F.cross_entropy(logits, ids) + model.layers[1].weight.square().sum() + model.words.weight.tanh().mean()


def of_all(engine: Any, ids: Tensor) -> Tensor:
    hidden = engine(ids)
    with infinity.read(engine.module):
        return penalty(engine.module, ids, hidden)


def in_two_blocks(engine: Any, ids: Tensor) -> Tensor:
    hidden, model = engine(ids), engine.module
    with infinity.read(model.words.weight), infinity.read([model.layers[1].weight]):
        return penalty(model, ids, hidden)


def around_forward(engine: Any, ids: Tensor) -> Tensor:
    with infinity.GatheredParameters(engine.module.parameters()):
        return penalty(engine.module, ids, engine(ids))


def looked_at_before(engine: Any, ids: Tensor) -> Tensor:
    """A loss that nobody differentiates does not hold up the gradients of the next."""
    of_all(engine, ids).item()
    return of_all(engine, ids)


READS = [of_all, in_two_blocks, around_forward, looked_at_before]


def train_reading(rank: int, world: int, stage: int, tier: str, folder: str, which: int) -> dict[str, Tensor]:
    engine = make(Model(), stage, tier, Path(folder))
    with engine:
        for step in range(3):
            engine.backward(READS[which](engine, batch(step, rank)))
            engine.step()
            gc.collect()
        engine.store.check()
        return engine.state_dict()


@pytest.mark.parametrize("which", range(len(READS)), ids=[read.__name__ for read in READS])
@pytest.mark.parametrize(("stage", "tier", "world"), [*((*case, 1) for case in TIERS), (3, "nvme", 2)])
def test_a_loss_built_inside_read_has_its_gradients_after_it(
    stage: int, tier: str, world: int, which: int, tmp_path: Path, rank_pools: Any
) -> None:
    found = rank_pools[world].run(train_reading, stage, tier, str(tmp_path), which)[0]
    assert_equal(found, plain(Model(), lambda model, ids: penalty(model, ids, model(ids)), 3, world))


def test_such_a_loss_is_differentiated_twice_and_inside_the_block(tmp_path: Path) -> None:
    model = plain(Model(), lambda model, ids: 2 * penalty(model, ids, model(ids)), 2)
    with make(Model(), 3, "nvme", tmp_path) as engine:
        loss = of_all(engine, batch(0))
        engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        with infinity.read(engine.module):
            loss = penalty(engine.module, batch(1), engine(batch(1)))
            engine.backward(loss, retain_graph=True)
        engine.backward(loss)
        engine.step()
        assert_equal(engine.state_dict(), model)


@pytest.mark.parametrize(("stage", "tier"), [(2, "cpu"), (3, "nvme")])
def test_a_backward_whose_weights_a_step_has_changed_is_refused(stage: int, tier: str, tmp_path: Path) -> None:
    """As plain torch refuses it: the saved weights are those of another time."""
    with make(Model(), stage, tier, tmp_path) as engine:
        losses = [engine(batch(0)).sum(), of_all(engine, batch(0))]
        engine.backward(engine(batch(1)).sum())
        engine.step()
        for loss in losses:
            with pytest.raises(StateError, match=r"have changed \(by engine\.step\(\) or .*run that forward again"):
                engine.backward(loss)
        engine.zero_grad()
        engine.backward(engine(batch(1)).sum())
        engine.step()


# A weight used by another module than its own.


def borrow(model: Model, x: Tensor) -> Tensor:
    """With its own module just over, when the schedule may keep it gathered."""
    return torch.tanh(F.linear(x, model.words.weight))


@pytest.mark.parametrize("live", [4096, 8192, 10**9])
def test_a_weight_that_is_still_gathered_is_in_the_backward_of_whoever_borrows_it(live: int, tmp_path: Path) -> None:
    model = plain(Model(borrow), lambda model, ids: (model(ids) * 10).square().mean(), 4)
    with make(Model(borrow), 3, "nvme", tmp_path, live=live) as engine:
        for step in range(4):
            engine.backward((engine(batch(step)) * 10).square().mean())
            engine.step()
        assert_equal(engine.state_dict(), model)


# Weights that are changed in place.


def shrink(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layers[3].weight.mul_(0.5)
    return x


@pytest.mark.parametrize(("stage", "tier"), TIERS)
def test_a_weight_changed_inside_forward_is_refused_by_name(stage: int, tier: str, tmp_path: Path) -> None:
    with make(Model(shrink), stage, tier, tmp_path) as engine:
        for grad in (True, False):
            message = r"layers\.3\.weight was changed in place while the model ran.*infinity\.modify"
            with torch.set_grad_enabled(grad), pytest.raises(StateError, match=message):
                engine(batch(0))
        engine.module.use = None
        engine.backward(engine(batch(0)).sum())
        engine.step()
        engine.store.check()


class Doubled(nn.Module):
    """A parametrization that hands out twice the weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def parametrized(model: Model, x: Tensor) -> Tensor:
    """As peft does for each call with `target_parameters`: torch sets the parameter to itself."""
    nn.utils.parametrize.register_parametrization(model.layers[2], "weight", Doubled())
    x = model.layers[2](x)
    nn.utils.parametrize.remove_parametrizations(model.layers[2], "weight", leave_parametrized=False)
    return x


def multiplied_by_one(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.layers[3].weight.mul_(1.0)
    return x


def put_back(model: Model, x: Tensor) -> Tensor:
    weight = model.layers[2].weight
    with torch.no_grad():
        kept = weight.clone()
        weight.mul_(2.0)
        change = model.layers[2](x)
        weight.copy_(kept)
    return x + change


def replaced(model: Model, x: Tensor) -> Tensor:
    weight = model.layers[2].weight * 2
    return torch.func.functional_call(model.layers[2], {"weight": weight}, (x,))


PUT_BACK = [parametrized, multiplied_by_one, put_back, replaced]


@pytest.mark.parametrize("begins", [0, 1], ids=["from the first step", "from the second step"])
@pytest.mark.parametrize(("stage", "tier"), TIERS)
def test_a_weight_that_has_its_values_again_trains_and_one_that_lost_them_is_refused(
    stage: int, tier: str, begins: int, tmp_path: Path
) -> None:
    def use(model: Model, x: Tensor) -> Tensor:
        return PUT_BACK[seen[0] - begins](model, x) if seen[0] >= begins else x

    seen = [0]

    def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
        loss = (model(ids) * 10).square().mean()
        seen[0] += 1
        return loss

    expected = plain(Model(use), loss_of, begins + len(PUT_BACK))
    seen[0] = 0
    with make(Model(use), stage, tier, tmp_path) as engine:
        for step in range(begins + len(PUT_BACK)):
            engine.backward(loss_of(engine, batch(step)))
            engine.step()
        assert_equal(engine.state_dict(), expected)
        engine.module.use = shrink
        with pytest.raises(StateError, match=r"layers\.3\.weight was changed in place while the model ran"):
            engine(batch(0))


def test_a_16_bit_weight_that_is_its_own_partition_is_refused_once_where_nothing_tells(tmp_path: Path) -> None:
    """Its master has further digits, and no fingerprint was taken: from then on one is."""
    with make(Model(), 0, "none", tmp_path, dtype="bf16") as engine:
        for use in (multiplied_by_one, shrink):
            engine.module.use = None
            engine(batch(0))
            engine.module.use = use
            message = "call once more" if use is multiplied_by_one else "inside infinity.modify"
            with pytest.raises(StateError, match=message):
                engine(batch(0))
            if use is multiplied_by_one:
                engine(batch(0))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_embedding_that_writes_into_its_weight_is_refused_at_initialize(
    kind: Any, stage: int, tmp_path: Path
) -> None:
    model = nn.Sequential(kind(VOCABULARY, WIDTH, max_norm=1.0), nn.Linear(WIDTH, 2))
    message = r"^0 has max_norm=1.*Set max_norm to None.*infinity\.modify"
    with pytest.raises(ConfigError, match=message):
        make(model, stage, "nvme" if stage else "none", tmp_path)


@pytest.mark.parametrize(("dtype", "tier"), [("fp32", "none"), ("fp32", "cpu"), ("bf16", "none")])
def test_a_whole_weight_changed_between_steps_counts_or_is_refused_before_the_step(
    dtype: str, tier: str, tmp_path: Path
) -> None:
    with make(Model(), 2, tier, tmp_path, dtype=dtype) as engine:
        engine.backward(engine(batch(0)).float().sum())
        before = engine.state_dict()
        with torch.no_grad():
            engine.module.layers[3].weight.mul_(0.5)
        if (dtype, tier) != ("fp32", "none"):
            # The step would begin from what lies elsewhere: all of it, or the low half of a master.
            message = r"layers\.3\.weight was changed in place, which its partition does not follow.*infinity\.modify"
            with pytest.raises(StateError, match=message):
                engine.step()
            with infinity.modify(engine.module.layers[3].weight):
                engine.module.layers[3].weight.copy_(before["layers.3.weight"] * 0.5)
        engine.step()
        model = Model().to(torch.bfloat16 if dtype == "bf16" else torch.float32)
        model(batch(0)).float().sum().backward()
        with torch.no_grad():
            model.layers[3].weight.mul_(0.5)
            for param in model.parameters():
                param.sub_(HYPER["lr"] * param.grad)
        assert_equal(engine.state_dict(), model, within=1e-6 if dtype == "fp32" else 2**-6)


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (2, "cpu")])
def test_data_that_is_assigned_between_steps_is_refused_before_the_step(
    stage: int, tier: str, tmp_path: Path
) -> None:
    with make(Model(), stage, tier, tmp_path) as engine:
        engine.backward(engine(batch(0)).sum())
        weight = engine.module.layers[3].weight
        before = weight.detach().clone()
        weight.data = torch.zeros_like(weight)
        with pytest.raises(StateError, match=r"layers\.3\.weight\.data was assigned.*infinity\.modify"):
            engine.step()
        assert torch.equal(weight.detach(), before)
        engine.step()


WRITERS: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda weight: weight.fill_(7.0),
    "through data": lambda weight: weight.data.fill_(7.0),
    "through data, a row": lambda weight: weight.data[3].mul_(-1.0),
}


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("stage", "tier", "dtype"), [*((*case, "fp32") for case in TIERS), (2, "cpu", "bf16")])
def test_what_is_written_inside_read_is_refused_and_undone_unless_the_error_says_that_it_stays(
    stage: int, tier: str, dtype: str, writer: str, tmp_path: Path
) -> None:
    with make(Model(), stage, tier, tmp_path, dtype=dtype) as engine:
        weight = engine.module.layers[3].weight
        before = engine.state_dict()["layers.3.weight"]
        block = infinity.read(weight)
        with pytest.raises(StateError, match=r"layers\.3\.weight was changed inside") as raised, block, torch.no_grad():
            WRITERS[writer](weight)
        undone, said = torch.equal(engine.state_dict()["layers.3.weight"], before), str(raised.value)
        assert ("the change is undone" in said, "keeps what was written" in said) == (undone, not undone)
        # It is kept where the weight itself is the partition.
        assert undone or tier == "none"
        with infinity.read(engine.module):
            assert undone == torch.equal(weight.detach(), before)
            engine.backward(engine(batch(0)).float().sum())
            engine.step()


@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (3, "nvme")])
def test_adapters_that_are_merged_and_taken_out_again_in_gathered_parameters_are_no_error(
    stage: int, tier: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As peft and TRL write: through `data`, and not to the last bit what it was."""
    with make(Model(), stage, tier, tmp_path) as engine, caplog.at_level("WARNING", "infinity"):
        weight = engine.module.layers[3].weight
        before = engine.state_dict()["layers.3.weight"]
        for change in (torch.full_like(before, 0.3), -torch.full_like(before, 0.3 + 1e-5)):
            with infinity.GatheredParameters(engine.module.parameters()):
                assert torch.allclose(weight.detach(), before, atol=1.0)
                weight.data += change
        kept = not torch.equal(engine.state_dict()["layers.3.weight"], before)
        assert kept == (tier == "none")
        (said,) = [each.getMessage() for each in caplog.records if "changed-inside-gathered" in each.getMessage()]
        assert ("keeps what was written" if kept else "the change is undone") in said
        engine.backward(engine(batch(0)).sum())
        engine.step()


# Gradients that are sparse.


def train_sparse(rank: int, world: int, stage: int, tier: str, folder: str, sparse: bool) -> dict[str, Tensor]:
    engine = make(Model(sparse=sparse), stage, tier, Path(folder))
    with engine:
        for step in range(3):
            for _ in range(2):
                engine.backward((engine(batch(step, rank) % 5) * 10).square().mean())
            engine.step()
        return engine.state_dict()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "tier"), [(0, "none"), (2, "cpu"), (3, "nvme")])
def test_a_sparse_gradient_counts_as_the_dense_one(
    stage: int, tier: str, world: int, tmp_path: Path, rank_pools: Any
) -> None:
    sparse, dense = (
        rank_pools[world].run(train_sparse, stage, tier, str(tmp_path), sparse)[0] for sparse in (True, False)
    )
    for name, value in dense.items():
        assert float((sparse[name] - value).abs().max()) <= 1e-6
