"""The optimizer object that a training loop holds: live parameter groups; the states are in the tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from infinity.errors import ConfigError, UnknownNameError
from infinity.optim.loss_scaler import LossScaler
from infinity.optim.stepper import Stepper


class LossScalerView:
    """The loss scale under the names of DeepSpeed's scalers, live: `optimizer.loss_scaler`. Read-only."""

    def __init__(self, scaler: LossScaler | None) -> None:
        """scaler: None where the precision needs no scale."""
        self._scaler = scaler

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by now."""
        return self._scaler.scale if self._scaler is not None else 1.0

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it follows overflows."""
        return self._scaler is not None and self._scaler.dynamic

    @property
    def scale_window(self) -> int:
        """Good steps after which a dynamic scale doubles."""
        return (self._scaler or LossScaler()).loss_scale_window


class TieredOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer`, so that torch's schedulers accept it, whose states live where the plan says.

    `param_groups` and `state` are live, and those of the program's own optimizer are the same objects: what is written
    there applies from the next step on, or `check` refuses it. The engine calls `step`. What DeepSpeed's optimizers
    have besides is here under its names: `overflow`, `loss_scale`, `cur_scale`, `loss_scaler`, `_global_grad_norm`,
    `optimizer`, `parameter_offload`, `train` and `eval`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any],
        run: Callable[[Sequence[dict[str, Any]]], None], *, kind: str, stepper: Stepper, states: Any,
        named: Callable[[], Iterator[tuple[str, nn.Parameter]]], skipped: Callable[[], bool] = lambda: False,
        norm: Callable[[], float] = lambda: 0.0, scaler: LossScaler | None = None,
        given: torch.optim.Optimizer | None = None, parameter_offload: object = None,
    ) -> None:  # fmt: skip
        """run: steps the partitions with live parameter groups. kind: the update rule's name, such as "AdamW". stepper:
        what steps each parameter with its group. states: an `OptimizerStates`, which `state` shows. named: returns the
        model's parameters. skipped: whether the latest step was skipped. norm: that of its gradients. given: the
        program's own optimizer. parameter_offload: what DeepSpeed's optimizer keeps of its hooks.
        """
        self._run = run
        self._stepper = stepper
        self._states = states
        self._named = named
        self._skipped = skipped
        self._norm = norm
        self.loss_scaler = LossScalerView(scaler)
        self.kind = kind
        self.parameter_offload = parameter_offload
        self._inner = given if given is not None else torch.optim.Optimizer(groups, defaults)
        vars(self._inner)["state"] = states
        listed = self._inner.param_groups
        super().__init__(listed, defaults)
        self.param_groups = listed
        # The parameters of each group as they were when the stepper was told, by id.
        self._told = _members(listed)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, which are those of the program's own optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self._inner)["param_groups"] = groups

    @property
    def state(self) -> Any:
        """The states by parameter, live: see `infinity.engine.optimizer_state`."""
        return self._states

    @state.setter
    def state(self, given: Mapping[Any, Mapping[str, Any]]) -> None:
        # torch's constructor assigns an empty one.
        if given is not self._states and hasattr(self, "_told"):
            self._states.replace(given)

    def check(self) -> None:
        """Have the next step obey what the program has written to the groups and to its own optimizer's state; for
        what it cannot obey, raise ConfigError by name. Changes no weight.
        """
        if (given := self._inner.state) is not self._states:
            # A `load_state_dict` of the program's own optimizer replaces it.
            vars(self._inner)["state"] = self._states
            self._states.replace(given)
        if (members := _members(self.param_groups)) != self._told:
            self._stepper.regroup(self._group_of())
            self._told = members
        for at, group in enumerate(self.param_groups):
            try:
                self._stepper.rule.hyper(group)
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"param_groups[{at}] has not what {self.kind} steps with ({type(error).__name__}: {error}): give "
                    f"it {', '.join(self.defaults)}"
                ) from error

    def _group_of(self) -> dict[str, int]:
        """Return the group of each trained parameter, by name; ConfigError for one that cannot be stepped so."""
        names = {id(param): name for name, param in self._named()}
        found: dict[str, int] = {}
        for at, group in enumerate(self.param_groups):
            for param in group["params"]:
                name = names.get(id(param))
                if name is None:
                    raise ConfigError(
                        f"param_groups[{at}] has a parameter of shape {tuple(param.shape)} that is not in the engine's "
                        "model: take it out, or put it into the model before infinity.initialize()"
                    )
                if name in found:
                    raise ConfigError(
                        f"{name} is in param_groups[{found[name]}] and in param_groups[{at}], and would be stepped "
                        "twice: leave it in one of them"
                    )
                if name in self._stepper.steps:
                    found[name] = at
                elif param.requires_grad:
                    raise ConfigError(
                        f"param_groups[{at}] has {name}, which was in no group when the engine was made, so that it "
                        "has neither gradients nor optimizer states: give it to infinity.initialize() in a group from "
                        "the start (with a learning rate of 0 until its time comes), or make a new engine"
                    )
        return found

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ConfigError, with the groups as before, for a parameter that the engine cannot train."""
        super().add_param_group(param_group)
        if hasattr(self, "_told"):
            try:
                self.check()
            except ConfigError:
                self.param_groups.pop()
                raise

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what `state_dict()` of an optimizer with the same groups has returned, torch's own too."""
        own, saved = self.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in own] != [len(group["params"]) for group in saved]:
            raise ConfigError(
                f"load_state_dict: the saved optimizer has {len(saved)} groups of "
                f"{[len(group['params']) for group in saved]} parameters, this one {len(own)} of "
                f"{[len(group['params']) for group in own]}"
            )
        params = chain.from_iterable(group["params"] for group in own)
        indices = chain.from_iterable(group["params"] for group in saved)
        states = state_dict["state"]
        self.state = {param: states[at] for param, at in zip(params, indices, strict=True) if at in states}
        for group, values in zip(own, saved, strict=True):
            group.update({key: value for key, value in values.items() if key != "params"})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Take one step from the accumulated gradients. ConfigError for a closure: the engine runs backward itself."""
        if closure is not None:
            raise ConfigError(
                "the optimizer of an engine takes no closure: call engine.backward(loss), then engine.step()"
            )
        self._run(self.param_groups)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step consumes gradients. `engine.zero_grad()` drops accumulated ones."""

    def train(self, mode: bool = True) -> None:
        """Do nothing: only optimizers that keep two sets of weights have modes, and these are refused."""

    def eval(self) -> None:
        """Do nothing, as `train`."""

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped, because a gradient was not finite."""
        return self._skipped()

    @property
    def loss_scale(self) -> float:
        """The present loss scale of fp16; 1 in other precisions."""
        return self.loss_scaler.cur_scale

    cur_scale = loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale follows overflows."""
        return self.loss_scaler.dynamic

    @property
    def _global_grad_norm(self) -> float:
        return self._norm()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        raise UnknownNameError(
            f"optimizer.{name}: the optimizer of an engine has no such member. Weights, gradients and states are in "
            "tiers: infinity.state(param) reads and writes those of a parameter, optimizer.state[param] its states"
        )

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that the program has brought, or one without a rule; both have these parameter groups."""
        return self._inner

    @property
    def step_counts(self) -> dict[str, int]:
        """How often each trained parameter has been stepped, by name; what Adam corrects its bias with."""
        return dict(self._stepper.steps)

    def set_step_counts(self, counts: int | Mapping[str, int]) -> None:
        """Set how often parameters have been stepped: all of them, or some by their names; the same on every rank.

        For states that come from another program, beside `infinity.state(param).exp_avg = ...`. ConfigError for a name
        that is not trained, a count below 0, or an optimizer that counts by itself.
        """
        steps = self._stepper.steps
        if not self._stepper.rule.joins:
            raise ConfigError(
                f"set_step_counts: torch steps {self.kind}, which counts by itself: assign optimizer.state[param] with "
                "all of its values"
            )
        given = dict.fromkeys(steps, counts) if isinstance(counts, int) else dict(counts)
        if unknown := given.keys() - steps.keys():
            raise ConfigError(f"set_step_counts: {min(unknown)} is no trained parameter of this engine")
        for name, count in given.items():
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count < 2**31:
                raise ConfigError(f"set_step_counts: {name} was stepped {count!r} times: pass a whole number from 0 on")
        steps.update(given)


def _members(groups: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the ids of each group's parameters."""
    return [[*map(id, group["params"])] for group in groups]
