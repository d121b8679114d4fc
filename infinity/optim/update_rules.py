"""Update rules: a native one, which is one fused pass, or any elementwise optimizer of torch's (`torch_rule`).

A `StepSlice` is a segment of one sub-group with everything that a step reads and writes there. The updater makes slices
and knows no optimizer; a rule steps slices and knows neither tiers nor units.

Lion as a torch optimizer: for a program that makes its own. An engine steps it natively, on any tier.

One optimizer step as a value: the hyper-parameters and step counts that every sub-group is stepped with.

They are copied when the step begins, because the program may change its parameter groups while the step goes on behind
it: a scheduler sets the next learning rate.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infinity.errors import ConfigError, StateError
from infinity.ops.adam import adam_step, join, split
from infinity.ops.rules import AdagradHyper, AdamHyper, CodedAdamHyper, Hyper, LionHyper, MomentumHyper, Piece
from infinity.plan.layout import Overlap, Slice, UnitLayout
from infinity.plan.types import ADAM_MOMENTS, CODED_MOMENTS, Kind


class LionOptimizer(torch.optim.Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step without an engine."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                direction = average.lerp(param.grad, 1 - first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                average.lerp_(param.grad, 1 - second)
        return loss


class Segment(NamedTuple):
    """A range of a slice that is stepped at once: one parameter group, one step count.

    Where the rule does not step several parameters at once, also what it has of which parameter.
    """

    start: int
    numel: int
    group: int
    step: int
    overlap: Overlap | None = None

    @property
    def name(self) -> str:
        """The parameter's; empty where several are stepped at once."""
        return "" if self.overlap is None else self.overlap.slot.name


@dataclass(frozen=True, slots=True)
class StepContext:
    """What all sub-groups of one step share.

    hyper: by parameter group. group_of: by name of a parameter, the group that steps it; no step for one without.
    grad_scale: multiplies every gradient.
    arrived, steps: by unit index, which parameters have a gradient, and the step count of each.
    begun: the device's mark of the step's begin; None where it begins in backward.
    """

    hyper: tuple[Any, ...]
    group_of: Mapping[str, int]
    grad_scale: float
    arrived: Mapping[int, Sequence[bool]]
    steps: Mapping[int, Sequence[int]]
    begun: Any = None

    def stepped(self, layout: UnitLayout) -> dict[str, Any]:
        """Return the hyper-parameters of a unit's parameters that are stepped, by name."""
        flags = zip(layout.slots, self.arrived[layout.index], strict=True)
        names = [slot.name for slot, arrived in flags if arrived and slot.name in self.group_of]
        return {name: self.hyper[self.group_of[name]] for name in names}

    def segments(self, layout: UnitLayout, piece: Slice, first: int, *, joins: bool) -> list[Segment]:
        """Cut a slice into segments; leave out parameters without a gradient or a group.

        first: the slice's first element, counted in the unit. joins: cut only where the parameter group or the step
        count changes, not at every parameter; the padding between two parameters is then stepped with them, and stays
        zero.
        """
        arrived, steps = self.arrived[layout.index], self.steps[layout.index]
        groups = [self.group_of.get(slot.name) for slot in layout.slots]
        first_group = groups[0] if len(set(steps)) == len({*groups}) == 1 else None
        if joins and all(arrived) and first_group is not None:
            # By far the most frequent case; padding at the end is included.
            return [Segment(0, piece.numel, first_group, steps[0])]
        by_name = {
            slot.name: (flag, group, step)
            for slot, flag, group, step in zip(layout.slots, arrived, groups, steps, strict=True)
        }
        segments: list[Segment] = []
        joined = False
        for overlap in layout.overlaps(first, first + piece.numel):
            has_grad, group, step = by_name[overlap.slot.name]
            if not has_grad or group is None:
                joined = False
                continue
            if joins and joined and (segments[-1].group, segments[-1].step) == (group, step):
                stop = overlap.range_start + overlap.numel
                segments[-1] = segments[-1]._replace(numel=stop - segments[-1].start)
            else:
                whose = None if joins else overlap
                segments.append(Segment(overlap.range_start, overlap.numel, group, step, whose))
            joined = True
        return segments


# The files of torch, whose wrappers of a step change nothing of it.
_TORCH = os.path.dirname(torch.__file__) + os.sep


@dataclass(frozen=True, slots=True)
class StepSlice:
    """Flat tensors [numel] of one device.

    moments: in the order of the rule's kinds. remainder, master: as in `infinity.ops.rules.Piece`.
    """

    segment: Segment
    hyper: Any
    param: Tensor
    grad: Tensor
    moments: Sequence[Tensor]
    remainder: Tensor | None
    master: Tensor | None


def masters_of(piece: StepSlice, at: slice) -> Tensor:
    """Return the fp32 master weights of a chunk: the partition's own memory, or a copy."""
    if piece.master is not None:
        return piece.master[at]
    if piece.remainder is None:
        return piece.param[at]
    return join(piece.param[at].cpu(), piece.remainder[at].cpu()).to(piece.param.device)


def put_masters(piece: StepSlice, at: slice, weight: Tensor) -> None:
    """Write the stepped master weights [numel] (fp32) of a chunk back."""
    if piece.remainder is not None:
        rounded, remainder = split(weight.cpu())
        piece.param[at].copy_(rounded)
        piece.remainder[at].copy_(remainder)
    elif piece.master is not None:
        piece.param[at].copy_(weight)


class UpdateRule(Protocol):
    """Steps slices; reads hyper-parameters from a parameter group."""

    # What the rule keeps of an element or a block of them, and the first value of that.
    moments: tuple[Kind, ...]
    start: float
    # The same by the names that torch gives them.
    names: tuple[str, ...]
    # Whether torch's optimizer counts its steps in its states, which are the engine's count then.
    counted: bool
    # Whether one slice may hold several parameters.
    joins: bool
    # Whether it keeps values of a parameter beside the states of its elements.
    scalars: bool
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


class Rules:
    """The update rules of a run, by their numbers in the plan: one, or one for some parameters and one for the rest.

    by_group: of two rules, whether a parameter group says which steps its parameters. Otherwise groups have parameters
    of both, which have the same hyper-parameters.
    """

    def __init__(self, *rules: UpdateRule, by_group: bool = False) -> None:
        self._rules = rules
        self.by_group = by_group
        self.guarded = all(rule.guarded for rule in rules)
        self.scalars = any(rule.scalars for rule in rules)

    def __getitem__(self, number: int) -> UpdateRule:
        return self._rules[number]

    def __iter__(self) -> Iterator[UpdateRule]:
        return iter(self._rules)

    def number(self, group: Mapping[str, Any]) -> int:
        """Return the number of the rule that a parameter group names."""
        return 0 if not self.by_group or group["use_muon"] else 1

    def hyper(self, group: Mapping[str, Any]) -> Any:
        """Return a parameter group's hyper-parameters as they are now."""
        return self._rules[self.number(group)].hyper(group)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return what rules keep of a parameter in one value, by name. steps: the step count of each."""
        return {name: values for rule in self._rules for name, values in rule.parameter_scalars(steps).items()}

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Take back what `parameter_scalars` returned."""
        for rule in self._rules:
            rule.load_parameter_scalars(scalars, steps)


class NativeHyper(NamedTuple):
    """Hyper-parameters of a native rule. sign: -1.0 where the group maximizes, which turns its gradients around."""

    values: Hyper
    sign: float


class NativeRule:
    """One of the rules of `infinity.ops.rules`: a fused pass over each slice.

    fixed: keys of a group on which the rule's states depend, and whether each has to be set. counted: see `UpdateRule`.
    """

    joins = True
    scalars = False
    guarded = True

    def __init__(
        self, moments: tuple[Kind, ...], hyper: Callable[[Mapping[str, Any]], Hyper], *, start: float = 0.0,
        fixed: Mapping[str, bool] | None = None, counted: bool = True,
    ) -> None:  # fmt: skip
        self.moments = moments
        self.names = tuple(kind.value for kind in moments)
        self.counted = counted
        self.start = start
        self._hyper = hyper
        self._fixed = fixed or {}

    def hyper(self, group: Mapping[str, Any]) -> NativeHyper:
        for key, wanted in self._fixed.items():
            if bool(group.get(key, wanted)) is not wanted:
                raise ConfigError(
                    f"param_groups: {key} was {'set' if wanted else 'not set'} when the engine was made, which decides "
                    f"what states the optimizer keeps, and is {group[key]!r} now: set it back, or make a new engine "
                    "with that value"
                )
        return NativeHyper(self._hyper(group), -1.0 if group.get("maximize") else 1.0)

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        by_step: dict[tuple[int, float], list[Piece]] = {}
        for each in slices:
            first, second = (*each.moments, None)[:2]
            assert first is not None
            hyper, sign = each.hyper
            piece = Piece(each.param, each.grad, first, second, each.remainder, each.master, hyper=hyper)
            by_step.setdefault((each.segment.step, sign), []).append(piece)
        for (step, sign), pieces in by_step.items():
            adam_step(pieces, step=step, grad_scale=sign * grad_scale, grad_bound=grad_bound)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return nothing: a native rule needs the step count only."""
        return {}

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Do nothing."""


class CodedRule(NativeRule):
    """AdamW in the operations of bitsandbytes: with moments in 8 bits, or (not `coded`) of small parameters in fp32."""

    def __init__(self, *, coded: bool) -> None:
        super().__init__(
            CODED_MOMENTS if coded else ADAM_MOMENTS,
            lambda group: CodedAdamHyper(
                lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
                eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
            ),
        )  # fmt: skip
        # As bitsandbytes calls them.
        self.names = ("state1", "absmax1", "state2", "absmax2") if coded else ("state1", "state2")
        # The padding behind a parameter is no element of its last block.
        self.joins = not coded
        self._coded = coded

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        hypers = {each.hyper.values: replace(each.hyper.values, coded=self._coded) for each in slices}
        by_step: dict[int, list[Piece]] = {}
        for each in slices:
            first, second = each.moments[:: 2 if self._coded else 1]
            scales = (each.moments[1], each.moments[3]) if self._coded else None
            piece = Piece(
                each.param, each.grad, first, second, each.remainder, each.master, scales,
                hyper=hypers[each.hyper.values],
            )  # fmt: skip
            by_step.setdefault(each.segment.step, []).append(piece)
        for step, pieces in by_step.items():
            adam_step(pieces, step=step, grad_scale=grad_scale, grad_bound=grad_bound)


def adam(*, decoupled: bool, bias_correction: bool = True) -> NativeRule:
    """Return Adam's rule, or AdamW's if `decoupled`; a group may say which of them it has."""
    return NativeRule(
        ADAM_MOMENTS,
        lambda group: AdamHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            eps=float(group["eps"]), weight_decay=float(group["weight_decay"]),
            adamw=bool(group.get("decoupled_weight_decay", decoupled)), bias_correction=bias_correction,
        ),
        fixed={"amsgrad": False},
    )  # fmt: skip


def lion() -> NativeRule:
    """Return Lion's rule, with decoupled weight decay."""
    return NativeRule(
        (Kind.EXP_AVG,),
        lambda group: LionHyper(
            lr=float(group["lr"]), beta1=float(group["betas"][0]), beta2=float(group["betas"][1]),
            weight_decay=float(group["weight_decay"]),
        ),
        counted=False,
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
        fixed={"momentum": True}, counted=False,
    )  # fmt: skip


def none() -> NativeRule:
    """Return the rule of no optimizer, which keeps nothing of an element and steps no slice."""

    def hyper(group: Mapping[str, Any]) -> Hyper:
        raise StateError("there is no optimizer, and so no hyper-parameters")

    return NativeRule((), hyper)


def native_rule_of(optimizer: torch.optim.Optimizer) -> NativeRule | None:
    """Return the native rule with the arithmetic of a torch optimizer; None if there is none."""
    groups = optimizer.param_groups
    if any(group.get(key) for group in groups for key in ("amsgrad", "differentiable")):
        return None
    if steps_as(optimizer, LionOptimizer):
        return lion()
    if steps_as(optimizer, torch.optim.Adam):
        return adam(decoupled=isinstance(optimizer, torch.optim.AdamW))
    starts = {group.get("initial_accumulator_value") for group in groups}
    if steps_as(optimizer, torch.optim.Adagrad) and len(starts) == 1:
        return adagrad(float(groups[0]["initial_accumulator_value"]))
    if steps_as(optimizer, torch.optim.SGD) and all(group["momentum"] for group in groups):
        return momentum()
    return None


def steps_as(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether an optimizer is `kind`, or of a subclass that leaves its arithmetic alone.

    Torch and others replace functions of torch's classes by wrappers (dynamo, profilers), so these are known by their
    names, and only what another class defines is looked at: its step, and the states and gradients that a step takes.
    """
    if not isinstance(optimizer, kind):
        return False
    classes = type(optimizer).__mro__
    between = [each for each in classes[: classes.index(kind)] if not each.__module__.startswith("torch.optim.")]
    return not any(_defines(each, name) for each in between for name in ("step", "_init_group"))


def _defines(kind: type, name: str) -> bool:
    """Return whether a class writes a function of its own: torch puts a wrapper of what it inherits into it, too."""
    if name not in vars(kind):
        return False
    written = _written(vars(kind)[name])
    return not _is_torchs(written) and written is not _written(getattr(super(kind, kind), name, None))


def _written(function: Any) -> Any:
    """Return what torch's wrappers of a function wrap."""
    return inspect.unwrap(function, stop=lambda each: not _is_torchs(each))


def _is_torchs(function: Any) -> bool:
    return hasattr(function, "__code__") and function.__code__.co_filename.startswith(_TORCH)
