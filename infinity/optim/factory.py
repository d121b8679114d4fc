"""Choosing the update rules and their hyper-parameters: from torch optimizers, or from a name in the configuration."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.optim import update_rules
from infinity.optim.muon import MuonRule
from infinity.optim.torch_rule import TorchRule
from infinity.optim.update_rules import CodedRule, NativeRule, Rules, UpdateRule
from infinity.plan.request import OptimizerSpec, RuleSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """An optimizer's update rules, with its defaults.

    names: of each rule, such as "AdamW". groups: the parameter groups, where they are not those that the program has
    named beside its configuration: its own optimizer's, or cut in two for Muon. given: whether the optimizer is its
    own.
    """

    names: tuple[str, ...]
    rules: Rules
    defaults: dict[str, Any]
    groups: list[dict[str, Any]] | None = None
    given: bool = False
    # Of two rules that no group names: the least elements of a parameter that the first steps, and the ids of those
    # that it does not step, however large.
    numel_min: int = 0
    small: frozenset[int] = frozenset()
    # See `OptimizerSpec`.
    split: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    # False of what `no_optimizer` returns.
    trains: bool = True

    @property
    def name(self) -> str:
        """As log lines show it."""
        return self.names[0] if self.numel_min else " and ".join(self.names)

    @property
    def way(self) -> str:
        """How it is stepped, in words."""
        ways = (
            "matrix by matrix" if isinstance(rule, MuonRule)
            else "in one native pass" if isinstance(rule, NativeRule) else "by torch, on fp32 stretches of partitions"
            for rule in self.rules
        )  # fmt: skip
        return " and ".join(dict.fromkeys(ways))

    def spec_of(self, model: nn.Module) -> OptimizerSpec:
        """Return what the plan has to know of it."""
        several = len(self.names) > 1
        specs = tuple(
            RuleSpec(rule.moments, rule.dtype.itemsize if isinstance(rule, MuonRule) else 0, name if several else "")
            for name, rule in zip(self.names, self.rules, strict=True)
        )
        return OptimizerSpec(
            specs, self.rules.guarded, undoable=not self.rules.scalars, trains=self.trains,
            rule_of=tuple(map(self.rules.number, self.groups or ())) if self.rules.by_group else (),
            numel_min=self.numel_min,
            small=frozenset(name for name, param in model.named_parameters() if id(param) in self.small),
            split=self.split,
        )  # fmt: skip


def no_optimizer() -> Chosen:
    """Return what stands for the optimizer of a model that is only run. It has no parameter to step."""
    return Chosen(("no optimizer",), Rules(update_rules.none()), {}, trains=False)


def from_torch(optimizer: torch.optim.Optimizer) -> Chosen:
    """Choose the rule of an instance that has not stepped; ConfigError if it cannot run on partitions."""
    kind = type(optimizer)
    if _is_coded(optimizer):
        return _from_bitsandbytes(optimizer)
    # The rule with the arithmetic of a torch optimizer; None if torch has to step it.
    muon = update_rules.steps_as(optimizer, torch.optim.Muon)
    native = MuonRule() if muon else update_rules.native_rule_of(optimizer)
    if optimizer.state and native is None:
        raise ConfigError(
            f"optimizer {kind.__name__} has states of whole parameters already: pass it to initialize() before its "
            "first step, or, if it makes them when it is constructed, one that makes them in its first step"
        )
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigError(f"optimizer {kind.__name__} has stepped already; pass it to initialize() before that")
    if native is None and all(callable(getattr(kind, mode, None)) for mode in ("train", "eval")):
        raise ConfigError(
            f"optimizer {kind.__name__} has a mode for training and one for evaluation, between which it changes the "
            "weights: those lie on their tiers and would not follow. Use another optimizer"
        )
    chosen = native if native is not None else TorchRule(optimizer)
    # The very dictionaries, not copies: a scheduler of the given optimizer writes to them.
    return Chosen((kind.__name__,), Rules(chosen), dict(optimizer.defaults), optimizer.param_groups, given=True)


def from_several(optimizers: Sequence[torch.optim.Optimizer]) -> Chosen:
    """Choose the rules of torch's Muon and of a second optimizer, in either order. ConfigError for any others."""
    found = sorted(map(from_torch, optimizers), key=lambda each: not isinstance(each.rules[0], MuonRule))
    kinds = [isinstance(each.rules[0], MuonRule) for each in found]
    if kinds != [True, False] or found[1].rules[0].start:
        raise ConfigError(
            f"optimizer=[{', '.join(each.name for each in found)}]: several optimizers are torch.optim.Muon for some "
            "parameters and one other for the rest, such as torch.optim.AdamW"
        )
    for each, muon in zip(found, kinds, strict=True):
        for group in each.groups or ():
            group["use_muon"] = muon
    # In the program's order, which its schedulers may count on.
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    params = [id(param) for group in groups for param in group["params"]]
    if len(params) != len(set(params)):
        raise ConfigError("optimizer=[...]: a parameter is in two of the optimizers: give it to one of them")
    names, rules = tuple(each.name for each in found), Rules(*(each.rules[0] for each in found), by_group=True)
    return Chosen(names, rules, dict(found[0].defaults), groups, given=True)


def from_name(name: str, params: Mapping[str, Any]) -> Chosen:
    """Choose the rule of one of the configuration's types. params: all its hyper-parameters."""
    if name == "Lion":
        return Chosen((name,), Rules(update_rules.lion()), dict(params))
    template = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **params)
    template.state.clear()
    native = update_rules.native_rule_of(template)
    rule: UpdateRule = native if native is not None else TorchRule(template)
    return Chosen((name,), Rules(rule), dict(template.defaults))


def adam_from_params(params: Mapping[str, Any], *, decoupled: bool) -> Chosen:
    """Choose Adam's rule, or AdamW's if `decoupled`, with DeepSpeed's hyper-parameters."""
    defaults = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}
    chosen = update_rules.adam(decoupled=decoupled, bias_correction=params["bias_correction"])
    return Chosen(("AdamW" if decoupled else "Adam",), Rules(chosen), defaults)


def muon_and_adamw(params: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], hidden: Collection[int]) -> Chosen:
    """Choose Muon for hidden matrices and AdamW for everything else. ConfigError for a parameter that is no matrix.

    groups: the program's; a group or a parameter with `use_muon` says which steps it, else `hidden` does (by id). What
    a group names else holds for both of the groups that it becomes.
    """
    decay = {"weight_decay": params["weight_decay"]}
    own_keys = ("momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn", "ns_dtype")
    muon = {"lr": params["muon_lr"] or params["lr"], **decay, **{key: params[key] for key in own_keys}}
    adamw = {
        "lr": params["adam_lr"] or params["lr"], **decay, "betas": params["betas"], "eps": params["adam_eps"]
    }  # fmt: skip
    made: list[dict[str, Any]] = []
    for group in groups:
        parts: tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]] = ([], [])
        for param in group["params"]:
            use_muon = group.get("use_muon", getattr(param, "use_muon", id(param) in hidden))
            if use_muon and param.ndim not in (2, 3):
                raise ConfigError(
                    f"use_muon: a parameter of shape {tuple(param.shape)} is neither a matrix nor a stack of matrices"
                )
            parts[not use_muon].append(param)
        own = {key: value for key, value in group.items() if key not in ("params", "use_muon")}
        for use_muon, members, defaults in ((True, parts[0], muon), (False, parts[1], adamw)):
            if members:
                made.append({**defaults, **own, "params": members, "use_muon": use_muon})
    rules = Rules(MuonRule(params["ns_dtype"]), update_rules.adam(decoupled=True), by_group=True)
    return Chosen(("Muon", "AdamW"), rules, {"lr": params["lr"], **decay}, made, split=params["split"] or {})


def coded_adamw(params: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> Chosen:
    """Choose AdamW with moments in 8 bits, and in fp32 for parameters that are small or that say so: a group or a
    parameter with `optim_bits` 32.
    """
    small = [
        id(param)
        for group in groups
        for param in group["params"]
        if group.get("optim_bits", getattr(param, "optim_bits", params["optim_bits"])) == 32
    ]
    defaults = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}
    return Chosen(
        _CODED_NAMES, _coded_rules(), defaults, numel_min=max(params["min_8bit_size"], 1), small=frozenset(small)
    )  # fmt: skip


# As `infinity.plan.request.optimizer_spec` has them.
_CODED_NAMES = ("AdamW8bit", "AdamW")


def _coded_rules() -> Rules:
    return Rules(CodedRule(coded=True), CodedRule(coded=False))


def _is_coded(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is bitsandbytes' Adam or AdamW with moments in 8 bits, which is not imported here."""
    theirs = type(optimizer).__module__.startswith("bitsandbytes.")
    bits: Any = getattr(getattr(optimizer, "args", None), "optim_bits", None)
    return theirs and getattr(optimizer, "optimizer_name", None) == "adam" and bits == 8


def _from_bitsandbytes(optimizer: Any) -> Chosen:
    """Choose the rules of bitsandbytes' AdamW in 8 bits, with what its `GlobalOptimManager` says of single parameters.
    ConfigError for what has no place here.
    """
    kind, args = type(optimizer).__name__, optimizer.args
    if any(_has_stepped(state) for state in optimizer.state.values()):
        raise ConfigError(f"optimizer {kind} has stepped already; pass it to initialize() before that")
    optimizer.check_overrides()
    small = set[int]()
    for at, group in enumerate(optimizer.param_groups):
        for index, param in enumerate(group["params"]):
            told = optimizer.get_config(at, index, group)
            kept = {**group, "min_8bit_size": args.min_8bit_size, "max_unorm": 0.0, "skip_zeros": False}
            other = [key for key in _TOLD if told[key] != kept[key]]
            if other or told["optim_bits"] not in (8, 32):
                key = other[0] if other else "optim_bits"
                raise ConfigError(
                    f"optimizer {kind}: {key} is {told[key]!r} for parameter {index} of group {at}, and infinity takes "
                    "optim_bits 8 or 32 of single parameters: put it into a parameter group of its own, without "
                    "max_unorm and skip_zeros"
                )
            if told["optim_bits"] == 32:
                small.add(id(param))
    return Chosen(
        _CODED_NAMES, _coded_rules(), dict(optimizer.defaults), optimizer.param_groups, given=True,
        numel_min=max(args.min_8bit_size, 1), small=frozenset(small),
    )  # fmt: skip


# What its manager may tell of a parameter that is the group's, or everybody's, here.
_TOLD = ("lr", "betas", "eps", "weight_decay", "min_8bit_size", "max_unorm", "skip_zeros")


def _has_stepped(state: Mapping[str, Any]) -> bool:
    step = state.get("step")
    return bool(state) and (step is None or float(step) > 0)
