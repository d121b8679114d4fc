"""Every optimizer gives on NVMe what it gives in memory, which is what torch gives; what cannot be cut is refused."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import infinity
from infinity.errors import ConfigError
from infinity.optim import torch_rule
from infinity.optim.torch_rule import TorchRule
from infinity.optim.update_rules import LionOptimizer, native_rule_of
from infinity.plan.types import Kind
from tests.support.cells import kept, turns
from tests.support.models import token_batch
from tests.support.oracle import SmallModel, join, settings

STEPS = 6


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper writes it."""

    def __init__(self, params: Iterable[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                m = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * m + (1 - beta1) * param.grad).sign()
                m.mul_(beta2).add_(param.grad, alpha=1 - beta2)
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])


class Swinging(torch.optim.Optimizer):
    """A user's own: two states of names that nobody knows, one replaced at each step, and a single value beside."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state.update(swing=torch.zeros_like(param), largest=torch.ones_like(param), product=1.0)
                state["product"] *= 0.9
                state["swing"] = 0.8 * state["swing"] + param.grad
                state["largest"].copy_(torch.maximum(state["largest"] * 0.9, param.grad.abs()))
                param.sub_(state["swing"] / state["largest"], alpha=group["lr"] * (1 - state["product"]))


class CountsInItself(torch.optim.Optimizer):
    """Keeps its step count beside its states, where clones for partitions lose it."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.count = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        self.count += 1
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.1 / self.count)


class SmallFirst(Swinging):
    """Keeps large tensors in another dtype, as optimizers in 8 bits do."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            if param.numel() >= 4096:
                self.state[param]["swing"] = self.state[param]["swing"].to(torch.bfloat16)


Make = Callable[[Any], torch.optim.Optimizer]
# What torch is given, and what the engine is: a section of the configuration, or the same callable.
CASES: dict[str, tuple[Make, dict[str, Any] | None]] = {
    "Lion": (
        lambda groups: PlainLion(groups, lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1),
        {"type": "lion", "params": {"lr": 1e-3, "betas": [0.9, 0.98], "weight_decay": 0.1}},
    ),
    "Adagrad": (
        lambda groups: torch.optim.Adagrad(groups, lr=1e-2, lr_decay=0.01, initial_accumulator_value=0.1),
        {"type": "Adagrad", "params": {"lr": 1e-2, "lr_decay": 0.01, "initial_accumulator_value": 0.1}},
    ),
    "SGD": (
        lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9, weight_decay=0.01, nesterov=True),
        {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}},
    ),
    "SGD without momentum": (
        lambda groups: torch.optim.SGD(groups, lr=1e-2), {"type": "SGD", "params": {"lr": 1e-2}},
    ),
    "RMSprop": (
        lambda groups: torch.optim.RMSprop(groups, lr=1e-3, eps=1e-4, momentum=0.5, centered=True),
        {"type": "RMSprop", "params": {"lr": 1e-3, "eps": 1e-4, "momentum": 0.5, "centered": True}},
    ),
    "Adamax": (
        lambda groups: torch.optim.Adamax(groups, lr=1e-3, eps=1e-4),
        {"type": "Adamax", "params": {"lr": 1e-3, "eps": 1e-4}},
    ),
    "NAdam": (
        lambda groups: torch.optim.NAdam(groups, lr=1e-3, eps=1e-4),
        {"type": "NAdam", "params": {"lr": 1e-3, "eps": 1e-4}},
    ),
    "AMSGrad": (lambda groups: torch.optim.AdamW(groups, lr=1e-3, eps=1e-4, amsgrad=True), None),
    "one's own": (Swinging, None),
}  # fmt: skip


# A native rule, one that torch steps, a program's own.
FEW = ["Lion", "RMSprop", "one's own"]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [param for param in model.parameters() if param.requires_grad]
    vectors = [param for param in trained if param.ndim <= 1]
    return [{"params": [param for param in trained if param.ndim > 1]}, {"params": vectors, "lr": 5e-4}]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return SmallModel()


def plain(make: Make, ranks: int) -> dict[str, Tensor]:
    """Weights after STEPS steps of torch's optimizer in one process, over the data of all ranks."""
    model = model_of()
    optimizer = make(groups_of(model))
    for micro in range(STEPS):
        for rank in range(ranks):
            (model(**token_batch(rank, micro, positions=8)) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def tiered(name: str, config: dict[str, Any], rank: int, seen: list[Any] | None = None) -> dict[str, Tensor]:
    """The same by an engine on its tiers."""
    make, section = CASES[name]
    config = copy.deepcopy(config)
    if section is None:
        del config["optimizer"]
    else:
        config["optimizer"] = section
    model = model_of()
    engine, *_ = infinity.initialize(
        model, config, model_parameters=groups_of(model) if section else None,
        optimizer=None if section else lambda _: make(groups_of(model)),
    )  # fmt: skip
    with engine:
        for micro in range(STEPS):
            engine.backward(engine(**token_batch(rank, micro, positions=8)))
            engine.step()
        engine.synchronize()
        if seen is not None:
            seen.append(engine.plan.bytes_by_tier())
        return {name: infinity.state(param).master for name, param in model.named_parameters()}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max(float((left[name] - right[name]).abs().max()) for name in left if left[name].numel())


def ranks_on_nvme(rank: int, world: int, folder: str, names: list[str]) -> list[float]:
    """How far each optimizer on two ranks and NVMe is from torch."""
    join(world)
    config = settings(folder, param="nvme", optimizer="nvme", zero={"sub_group_size": 1000})
    return [distance(tiered(name, config, rank), plain(CASES[name][0], world)) for name in names]


@pytest.mark.parametrize("name", CASES)
def test_on_nvme_in_small_sub_groups_it_is_torch_in_memory(name: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    config = settings(tmp_path, param="nvme", optimizer="nvme", zero={"sub_group_size": 1000})
    assert distance(tiered(name, config, 0, seen), plain(CASES[name][0], 1)) <= 1e-6
    moments = {"Lion": 1, "Adagrad": 1, "SGD": 1, "SGD without momentum": 0, "RMSprop": 3, "AMSGrad": 3}.get(name, 2)
    (tables,) = seen
    kinds = {kind: nbytes for table in tables.values() for kind, nbytes in table.items()}
    whole = [kind for kind in kinds if kind not in (Kind.PARAM, Kind.GRAD, Kind.FULL, Kind.FULL_GRAD, Kind.POOL)]
    assert len(whole) == moments, whole


@pytest.mark.parametrize("names", kept([[*CASES], FEW], [FEW]), ids=len)
def test_two_ranks_on_nvme_are_torch_over_all_their_data(rank_pools: Any, names: list[str], tmp_path: Path) -> None:
    found = rank_pools[2].run(ranks_on_nvme, str(tmp_path), names, timeout=100)
    assert max(max(row) for row in found) <= 1e-6, dict(zip(names, zip(*found, strict=True), strict=True))


@pytest.mark.parametrize(*turns(name=["Lion", "Adagrad", "SGD", "NAdam", "one's own"], dtype=["bf16", "fp16"]))
def test_sixteen_bits_give_the_same_bits_on_every_tier(name: str, dtype: str, tmp_path: Path) -> None:
    first: dict[str, Tensor] = {}
    for param, optimizer in (("gpu", "gpu"), ("cpu", "cpu"), ("nvme", "nvme")):
        config = settings(tmp_path, param=param, optimizer=optimizer, dtype=dtype, zero={"sub_group_size": 1000})
        found = tiered(name, config, 0)
        first = first or found
        assert all(torch.equal(found[key], first[key]) for key in first), (param, optimizer)


class Rownormed(torch.optim.Optimizer):
    """Not elementwise: a row is divided by its norm."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(param.grad / param.grad.norm(dim=-1, keepdim=True), alpha=group["lr"])


class Wrapping(torch.optim.Optimizer):
    """Steps by optimizers of its own, which have the model's parameters."""

    def __init__(self, params: Iterable[Any]) -> None:
        params = list(params)
        super().__init__(params, {})
        self.inner = {"all": [torch.optim.Adam(params, lr=0.1)]}

    def step(self, closure: None = None) -> None:
        self.inner["all"][0].step()


class OwnList(torch.optim.SGD):
    """Steps a list of its own, not its groups."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.mine = list(params)
        super().__init__(self.mine, lr=0.1)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for param in self.mine:
            if param.grad is not None:
                param.sub_(param.grad)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (Wrapping, r"Wrapping holds another optimizer \(Adam\), which goes on stepping the parameters that it"),
        (OwnList, "OwnList leaves parameters as they are: 3 steps of a matrix of 8 x 6 in its groups changed nothing"),
        (Rownormed, "Rownormed is not elementwise: stepping a matrix of 8 x 6 whole and cut into three flat stretches"),
        (torch.optim.LBFGS, "LBFGS cannot be run on partitions"),
        (CountsInItself, "CountsInItself keeps something from step to step beside its states"),
        (SmallFirst, r"SmallFirst keeps swing as \(8192,\) torch.bfloat16"),
        (torch.optim.Adafactor, "Adafactor"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_was_seen(make: Any, sentence: str, tmp_path: Path) -> None:
    config = settings(tmp_path)
    del config["optimizer"]
    model = model_of()
    with pytest.raises(ConfigError, match=sentence):
        infinity.initialize(model, config, optimizer=lambda _: make([p for p in model.parameters() if p.requires_grad]))


def test_a_rate_that_the_program_changes_holds_from_the_next_step_on(tmp_path: Path) -> None:
    """The groups of a torch optimizer stay live, and its own scheduler drives them."""
    weights = []
    for tier in ("plain", "nvme"):
        model = model_of()
        made = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-4)
        schedule = torch.optim.lr_scheduler.ExponentialLR(made, 0.5)
        config = settings(tmp_path, param="nvme", optimizer="nvme")
        del config["optimizer"]
        engine = infinity.initialize(model, config, optimizer=made)[0] if tier == "nvme" else None
        for micro in range(4):
            loss = (engine or model)(**token_batch(0, micro, positions=8))
            if engine is None:
                loss.backward()
                made.step()
                made.zero_grad()
            else:
                engine.backward(loss)
                engine.step()
            schedule.step()
        read = (lambda p: p.detach()) if engine is None else (lambda p: infinity.state(p).master)
        weights.append({name: read(param).clone() for name, param in model.named_parameters()})
        if engine is not None:
            engine.close()
    assert distance(*weights) <= 1e-6


def test_torch_steps_one_parameter_at_a_time_unless_it_was_chosen():
    """Its default on some devices is another order of operations, and so other bits."""
    param = nn.Parameter(torch.ones(2))
    for chosen, expected in ((None, False), (True, True), (False, False)):
        template = torch.optim.NAdam([param], foreach=chosen)
        hyper = TorchRule(template).hyper(template.param_groups[0])
        assert torch_rule._clone(template, hyper, [param]).param_groups[0]["foreach"] is expected


class Renamed(torch.optim.AdamW):
    """Changes nothing."""


class StatesOfItsOwn(torch.optim.AdamW):
    """Changes what a step of torch's takes."""

    def _init_group(self, *args: Any, **kwargs: Any) -> Any:
        return super()._init_group(*args, **kwargs)


class Disguised(torch.optim.Adam):
    """Changes the step, which looks like torch's."""

    @functools.wraps(torch.optim.Adam.step)
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class SlowLion(LionOptimizer):
    """Changes the step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    ("kind", "native"),
    [(Renamed, True), (LionOptimizer, True), (StatesOfItsOwn, False), (Disguised, False), (SlowLion, False)],
)
def test_a_subclass_is_stepped_natively_only_if_it_leaves_the_step_alone(kind: Any, native: bool) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2))])
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert (native_rule_of(optimizer) is not None) is native


@pytest.mark.parametrize("wrap", [torch.compiler.disable, lambda function: lambda *args: function(*args)])
def test_functions_of_torchs_classes_may_be_wrapped(wrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As dynamo wraps them in its first compilation, and profilers do."""
    weights = [nn.Parameter(torch.ones(2))]
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        for name in ("_init_group", "step"):
            monkeypatch.setattr(kind, name, wrap(getattr(kind, name)))
    made = [kind(weights) for kind in (torch.optim.AdamW, Renamed, torch.optim.Adam)]
    assert all(map(native_rule_of, [*made, torch.optim.SGD(weights, momentum=0.9)]))
    assert native_rule_of(StatesOfItsOwn(weights)) is None
