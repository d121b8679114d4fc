"""What accelerate, transformers, lightning and TRL read from DeepSpeed's engine, optimizer, parameters is here."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from infinity.deepspeed.runtime.zero import partition_parameters
from torch import Tensor, nn

import infinity
from infinity.config import DEEPSPEED, STRICT
from infinity.deepspeed import utils
from infinity.engine import Engine
from infinity.engine.optimizer import TieredOptimizer
from infinity.errors import ConfigError, StateError
from infinity.zero import get_z3_leaf_modules, set_z3_leaf_modules, unset_z3_leaf_modules, z3_leaf_module
from infinity.zero.parameter import ZeroParamStatus
from tests.support.models import token_batch
from tests.support.oracle import ADAM, Case, join, settings

# By the program that reads them.
ENGINE = {
    "accelerate": (
        "set_gradient_accumulation_boundary", "backward", "step", "get_global_grad_norm", "compile", "module",
        "zero_gather_16bit_weights_on_model_save", "_zero3_consolidated_16bit_state_dict", "save_checkpoint",
        "load_checkpoint", "train", "eval", "state_dict", "parameters", "destroy",
    ),
    "transformers": ("config", "save_checkpoint", "load_checkpoint", "get_global_grad_norm", "zero_grad"),
    "lightning": ("lr_scheduler", "optimizer", "save_checkpoint", "load_checkpoint", "backward", "step", "module"),
    "trl": ("optimizer", "module", "eval", "parameters"),
    "scripts": (
        "zero_optimization_stage", "zero_optimization_partition_gradients", "zero_optimization_partition_weights",
        "is_gradient_accumulation_boundary", "gradient_accumulation_steps", "train_batch_size", "no_sync", "get_lr",
        "train_micro_batch_size_per_gpu", "global_steps", "micro_steps", "skipped_steps", "global_samples",
        "save_16bit_model", "was_step_applied", "device", "local_rank", "global_rank", "world_size",
    ),
}  # fmt: skip
OPTIMIZER = (
    "overflow", "optimizer", "param_groups", "train", "eval", "state", "defaults", "zero_grad", "step", "state_dict",
    "load_state_dict", "add_param_group", "parameter_offload",
)  # fmt: skip
PARAMETER = ("ds_id", "ds_numel", "ds_shape", "ds_status", "partition_numel", "ds_active_sub_modules")


def engine_of(folder: Any, model: nn.Module | None = None, *, conventions: Any = DEEPSPEED, **options: Any) -> Engine:
    """An engine on the small model under DeepSpeed's conventions."""
    model = Case().model() if model is None else model
    config = settings(folder, **options)
    return infinity.initialize(model=model, config=config, conventions=conventions)[0]


def test_every_name_that_the_programs_read_is_there(tmp_path):
    with engine_of(tmp_path) as engine:
        missing = [f"{who}: {name}" for who, names in ENGINE.items() for name in names if not hasattr(engine, name)]
        missing += [f"optimizer: {name}" for name in OPTIMIZER if not hasattr(engine.optimizer, name)]
        for param in engine.parameters():
            missing += [f"parameter: {name}" for name in PARAMETER if not hasattr(param, name)]
        missing += ["ds_external_parameters"] if not hasattr(engine.module, "ds_external_parameters") else []
        assert missing == []


# The configuration as a mapping.


def test_the_configuration_is_a_mapping_of_the_files_keys(tmp_path):
    with engine_of(tmp_path, stage=2, optimizer="cpu", accumulation=4) as engine:
        config = engine.config
        assert config["zero_optimization"]["stage"] == config.get("zero_optimization", {}).get("stage") == 2
        assert config["gradient_accumulation_steps"] == 4 and config["train_batch_size"] == 8
        assert "optimizer" in config and "scheduler" not in config and "no such key" not in config
        assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
        with pytest.raises(KeyError):
            config["scheduler"]
        # What a program writes into what it has read changes no other reader's.
        config["zero_optimization"]["stage"] = 0
        assert engine.config["zero_optimization"]["stage"] == engine.config.stage == 2


# The optimizer.


def test_a_skipped_step_is_an_overflow_of_the_optimizer(tmp_path):
    with engine_of(tmp_path, check_grad_overflow=True) as engine:
        seen = []
        for factor in (1.0, float("inf"), 1.0):
            engine.backward(engine(**token_batch(0, 0, positions=8)) * factor)
            engine.step()
            seen.append(engine.optimizer.overflow)
        assert seen == [False, True, False]


def test_the_inner_optimizer_has_the_live_groups(tmp_path):
    model = Case().model()
    given = torch.optim.AdamW(Case().groups(model), **ADAM)
    engine, optimizer, *_ = infinity.initialize(model=model, config=settings(tmp_path), optimizer=given)
    with engine:
        assert optimizer.optimizer is given
        optimizer.param_groups[0]["lr"] = 0.5
        assert optimizer.optimizer.param_groups[0]["lr"] == engine.get_lr()[0] == 0.5
    with engine_of(tmp_path) as engine:
        inner = engine.optimizer.optimizer
        inner.param_groups[0]["lr"] = 0.25
        assert engine.get_lr() == [0.25] and not hasattr(inner, "optimizer")


def test_an_optimizer_with_two_sets_of_weights_is_refused(tmp_path):
    class TwoModes(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    with pytest.raises(ConfigError, match=r"TwoModes has a mode for training"):
        infinity.initialize(
            model=Case().model(), config=settings(tmp_path), optimizer=lambda groups: TwoModes(groups, lr=0.1)
        )


def test_step_counts_that_are_set_correct_the_bias_of_the_next_step(tmp_path):
    """As torch's AdamW does with the same count in its state."""
    model = Case().model()
    twin = copy.deepcopy(model)
    config = settings(tmp_path, param="nvme", optimizer="nvme", bf16={"enabled": False}, check_grad_overflow=False)
    engine, optimizer, *_ = infinity.initialize(model=model, config=config, model_parameters=Case().groups(model))
    other = torch.optim.AdamW(Case().groups(twin), **ADAM, fused=True)
    with engine:
        assert isinstance(optimizer, TieredOptimizer) and set(optimizer.step_counts.values()) == {0}
        for step in range(3):
            if step == 1:
                optimizer.set_step_counts(41)
                for state in other.state.values():
                    state["step"].fill_(41)
            if step == 2:
                optimizer.set_step_counts({"positions": 7})
                other.state[twin.positions]["step"].fill_(7)
            engine.backward(engine(**token_batch(0, step, positions=8)))
            engine.step()
            twin(**token_batch(0, step, positions=8)).backward()
            other.step()
            other.zero_grad()
        assert optimizer.step_counts["positions"] == 8 and optimizer.step_counts["norm.weight"] == 43
        for name, param in twin.named_parameters():
            assert torch.allclose(infinity.state(dict(model.named_parameters())[name]).master, param, atol=1e-6), name
        for wrong in (-1, {"no such": 1}, {"positions": 1.5}, {"positions": True}):
            with pytest.raises(ConfigError, match="set_step_counts"):
                optimizer.set_step_counts(wrong)
        assert optimizer.step_counts["positions"] == 8


# Full weights on rank 0.


def consolidated(rank: int, world: int, folder: str) -> list[Any]:
    join(world)
    found = []
    for stage, frozen in ((3, False), (3, True), (2, False)):
        with engine_of(folder, stage=stage, param="nvme" if stage == 3 else "gpu") as engine:
            try:
                tensors = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=frozen)
            except ConfigError as error:
                found.append(str(error))
                continue
            found.append(None if tensors is None else {name: tensor.numpy() for name, tensor in tensors.items()})
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_rank_0_gets_the_whole_weights(rank_pools, tmp_path, world):
    first, *others = rank_pools[world].run(consolidated, str(tmp_path))
    expected = Case().model().state_dict()
    full, trained, refused = first
    assert full.keys() == expected.keys()
    assert all(torch.equal(torch.from_numpy(value), expected[name]) for name, value in full.items())
    assert full.keys() - trained.keys() == {"fixed.weight", "fixed.bias"}
    assert "stage 2" in refused
    assert all(other[:2] == [None, None] and other[2] == refused for other in others)


# Parameters' attributes.


def test_parameters_have_the_attributes_at_stage_3_and_under_its_conventions_only(tmp_path):
    for stage, conventions in ((3, STRICT), (2, DEEPSPEED), (0, DEEPSPEED)):
        with engine_of(tmp_path, stage=stage, conventions=conventions) as engine:
            assert not any(hasattr(param, name) for param in engine.parameters() for name in PARAMETER)
            assert not hasattr(engine.module, "ds_external_parameters")


def test_a_program_compares_the_status_with_the_name_that_it_imports():
    assert partition_parameters.ZeroParamStatus is ZeroParamStatus
    assert utils.set_z3_leaf_modules is set_z3_leaf_modules


def status(rank: int, world: int, folder: str) -> list[str]:
    """What is wrong with the parameters' attributes."""
    join(world)
    wrong = []
    with engine_of(folder, param="cpu") as engine:
        shapes = {name: param.shape for name, param in Case().model().named_parameters()}
        for name, param in engine.module.named_parameters():
            whole = param.numel() == 0
            if not whole and param.ds_status is not ZeroParamStatus.NOT_AVAILABLE:
                wrong.append(f"{name} is {param.ds_status} at rest")
            with infinity.GatheredParameters([param]):
                if param.ds_status != ZeroParamStatus.AVAILABLE or type(param) is not nn.Parameter:
                    wrong.append(f"{name} is {param.ds_status} while it is gathered")
            if (param.ds_shape, param.ds_numel) != (shapes[name], shapes[name].numel()):
                wrong.append(f"{name}: {param.ds_shape}, {param.ds_numel}")
            if not 0 <= param.partition_numel() * world - param.ds_numel < world:
                wrong.append(f"{name}: {param.partition_numel()} of {param.ds_numel}")
        ids = [param.ds_id for param in engine.parameters()]
        if len(ids) != len(set(ids)):
            wrong.append("ids that occur twice")
    return wrong


class ProductWith(torch.autograd.Function):
    """A product whose caller, and whose backward, gather the weight where its status says that they must."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight[:].t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        hidden, weight = ctx.saved_tensors
        with gathered_if_away(weight):
            return grad @ weight[:], grad.flatten(0, -2).t() @ hidden.flatten(0, -2)


def gathered_if_away(weight: Tensor) -> Any:
    """Gather as TRL does for the weight of its fused loss."""
    away = weight.ds_status is not ZeroParamStatus.AVAILABLE
    return infinity.GatheredParameters([weight]) if away else nullcontext()


class Fused(nn.Module):
    """Two layers, of which the last is never called: its weight is used by a function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = self.body(rows)
        with gathered_if_away(self.head.weight):
            return ProductWith.apply(hidden, self.head.weight).square().mean()


def fused(rank: int, world: int, folder: str) -> list[list[float]]:
    """Losses of three steps: an engine's, and torch's."""
    join(world)
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    # So few that the head is gathered for itself.
    config = settings(folder, param="cpu", optimizer="cpu", zero={"stage3_max_live_parameters": 200})
    model, plain = Fused(), Fused()
    plain.head.weight.ds_status = ZeroParamStatus.AVAILABLE
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAM)
    engine = infinity.initialize(model=model, config=config, conventions=DEEPSPEED)[0]
    losses: list[list[float]] = [[], []]
    with engine:
        for _ in range(3):
            losses[0].append(float(engine.backward(engine(rows))))
            engine.step()
            loss = plain(rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[1].append(loss.item())
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_a_function_that_asks_for_the_status_of_a_weight_trains_it(rank_pools, tmp_path, world):
    for losses, expected in rank_pools[world].run(fused, str(tmp_path)):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert losses[2] < losses[0]


@pytest.mark.parametrize("world", [1, 2])
def test_the_status_of_a_parameter_follows_its_gathers(rank_pools, tmp_path, world):
    assert rank_pools[world].run(status, str(tmp_path)) == [[]] * world


def test_parameters_that_are_made_under_init_have_the_attributes_before_there_is_an_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("infinity.zero.deferred_init.WINDOW_NBYTES", 1024)
    config = settings(tmp_path, param="nvme", optimizer="nvme")
    with infinity.Init(config=config, conventions=DEEPSPEED):
        model = Case().model()
        with torch.no_grad():
            model.positions.add_(0)
        assert model.positions.ds_status is ZeroParamStatus.AVAILABLE
    ids = {name: param.ds_id for name, param in model.named_parameters()}
    assert model.embedding.weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    engine = infinity.initialize(model=model, config=config, conventions=DEEPSPEED)[0]
    with engine:
        assert {name: param.ds_id for name, param in model.named_parameters()} == ids
    with infinity.Init(config=config):
        plain = Case().model()
    assert not any(hasattr(param, "ds_id") for param in plain.parameters())
    infinity.initialize(model=plain, config=config)[0].close()


def test_weights_that_an_engine_leaves_whole_are_ordinary_parameters(tmp_path):
    """One rank keeps stage 3 whole on the device: what `close()` leaves can be copied, pickled and trained anew."""
    model = Case().model()
    with engine_of(tmp_path, model, zero={"stage3_param_persistence_threshold": 10**9}) as engine:
        assert all(param.ds_status is ZeroParamStatus.AVAILABLE for param in engine.parameters())
    assert not any(hasattr(param, name) for param in model.parameters() for name in PARAMETER)
    pickle.loads(pickle.dumps(model))
    with engine_of(tmp_path, copy.deepcopy(model)) as engine:
        engine.backward(engine(**token_batch(0, 0, positions=8)))
        engine.step()


# Leaf modules.


class Pair(nn.Module):
    """Two layers, of which a batch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x)


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.ModuleList(Pair() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for pair in self.pairs:
            x = pair(x)
        return x.sum()


def units_of(model: nn.Module, folder: Any) -> list[set[str]]:
    """The parameters of each unit, with a bound that cuts every layer apart."""
    zero = {"stage3_max_live_parameters": 100, "sub_group_size": 100, "stage3_prefetch_bucket_size": 0}
    with engine_of(folder, model, param="cpu", zero=zero) as engine:
        engine.backward(engine(torch.ones(2, 8)))
        engine.step()
        return [{slot.name for slot in unit.layout.slots} for unit in engine.units]


@pytest.mark.parametrize("kinds", [Pair, [Pair], ["Pair"], f"{Pair.__module__}.Pair"], ids=str)
def test_a_leaf_module_is_one_unit(tmp_path, kinds):
    model = Pairs()
    assert set_z3_leaf_modules(model, kinds) == get_z3_leaf_modules(model) == [*model.pairs]
    assert z3_leaf_module(model.pairs[0]) and not z3_leaf_module(model)
    assert utils.set_z3_leaf_modules_by_suffix(model, [".1", "?"], False) == ([model.pairs[1]], ["?"])
    first = {f"pairs.0.{layer}.{kind}" for layer in ("one", "other") for kind in ("weight", "bias")}
    assert any(first <= names for names in units_of(model, tmp_path))


def test_modules_that_are_no_leaves_any_more_are_cut_as_before(tmp_path):
    model, plain = Pairs(), Pairs()
    set_z3_leaf_modules(model, [Pair])
    assert unset_z3_leaf_modules(model, [Pair]) == [*model.pairs] and get_z3_leaf_modules(model) == []
    assert units_of(model, tmp_path) == units_of(plain, tmp_path)


def test_leaf_modules_that_cannot_be_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no module of Embedding, Nothing; its classes are Linear, ModuleList, Pair"):
        set_z3_leaf_modules(Pairs(), [nn.Embedding, "Nothing"])
    with engine_of(tmp_path, Pairs()) as engine, pytest.raises(StateError, match="before infinity"):
        set_z3_leaf_modules(engine.module, [Pair])
