"""How sub-groups are stepped: by a native rule, one fused pass, or by any elementwise optimizer of torch's.

A `StepSlice` is a stretch of one sub-group with all that a step reads and writes there. The stepper cuts them and knows
no optimizer; a rule steps them and knows neither tiers nor units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.ops.adam import AdagradHyper, AdamHyper, Hyper, LionHyper, MomentumHyper, Piece, adam_step
from infinity.optim.step_context import Segment
from infinity.plan.types import ADAM_MOMENTS, Kind


@dataclass(frozen=True, slots=True)
class StepSlice:
    """Flat tensors [numel] of one device. `moments` in the order of the method's; `remainder` and `master` as in a
    `Piece`.
    """

    run: Segment
    hyper: Any
    param: Tensor
    grad: Tensor
    moments: Sequence[Tensor]
    remainder: Tensor | None
    master: Tensor | None


class UpdateRule(Protocol):
    """See the module's text."""

    # What it keeps of an element, and where those values start.
    moments: tuple[Kind, ...]
    start: float
    # Whether one call steps stretches of several parameters at once.
    joins: bool
    # Whether it leaves elements alone whose gradient is not finite: such a step may begin before all are known.
    guarded: bool

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """A parameter group's hyper-parameters as they are now."""

    def step(self, cuts: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        """Step every cut in place; gradients are multiplied by `grad_scale`, and then none is above `grad_bound`."""

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """What it keeps of a parameter in one value, by name, after as many `steps` of each."""

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Take back what `parameter_scalars` gave."""


class NativeRule:
    """One of the rules of `infinity.ops.rules`: a fused pass over each cut."""

    joins = True
    guarded = True

    def __init__(
        self, moments: tuple[Kind, ...], hyper: Callable[[Mapping[str, Any]], Hyper], *, start: float = 0.0
    ) -> None:
        self.moments = moments
        self.start = start
        self._hyper = hyper

    def hyper(self, group: Mapping[str, Any]) -> Hyper:
        """See Method."""
        return self._hyper(group)

    def step(self, cuts: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        """See Method."""
        by_step: dict[int, list[Piece]] = {}
        for cut in cuts:
            first, second = (*cut.moments, None)[:2]
            assert first is not None
            piece = Piece(cut.param, cut.grad, first, second, cut.remainder, cut.master, hyper=cut.hyper)
            by_step.setdefault(cut.run.step, []).append(piece)
        for step, pieces in by_step.items():
            adam_step(pieces, step=step, grad_scale=grad_scale, grad_bound=grad_bound)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """See Method: the number of steps is all that a rule needs."""
        return {}

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """See Method."""


def adam(*, decoupled: bool, bias_correction: bool = True) -> NativeRule:
    """Adam, or AdamW where `decoupled`."""
    return NativeRule(
        ADAM_MOMENTS,
        lambda group: AdamHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]), adamw=decoupled,
            bias_correction=bias_correction,
        ),
    )  # fmt: skip


def lion() -> NativeRule:
    """Lion, decoupled decay."""
    return NativeRule(
        (Kind.EXP_AVG,),
        lambda group: LionHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
        ),
    )  # fmt: skip


def adagrad(start: float = 0.0) -> NativeRule:
    """Adagrad whose sums begin at `start`."""
    return NativeRule(
        (Kind.SUM,),
        lambda group: AdagradHyper(
            lr=float(group["lr"]), lr_decay=float(group["lr_decay"]), eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
        ),
        start=start,
    )  # fmt: skip


def momentum() -> NativeRule:
    """SGD with a momentum buffer."""
    return NativeRule(
        (Kind.MOMENTUM_BUFFER,),
        lambda group: MomentumHyper(
            lr=float(group["lr"]), momentum=float(group["momentum"]), dampening=float(group["dampening"]),
            weight_decay=float(group["weight_decay"]), nesterov=bool(group["nesterov"]),
        ),
    )  # fmt: skip


def native_method_of(optimizer: torch.optim.Optimizer) -> NativeRule | None:
    """The native method with the arithmetic of a torch optimizer; None where there is none."""
    groups = optimizer.param_groups
    if any(group.get(key) for group in groups for key in ("amsgrad", "maximize", "differentiable")):
        return None
    kind = type(optimizer)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        return adam(decoupled=kind is torch.optim.AdamW or bool(groups[0].get("decoupled_weight_decay")))
    if kind is torch.optim.Adagrad and len({group["initial_accumulator_value"] for group in groups}) == 1:
        return adagrad(float(groups[0]["initial_accumulator_value"]))
    if kind is torch.optim.SGD and all(group["momentum"] for group in groups):
        return momentum()
    return None
