"""Any elementwise optimizer of torch's kind, unchanged, on flat stretches of partitions.

A stretch becomes an fp32 parameter of its own: the master weight, with the states that the store keeps put where the
optimizer looks for them. Single values of a parameter (a step count, a product of momenta) stay here, by parameter and
step, so that every stretch of it starts from the same ones. Before its first step a stretch has no state, and takes
what the optimizer makes.

That the result does not depend on where parameters are cut is tried out on a small tensor when the engine is built.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.ops.adam import join, split
from infinity.optim.update_rules import StepSlice
from infinity.plan.optimizer_states import kinds_of

# Elements that are stepped at once: bounds the fp32 copies.
_CHUNK_NUMEL = 1 << 21
_PROBE_STEPS = 3


class TorchMethod:
    """Steps cuts with `template`, an instance that has not stepped. See `method.Method`."""

    joins = False
    guarded = False
    start = 0.0

    def __init__(self, template: torch.optim.Optimizer) -> None:
        """ConfigError where the optimizer is not elementwise, with what was seen."""
        self._template = template
        self._names = _probe(template)
        self.moments = kinds_of(self._names)
        # (parameter, step) -> the values that are single.
        self._singles: dict[tuple[str, int], dict[str, Any]] = {}

    def hyper(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """See Method."""
        return {key: copy.copy(value) for key, value in group.items() if key != "params"}

    def step(self, cuts: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        """See Method."""
        for cut in cuts:
            for begin in range(0, cut.run.numel, _CHUNK_NUMEL):
                self._step(cut, slice(begin, min(begin + _CHUNK_NUMEL, cut.run.numel)), grad_scale, grad_bound)

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """See Method."""
        return {name: values for (name, step), values in self._singles.items() if steps[name] == step}

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """See Method."""
        self._singles = {(name, steps[name]): dict(values) for name, values in singles.items()}

    def _step(self, cut: StepSlice, at: slice, grad_scale: float, grad_bound: float) -> None:
        run = cut.run
        param = torch.nn.Parameter(_load(cut, at))
        param.grad = (cut.grad[at].float() * grad_scale).clamp_(-grad_bound, grad_bound)
        optimizer = _clone(self._template, cut.hyper, [param])
        if run.step > 1:
            singles = self._singles[run.name, run.step - 1]
            kept = dict(zip(self._names, (moment[at] for moment in cut.moments), strict=True))
            optimizer.state[param] = {**copy.deepcopy(singles), **kept}
        with torch.no_grad():
            _call_step(optimizer)
            state = optimizer.state[param]
            for name, moment in zip(self._names, cut.moments, strict=True):
                if state[name].data_ptr() != moment[at].data_ptr():
                    moment[at].copy_(state[name])
            _store(cut, at, param.detach())
        self._singles[run.name, run.step] = {
            name: copy.deepcopy(value) for name, value in state.items() if name not in self._names
        }
        # Another stretch of this step starts where the one before it did; nobody asks for what is older.
        self._singles.pop((run.name, run.step - 2), None)


def _call_step(optimizer: torch.optim.Optimizer) -> None:
    """Step an optimizer of torch's. Its counters of steps belong on the CPU, whatever the program's default device."""
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else nullcontext():
        type(optimizer).step(optimizer)


def _clone(
    template: torch.optim.Optimizer, hyper: Mapping[str, Any], params: list[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """An optimizer of the same class and options on other parameters, without state and without the program's hooks."""
    clone = copy.copy(template)
    own = vars(clone)
    hooks = [name for name, value in own.items() if name.endswith("_hooks") and isinstance(value, OrderedDict)]
    groups = [{**hyper, "params": params}]
    own.update({name: OrderedDict() for name in hooks}, param_groups=groups, state=defaultdict(dict))
    return clone


def _load(cut: StepSlice, at: slice) -> Tensor:
    """The fp32 master weights of a stretch: the partition's own memory, or a copy."""
    if cut.master is not None:
        return cut.master[at]
    if cut.remainder is None:
        return cut.param[at]
    return join(cut.param[at].cpu(), cut.remainder[at].cpu()).to(cut.param.device)


def _store(cut: StepSlice, at: slice, weight: Tensor) -> None:
    if cut.remainder is not None:
        rounded, remainder = split(weight.cpu())
        cut.param[at].copy_(rounded)
        cut.remainder[at].copy_(remainder)
    elif cut.master is not None:
        cut.param[at].copy_(weight)


def _probe(template: torch.optim.Optimizer) -> tuple[str, ...]:
    """Names of the states that have a value for each element; ConfigError where the optimizer is not elementwise."""
    kind = type(template).__name__
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 6, generator=generator, device="cpu")
    grads = [torch.randn(8, 6, generator=generator, device="cpu") for _ in range(_PROBE_STEPS)]
    hyper = {key: value for key, value in template.param_groups[0].items() if key != "params"}

    def run(parts: list[Tensor], pieces: list[list[Tensor]]) -> tuple[Tensor, dict[str, Any]]:
        params = [torch.nn.Parameter(part.clone()) for part in parts]
        optimizer = _clone(template, hyper, params)
        for step in pieces:
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
    shaped = [name for name, value in state.items() if isinstance(value, Tensor) and value.numel() > 1]
    odd = [name for name in shaped if state[name].shape != weight.shape or state[name].dtype is not torch.float32]
    if odd:
        raise ConfigError(
            f"optimizer {kind} keeps {odd[0]} as {tuple(state[odd[0]].shape)} {state[odd[0]].dtype} for a parameter of "
            "(8, 6): only fp32 states with a value for each element can be cut"
        )
    return tuple(shaped)
