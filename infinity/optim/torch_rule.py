"""Any elementwise torch optimizer, unchanged, on flat segments of partitions.

A segment becomes an fp32 parameter of its own: the master weight. The states that the store keeps are put where the
optimizer looks for them. Scalars of a parameter (a step count, a product of momenta) stay here, by parameter and step,
so that every segment of it starts from the same ones. Before its first step a segment has no state; the optimizer makes
it.

A probe on a small tensor checks, when the engine is built, that the result does not depend on where parameters are cut,
and that there is one.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.optim.update_rules import StepSlice, masters_of, put_masters
from infinity.plan.request import kinds_of

# Elements that are stepped at once; this bounds the fp32 copies.
_CHUNK_NUMEL = 1 << 21
_PROBE_STEPS = 3
_LARGE_NUMEL = 1 << 13


class TorchRule:
    """An `UpdateRule` that steps slices with clones of `template`, an instance that has not stepped."""

    joins = False
    scalars = True
    guarded = False
    start = 0.0
    counted = False

    def __init__(self, template: torch.optim.Optimizer) -> None:
        """Probe the optimizer; ConfigError if it is not elementwise, with the numbers."""
        first, *others = template.param_groups
        self.names = _probe(template, first)
        self.moments = kinds_of(self.names)
        # Without the program's parameters, and without the states that its optimizer shows from now on.
        self._template = _clone(template, {key: value for key, value in first.items() if key != "params"}, [])
        # Values of a group's options that were seen to need these states: see `_options`.
        self._tried = {_options(first)}
        for group in others:
            self.hyper(group)
        # By (parameter, step).
        self._scalars: dict[tuple[str, int], dict[str, Any]] = {}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """ConfigError for options with which the optimizer keeps other states than those that are planned."""
        options = _options(group)
        if options not in self._tried:
            names = _probe(self._template, group)
            if set(names) != set(self.names):
                raise ConfigError(
                    f"param_groups: with the options of one group {type(self._template).__name__} keeps "
                    f"{', '.join(names) or 'nothing'} of an element, with those of another or of before "
                    f"{', '.join(self.names) or 'nothing'}: give all groups options that need the same states (such as "
                    "momentum, amsgrad, centered), and leave these as they were when the engine was made"
                )
            self._tried.add(options)
        return {key: copy.copy(value) for key, value in group.items() if key != "params"}

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        for each in slices:
            for begin in range(0, each.segment.numel, _CHUNK_NUMEL):
                chunk = slice(begin, min(begin + _CHUNK_NUMEL, each.segment.numel))
                self._step(each, chunk, grad_scale, grad_bound)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        return {name: values for (name, step), values in self._scalars.items() if steps[name] == step}

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        self._scalars = {(name, steps[name]): dict(values) for name, values in scalars.items()}

    def _step(self, piece: StepSlice, at: slice, grad_scale: float, grad_bound: float) -> None:
        segment = piece.segment
        param = torch.nn.Parameter(masters_of(piece, at))
        param.grad = (piece.grad[at].float() * grad_scale).clamp_(-grad_bound, grad_bound)
        optimizer = _clone(self._template, piece.hyper, [param])
        if segment.step > 1:
            scalars = self._scalars[segment.name, segment.step - 1]
            kept = dict(zip(self.names, (moment[at] for moment in piece.moments), strict=True))
            optimizer.state[param] = {**copy.deepcopy(scalars), **kept}
        with torch.no_grad():
            _call_step(optimizer)
            state = optimizer.state[param]
            for name, moment in zip(self.names, piece.moments, strict=True):
                if state[name].data_ptr() != moment[at].data_ptr():
                    moment[at].copy_(state[name])
            put_masters(piece, at, param.detach())
        self._scalars[segment.name, segment.step] = {
            name: copy.deepcopy(value) for name, value in state.items() if name not in self.names
        }
        # Other segments of this step start from the scalars of the step before; older ones are not needed.
        self._scalars.pop((segment.name, segment.step - 2), None)


def _call_step(optimizer: torch.optim.Optimizer) -> None:
    """Step a torch optimizer, with its step counters on the CPU whatever the program's default device is."""
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else nullcontext():
        type(optimizer).step(optimizer)


def _clone(
    template: torch.optim.Optimizer, hyper: Mapping[str, Any], params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of the same class and options on other parameters, without state or the program's hooks."""
    # Not by `copy`, which leaves attributes of a subclass's own behind.
    clone: torch.optim.Optimizer = object.__new__(type(template))
    own = vars(clone)
    own.update(vars(template))
    hooks = [name for name, value in own.items() if name.endswith("_hooks") and isinstance(value, OrderedDict)]
    groups = [{**hyper, "params": params}]
    if "foreach" in hyper and hyper["foreach"] is None:
        # Left to itself, torch steps several parameters at once on some devices, in another order of operations.
        groups[0]["foreach"] = False
    own.update({name: OrderedDict() for name in hooks}, param_groups=groups, state=defaultdict(dict))
    return clone


def _options(group: Mapping[str, Any]) -> frozenset[tuple[str, object]]:
    """Return what of a group's values may decide about states: switches, and which numbers are 0."""
    values = ((key, value) for key, value in group.items() if key != "params")
    return frozenset(
        (key, bool(value) if isinstance(value, (bool, int, float)) else type(value)) for key, value in values
    )  # fmt: skip


def _probe(template: torch.optim.Optimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the states that have one value an element; ConfigError if it is not elementwise."""
    kind = type(template).__name__
    _check_alone(template)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 6, generator=generator, device="cpu")
    grads = [torch.randn(8, 6, generator=generator, device="cpu") for _ in range(_PROBE_STEPS)]
    hyper = {key: value for key, value in group.items() if key != "params"}

    def run(
        parts: list[Tensor], pieces: list[list[Tensor]], *, anew: bool = False
    ) -> tuple[Tensor, dict[str, Any]]:  # fmt: skip
        params = [torch.nn.Parameter(part.clone()) for part in parts]
        optimizer = _clone(template, hyper, params)
        for step in pieces:
            if anew:
                states, optimizer = optimizer.state, _clone(template, hyper, params)
                optimizer.state.update(states)
            for param, grad in zip(params, step, strict=True):
                param.grad = grad.clone()
            _call_step(optimizer)
        return torch.cat([param.detach().flatten() for param in params]), optimizer.state[params[0]]

    try:
        whole, state = run([weight], [[grad] for grad in grads])
        flat = weight.flatten()
        cut, _ = run(
            [flat[:7], flat[7:30], flat[30:]], [[*grad.flatten().split((7, 23, 18))] for grad in grads]
        )  # fmt: skip
        again, _ = run([weight], [[grad] for grad in grads], anew=True)
        # Some keep small tensors in another way.
        large = torch.linspace(-1.0, 1.0, _LARGE_NUMEL, device="cpu")
        _, stored = run([large], [[large]])
    except Exception as error:
        raise ConfigError(
            f"optimizer {kind} cannot be run on partitions: stepping a flat tensor without a closure ended with "
            f"{type(error).__name__}: {error}. Pass an optimizer that is elementwise, such as torch.optim.AdamW"
        ) from error
    if not torch.allclose(whole, cut, rtol=1e-5, atol=1e-7, equal_nan=True):
        raise ConfigError(
            f"optimizer {kind} is not elementwise: stepping a matrix of 8 x 6 whole and cut into three flat stretches "
            f"differs by up to {(whole - cut).abs().max():.2g}. Partitions are flat stretches of parameters; pass an "
            "elementwise optimizer, such as torch.optim.AdamW"
        )
    if not torch.equal(whole, again):
        raise ConfigError(
            f"optimizer {kind} keeps something from step to step beside its states by parameter, in itself or in its "
            "groups, which cannot be kept for partitions: pass an optimizer that keeps it in its states, such as "
            "torch.optim.AdamW"
        )
    if torch.equal(whole, flat) and hyper.get("lr", 1.0) != 0:
        raise ConfigError(
            f"optimizer {kind} leaves parameters as they are: {_PROBE_STEPS} steps of a matrix of 8 x 6 in its groups "
            "changed nothing. The engine steps partitions, which it puts into param_groups: an optimizer that keeps "
            "its own list of parameters, or steps in hooks, is never run on them"
        )
    _check_kept(kind, state, weight)
    _check_kept(kind, stored, large)
    return _shaped(state)


def _check_alone(template: torch.optim.Optimizer) -> None:
    """ConfigError for an optimizer that holds others: their parameters would stay the program's."""
    if inner := _optimizers_in(vars(template)):
        raise ConfigError(
            f"optimizer {type(template).__name__} holds another optimizer ({inner}), which goes on stepping the "
            "parameters that it was made with, without gradients: partitions are stepped instead. Pass one elementwise "
            "optimizer, with what differs between parameters in its groups"
        )


def _optimizers_in(value: Any) -> str:
    """Return the class names of the optimizers that an object's attributes hold, directly or in a list or mapping."""
    if isinstance(value, torch.optim.Optimizer):
        return type(value).__name__
    held: Iterable[Any] = ()
    if isinstance(value, Mapping):
        held = value.values()
    elif isinstance(value, (list, tuple)):
        held = value
    return ", ".join(filter(None, map(_optimizers_in, held)))


def _shaped(state: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(name for name, value in state.items() if isinstance(value, Tensor) and value.numel() > 1)


def _check_kept(kind: str, state: Mapping[str, Any], weight: Tensor) -> None:
    """ConfigError for a state that is neither a single value nor fp32 with a value for each element of `weight`."""
    for name in _shaped(state):
        value = state[name]
        if type(value) is not Tensor or value.shape != weight.shape or value.dtype is not torch.float32:
            raise ConfigError(
                f"optimizer {kind} keeps {name} as {tuple(value.shape)} {value.dtype} for a parameter of "
                f"{tuple(weight.shape)}: only fp32 states with a value for each element can be cut"
            )
