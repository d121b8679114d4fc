"""Experts a few at a time: how a mixture runs whose packed experts are too large to gather together.

The plan has made a unit of each few experts, with their part of every packed weight (see `infinity.plan.spec`). A
module of experts is called through transformers' interface (`ALL_EXPERTS_FUNCTIONS`), in which this module registers a
function: it goes through the experts that some token has chosen, unit by unit, as a module call of its own each:
gather, compute, release, in forward and again in backward, the next one fetched meanwhile. What no token of any rank
has chosen is neither read nor computed.

The operations of an expert, and the order of sums, are those of `experts_implementation="eager"`: expert by expert, the
contributions to a token added up in the experts' order, and the gradients of the inputs in the reverse order. So the
bits are those of eager with gathered weights. The packed weights have gradients as a whole (zero for an expert without
a token), as in torch: see `Gradients.settle`.

peft's adapters of a packed weight (`target_parameters`) would add their product to all of it. Here an expert's own
factors are applied to its rows, as those of a linear layer are: the same sum, but for rounding.

Ranks that gather together must go through the same units: once a call they agree on the experts that one of them uses.
On a rank without a token for one of these, it computes with no rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.errors import ConfigError
from infinity.plan.spec import is_packed
from infinity.zero.coordinator import Coordinator
from infinity.zero.hooks import register_post_backward, register_pre_backward
from infinity.zero.tiles import Tile, tiles_of
from infinity.zero.unit import Unit

# The function's name in transformers' interface.
IMPLEMENTATION = "infinity"
# Where a configuration of transformers names it.
_CHOICE = "_experts_implementation"
# What peft calls around the module that it adapts.
_ACTIVATE = "_activate_lora"
# Of a module of experts, while it runs with adapters: by name of a packed weight, the `_Factors` of each adapter.
_ADAPTERS = "_infinity_adapters"
# By expert what its rows are multiplied by, first and then; the scale of that.
_Factors = tuple[Sequence[Tensor], Sequence[Tensor], float]


class ExpertsDoor:
    """Has a model's packed experts run by `experts_forward` until it is closed."""

    def __init__(self, model: nn.Module) -> None:
        # Configurations with the implementation that they had before.
        self._before: list[tuple[Any, Any]] = []
        # Adapters of packed weights that run here.
        self._adapters: list[Any] = []
        modules: list[Any] = [
            module for module in model.modules()
            if is_packed(module) and tiles_of(module._parameters["down_proj"]) is not None
        ]  # fmt: skip
        for module in modules:
            if module._is_expert_parallel:
                raise ConfigError(
                    f"{type(module).__name__}: transformers' expert parallelism divides the experts over ranks, and so "
                    "does stage 3: load the model without it"
                )
        if not modules:
            return
        # The classes of such modules have imported it.
        sys.modules["transformers.integrations.moe"].ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
        for config in {id(module.config): module.config for module in modules}.values():
            self._before.append((config, getattr(config, _CHOICE)))
            setattr(config, _CHOICE, IMPLEMENTATION)
        adapter: Any
        for adapter in model.modules():
            name = getattr(adapter, "parameter_name", None)
            if name is not None and hasattr(adapter, "get_base_layer"):
                experts = adapter.get_base_layer()
                if tiles_of(experts._parameters.get(name)) is not None:
                    setattr(adapter, _ACTIVATE, partial(_activated, adapter, experts))
                    self._adapters.append(adapter)

    def close(self) -> None:
        """Put the old implementations back."""
        for config, before in self._before:
            setattr(config, _CHOICE, before)
        for adapter in self._adapters:
            delattr(adapter, _ACTIVATE)
        self._before.clear()
        self._adapters.clear()


@contextmanager
def _activated(adapter: Any, experts: nn.Module, active: Sequence[str]) -> Iterator[None]:
    """What peft's adapter of a packed weight does around its module: here that knows the factors meanwhile."""
    found: list[_Factors] = []
    for name in active:
        if name in adapter.lora_A:
            # Their product has the shape of the packed weight.
            left, right, scale = adapter.get_delta_factors(name)
            left, right = (left, right) if experts.is_transposed else (right.mT, left.mT)
            found.append((left.unbind(0), right.unbind(0), scale))
    adapters = experts.__dict__.setdefault(_ADAPTERS, {})
    adapters[adapter.parameter_name] = found
    try:
        yield
    finally:
        del adapters[adapter.parameter_name]


@dataclass(frozen=True, slots=True)
class _Group:
    """Experts `start` to `stop` of a module, their unit, and its tiles of the packed weights: up, down."""

    unit: Unit
    start: int
    stop: int
    tiles: tuple[Tile, Tile]

    def weights(self) -> list[tuple[Tensor, ...]]:
        """Of each packed weight, those of the single experts; gathered."""
        found = []
        for tile in self.tiles:
            packed = tile.param if tile.wants_gradient else tile.param.detach()
            found.append((packed.view(packed.shape[1:]),) if len(packed) == 1 else packed.unbind(0))
        return found


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Run a module's experts as its eager forward does.

    hidden_states: [tokens, width]. top_k_index, top_k_weights: [tokens, k]; an index of `num_experts` is no expert.
    """
    final = torch.zeros_like(hidden_states)
    with torch.no_grad():
        mask = F.one_hot(top_k_index, num_classes=module.num_experts + 1).permute(2, 1, 0)
        hit = (mask.sum(dim=(-1, -2)) > 0)[: module.num_experts].tolist()

    def chosen(experts: Sequence[int]) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(expert, its tokens, their place among the k) of each."""
        for expert in experts:
            place, token = torch.where(mask[expert])
            yield expert, token, place

    up = tiles_of(module._parameters.get("gate_up_proj" if module.has_gate else "up_proj"))
    down = tiles_of(module._parameters.get("down_proj"))
    if up is None or down is None:
        # Of another module of the same configuration, which is gathered whole.
        weights = (module.gate_up_proj if module.has_gate else module.up_proj, module.down_proj)
        for expert, token, place in chosen([at for at, is_hit in enumerate(hit) if is_hit]):
            out = _expert(module, hidden_states[token], weights[0][expert], weights[1][expert], expert, {})
            final.index_add_(0, token, (out * top_k_weights[token, place, None]).to(final.dtype))
        return final
    coordinator = up.coordinator
    groups = [
        _Group(first.unit, first.start, first.stop, (first, second))
        for first, second in zip(up.tiles, down.tiles, strict=True)
    ]
    used = coordinator.on_any_rank(hit)
    adapters = module.__dict__.get(_ADAPTERS, {})
    some = [at for at, group in enumerate(groups) if any(used[group.start : group.stop])]
    for run in _Runs(coordinator, groups, some):
        experts = [at for at in range(run.group.start, run.group.stop) if used[at]]
        rows = [*chosen(experts)]
        states = run.enter([hidden_states[token] for _, token, _ in rows])
        weights_up, weights_down = run.group.weights()
        outs = [
            _expert(module, state, weights_up[at - run.group.start], weights_down[at - run.group.start], at, adapters)
            for (at, _, _), state in zip(rows, states, strict=True)
        ]
        run.leave(outs)
        del weights_up, weights_down, states
        for (_, token, place), out in zip(rows, outs, strict=True):
            final.index_add_(0, token, (out * top_k_weights[token, place, None]).to(final.dtype))
    return final


def _expert(
    module: Any, state: Tensor, up: Tensor, down: Tensor, expert: int, adapters: Mapping[str, Sequence[_Factors]]
) -> Tensor:  # fmt: skip
    """One expert's output for its rows, in the operations of eager forwards."""

    def linear(x: Tensor, weight: Tensor, name: str) -> Tensor:
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        if not module.is_transposed:
            out = F.linear(x, weight, bias)
        else:
            out = x @ weight if bias is None else x @ weight + bias
        for left, right, scale in adapters.get(name, ()):
            out = out + scale * (x @ left[expert] @ right[expert])
        return out

    inner = linear(state, up, "gate_up_proj" if module.has_gate else "up_proj")
    out = linear(module._apply_gate(inner) if module.has_gate else module.act_fn(inner), down, "down_proj")
    return module.post_expert_norm(out) if module.has_post_expert_norm else out


class _Run:
    """The use of one group's unit in a call, the `at`th, from its gather to its release, and again in backward."""

    def __init__(self, runs: _Runs, at: int) -> None:
        self.group = runs.groups[runs.used[at]]
        self._runs = runs
        self._at = at
        places = [runs.used[other] if 0 <= other < len(runs.used) else None for other in (at - 1, at + 1)]
        near = [None if place is None else runs.groups[place].unit for place in places]
        self._scope = runs.coordinator.open_scope([self.group.unit], before=near[0], after=near[1])

    def enter(self, states: list[Tensor]) -> list[Tensor]:
        """Return the rows of each expert, so that backward says when it is through with the unit."""
        if not torch.is_grad_enabled():
            return states
        # Without a gradient of the rows nothing would say so before backward's end.
        needing = [state if state.requires_grad else state.detach().requires_grad_() for state in states]
        passed = register_post_backward(needing, self._end_backward)
        return needing if passed is None else passed

    def leave(self, outs: Sequence[Tensor]) -> None:
        """The unit's experts have run."""
        carrying = [out for out in outs if out.requires_grad] if torch.is_grad_enabled() else []
        returns = register_pre_backward(carrying, self._runs.coordinator, self._scope)
        self._runs.coordinator.close_scope(self._scope, will_return=returns, may_hold=False)

    def _end_backward(self) -> None:
        coordinator, skipped = self._runs.coordinator, self._runs.skipped
        if self._at == len(self._runs.used) - 1:
            coordinator.pass_by(skipped(self._at + 1))
        coordinator.leave_backward(self._scope)
        coordinator.pass_by(skipped(self._at))


class _Runs:
    """The groups of one call that are used, in order. groups: all of the module's; used: the places of these."""

    def __init__(self, coordinator: Coordinator, groups: Sequence[_Group], used: Sequence[int]) -> None:
        self.coordinator = coordinator
        self.groups = groups
        self.used = used

    def __iter__(self) -> Iterator[_Run]:
        return (_Run(self, at) for at in range(len(self.used)))

    def skipped(self, at: int) -> list[Unit]:
        """The units between those of use number `at` and of the one before it, which nobody uses: the last first."""
        begin = self.used[at - 1] + 1 if at else 0
        end = self.used[at] if at < len(self.used) else len(self.groups)
        return [group.unit for group in reversed(self.groups[begin:end])]
