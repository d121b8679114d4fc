"""Update rules: a native one, which is one fused pass, or any elementwise optimizer of torch's (`torch_rule`).

A `StepSlice` is a segment of one sub-group with everything that a step reads and writes there. The updater makes slices
and knows no optimizer; a rule steps slices and knows neither tiers nor units.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.errors import StateError
from infinity.ops.adam import AdagradHyper, AdamHyper, Hyper, LionHyper, MomentumHyper, Piece, adam_step
from infinity.optim.lion import LionOptimizer
from infinity.optim.step_context import Segment
from infinity.plan.types import ADAM_MOMENTS, Kind

# The file of torch's own wrappers of a step.
_WRAPPER = torch.optim.Optimizer.profile_hook_step.__code__.co_filename


@dataclass(frozen=True, slots=True)
class StepSlice:
    """Flat tensors [numel] of one device.

    moments: fp32, in the order of the rule's. remainder, master: as in `infinity.ops.adam.Piece`.
    """

    segment: Segment
    hyper: Any
    param: Tensor
    grad: Tensor
    moments: Sequence[Tensor]
    remainder: Tensor | None
    master: Tensor | None


class UpdateRule(Protocol):
    """Steps slices; reads hyper-parameters from a parameter group."""

    # What the rule keeps of an element, and the first value of that.
    moments: tuple[Kind, ...]
    start: float
    # Whether one slice may hold several parameters.
    joins: bool
    # Whether elements whose gradient is not finite are left unchanged: then a step may begin before all are known.
    guarded: bool

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Return a parameter group's hyper-parameters as they are now."""

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        """Step every slice in place. Each gradient is multiplied by `grad_scale`, then clamped to +-`grad_bound`."""

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return what the rule keeps of a parameter in one value, by name. steps: the step count of each."""

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Take back what `parameter_scalars` returned."""


class NativeRule:
    """One of the rules of `infinity.ops.rules`: a fused pass over each slice."""

    joins = True
    guarded = True

    def __init__(
        self, moments: tuple[Kind, ...], hyper: Callable[[Mapping[str, Any]], Hyper], *, start: float = 0.0
    ) -> None:
        self.moments = moments
        self.start = start
        self._hyper = hyper

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        return self._hyper(group)

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        by_step: dict[int, list[Piece]] = {}
        for each in slices:
            first, second = (*each.moments, None)[:2]
            assert first is not None
            piece = Piece(each.param, each.grad, first, second, each.remainder, each.master, hyper=each.hyper)
            by_step.setdefault(each.segment.step, []).append(piece)
        for step, pieces in by_step.items():
            adam_step(pieces, step=step, grad_scale=grad_scale, grad_bound=grad_bound)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return nothing: a native rule needs the step count only."""
        return {}

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Do nothing."""


def adam(*, decoupled: bool, bias_correction: bool = True) -> NativeRule:
    """Return Adam's rule, or AdamW's if `decoupled`."""
    return NativeRule(
        ADAM_MOMENTS,
        lambda group: AdamHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), adamw=decoupled,
            bias_correction=bias_correction,
        ),
    )  # fmt: skip


def lion() -> NativeRule:
    """Return Lion's rule, with decoupled weight decay."""
    return NativeRule(
        (Kind.EXP_AVG,),
        lambda group: LionHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
        ),
    )  # fmt: skip


def adagrad(start: float = 0.0) -> NativeRule:
    """Return Adagrad's rule; its sums begin at `start`."""
    return NativeRule(
        (Kind.SUM,),
        lambda group: AdagradHyper(
            lr=float(group["lr"]), lr_decay=float(group["lr_decay"]), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        ),
        start=start,
    )  # fmt: skip


def momentum() -> NativeRule:
    """Return the rule of SGD with a momentum buffer."""
    return NativeRule(
        (Kind.MOMENTUM_BUFFER,),
        lambda group: MomentumHyper(
            lr=float(group["lr"]), momentum=float(group["momentum"]), dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]), nesterov=bool(group["nesterov"]),
        ),
    )  # fmt: skip


def none() -> NativeRule:
    """Return the rule of no optimizer, which keeps nothing of an element and steps no slice."""

    def hyper(group: Mapping[str, Any]) -> Hyper:
        raise StateError("there is no optimizer, and so no hyper-parameters")

    return NativeRule((), hyper)


def native_rule_of(optimizer: torch.optim.Optimizer) -> NativeRule | None:
    """Return the native rule with the arithmetic of a torch optimizer; None if there is none."""
    groups = optimizer.param_groups
    if any(group.get(key) for group in groups for key in ("amsgrad", "maximize", "differentiable")):
        return None
    if _steps_as(optimizer, LionOptimizer):
        return lion()
    if _steps_as(optimizer, torch.optim.Adam):
        decoupled = isinstance(optimizer, torch.optim.AdamW) or bool(groups[0].get("decoupled_weight_decay"))
        return adam(decoupled=decoupled)
    starts = {group.get("initial_accumulator_value") for group in groups}
    if _steps_as(optimizer, torch.optim.Adagrad) and len(starts) == 1:
        return adagrad(float(groups[0]["initial_accumulator_value"]))
    if _steps_as(optimizer, torch.optim.SGD) and all(group["momentum"] for group in groups):
        return momentum()
    return None


def _steps_as(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer is torch's `kind`, or a subclass that leaves its arithmetic alone."""
    if not isinstance(optimizer, kind):
        return False
    theirs = type(optimizer)
    return _own_step(theirs) is _own_step(kind) and (
        # A step calls this for the states and the gradients that it takes.
        getattr(theirs, "_init_group", None) is getattr(kind, "_init_group", None)
    )


def _own_step(kind: type[torch.optim.Optimizer]) -> Any:
    """Return a class's step as it was written: torch wraps that of each class whose optimizers are made."""
    return inspect.unwrap(kind.step, stop=lambda step: step.__code__.co_filename != _WRAPPER)
