"""Choosing the update rule and its hyper-parameters: from a torch optimizer, or from a name in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from infinity.errors import ConfigError
from infinity.optim import update_rules
from infinity.optim.torch_rule import TorchRule
from infinity.optim.update_rules import UpdateRule
from infinity.plan.request import OptimizerSpec


@dataclass(frozen=True, slots=True)
class Chosen:
    """An update rule with its defaults.

    name: as log lines show it, such as "AdamW". groups: the parameter groups of the program's own optimizer, if it has
    brought one.
    """

    name: str
    rule: UpdateRule
    defaults: dict[str, Any]
    groups: list[dict[str, Any]] | None = None
    # False of what `no_optimizer` returns.
    trains: bool = True

    @property
    def way(self) -> str:
        """How it is stepped, in words."""
        return "in one native pass" if self.rule.joins else "by torch, on fp32 stretches of partitions"

    @property
    def spec(self) -> OptimizerSpec:
        """What the plan has to know of it."""
        return OptimizerSpec(self.rule.moments, self.rule.guarded, self.trains)


def no_optimizer() -> Chosen:
    """Return what stands for the optimizer of a model that is only run. It has no parameter to step."""
    return Chosen("no optimizer", update_rules.none(), {}, trains=False)


def from_torch(optimizer: torch.optim.Optimizer) -> Chosen:
    """Choose the rule of an instance that has not stepped; ConfigError if it cannot run on partitions."""
    kind = type(optimizer)
    native = update_rules.native_rule_of(optimizer)
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
    return Chosen(kind.__name__, chosen, dict(optimizer.defaults), optimizer.param_groups)


def from_name(name: str, params: Mapping[str, Any]) -> Chosen:
    """Choose the rule of one of the configuration's types. params: all its hyper-parameters."""
    if name == "Lion":
        return Chosen(name, update_rules.lion(), dict(params))
    template = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **params)
    template.state.clear()
    native = update_rules.native_rule_of(template)
    return Chosen(name, native if native is not None else TorchRule(template), dict(template.defaults))


def adam_from_params(params: Mapping[str, Any], *, decoupled: bool) -> Chosen:
    """Choose Adam's rule, or AdamW's if `decoupled`, with DeepSpeed's hyper-parameters."""
    defaults = {key: params[key] for key in ("lr", "betas", "eps", "weight_decay")}
    chosen = update_rules.adam(decoupled=decoupled, bias_correction=params["bias_correction"])
    return Chosen("AdamW" if decoupled else "Adam", chosen, defaults)


def _has_stepped(state: Mapping[str, Any]) -> bool:
    step = state.get("step")
    return bool(state) and (step is None or float(step) > 0)
