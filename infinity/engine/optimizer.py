"""The optimizer object that a training loop holds: live parameter groups; the states are in the tiers.

`optimizer.state` shows a parameter's states from their tiers, whole, as torch's optimizers show them. What is written
there, in place too, goes to the tiers at once. Reading a value is collective, like `infinity.state`;
every rank must write the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import chain
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from infinity.checkpoint.run_state import decode, encode
from infinity.distributed.collectives import exchange_values
from infinity.errors import ConfigError, StateError, UnknownNameError
from infinity.optim.update_rules import UpdateRule
from infinity.plan.types import Kind
from infinity.step.loss_scaler import LossScaler
from infinity.step.optimizer_step import OptimizerStep
from infinity.zero.access import ParamAccess
from infinity.zero.gather import GatheredMemory
from infinity.zero.parameter import ParameterOffload
from infinity.zero.states import ParameterState


class LossScalerView:
    """The loss scale under the names of DeepSpeed's scalers, live: `optimizer.loss_scaler`. Read-only."""

    def __init__(self, step: OptimizerStep) -> None:
        self._step = step

    @property
    def cur_scale(self) -> float:
        """What the loss is multiplied by now."""
        return self._step.loss_scale

    loss_scale = cur_scale

    @property
    def dynamic(self) -> bool:
        """Whether it follows overflows."""
        return self._step.scaler is not None and self._step.scaler.dynamic

    @property
    def scale_window(self) -> int:
        """Good steps after which a dynamic scale doubles."""
        return (self._step.scaler or LossScaler()).loss_scale_window


class TieredOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer`, so that torch's schedulers accept it, whose states live where the plan says.

    `param_groups` and `state` are live, and those of the program's own optimizer are the same objects: what is written
    there applies from the next step on, or `check` refuses it. The engine calls `step`. What DeepSpeed's optimizers
    have besides is here under its names: `overflow`, `loss_scale`, `cur_scale`, `loss_scaler`, `_global_grad_norm`,
    `optimizer`, `parameter_offload`, `train` and `eval`.
    """

    def __init__(
        self, groups: list[dict[str, Any]], defaults: dict[str, Any], *, kind: str, step: OptimizerStep,
        memory: GatheredMemory, access: ParamAccess, module: nn.Module, given: torch.optim.Optimizer | None = None,
    ) -> None:  # fmt: skip
        """kind: the update rule's name, such as "AdamW". step: steps the partitions. memory: has whole units follow.
        given: the program's own optimizer.
        """
        self._step = step
        self._memory, self._access = memory, access
        self._module = module
        self._states = states = OptimizerStates(access, step, module)
        self.loss_scaler = LossScalerView(step)
        self.kind = kind
        self.parameter_offload = ParameterOffload(module)
        self._inner = given if given is not None else torch.optim.Optimizer(groups, defaults)
        vars(self._inner)["state"] = states
        listed = self._inner.param_groups
        super().__init__(listed, defaults)
        self.param_groups = listed
        # Of each group as the step knows it, the number of its rule and the ids of its parameters.
        self._told = [(step.rules.number(group), [*map(id, group["params"])]) for group in listed]
        self._names = {id(param): name for name, param in module.named_parameters()}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, which are those of the program's own optimizer."""
        return self._inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        vars(self._inner)["param_groups"] = groups

    @property
    def state(self) -> Any:
        """The states by parameter, live: see `infinity.engine.optimizer`."""
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
        members, rules = list[tuple[int, list[int]]](), self._step.rules
        for at, group in enumerate(self.param_groups):
            try:
                members.append((rules.number(group), [*map(id, group["params"])]))
                if rules.by_group and members[at:] != self._told[at : at + 1]:
                    self._check_rule(at, group)
                rules.hyper(group)
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"param_groups[{at}] has not what {self.kind} steps with ({type(error).__name__}: {error}): give "
                    f"it {', '.join(self.defaults)}"
                ) from error
        if members != self._told:
            self._step.regroup(self._group_of())
            self._told = members

    def _check_rule(self, at: int, group: Mapping[str, Any]) -> None:
        """ConfigError where a group names another rule than the one whose states its parameters have."""
        names = filter(None, (self._names.get(id(param)) for param in group["params"] if param.requires_grad))
        number, params = self._step.rules.number(group), self._access.params
        if other := next((name for name in names if params[name].rule != number), None):
            raise ConfigError(
                f"param_groups[{at}]: use_muon is {group['use_muon']!r}, and {other} has the states of the other "
                "optimizer: leave it in a group with the value that it had when the engine was made"
            )

    def _group_of(self) -> dict[str, int]:
        """Return the group of each trained parameter, by name; ConfigError for one that cannot be stepped so."""
        names = {id(param): name for name, param in self._module.named_parameters()}
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
                if name in self._step.steps:
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
        self._step.apply(self.param_groups)
        self._memory.follow_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the step consumes gradients. `engine.zero_grad()` drops accumulated ones."""

    def train(self, mode: bool = True) -> None:
        """Do nothing: only optimizers that keep two sets of weights have modes, and these are refused."""

    def eval(self) -> None:
        """Do nothing, as `train`."""

    @property
    def overflow(self) -> bool:
        """Whether the latest step was skipped, because a gradient was not finite."""
        return self._step.verdict is not None and self._step.verdict.skipped

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
        return self._step.norm

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
        return dict(self._step.steps)

    def set_step_counts(self, counts: int | Mapping[str, int]) -> None:
        """Set how often parameters have been stepped: all of them, or some by their names; the same on every rank.

        For states that come from another program, beside `infinity.state(param).exp_avg = ...`. ConfigError for a name
        that is not trained, a count below 0, or an optimizer that counts by itself.
        """
        steps = self._step.steps
        if self._step.rules.scalars:
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


class OptimizerStates(MutableMapping[nn.Parameter, "StatesOf"]):
    """The states of all parameters that an engine trains, by parameter; it has those that were stepped."""

    def __init__(self, access: ParamAccess, step: OptimizerStep, module: nn.Module) -> None:
        self._access = access
        self._step = step
        self._module = module

    def __getitem__(self, param: nn.Parameter) -> StatesOf:
        if not self._has(param):
            raise ConfigError(
                "optimizer.state has the parameters of the engine's model only, by themselves: write "
                "optimizer.state[model.layer.weight]"
            )
        return StatesOf(ParameterState(param), self._step, self._access)

    def __setitem__(self, param: nn.Parameter, values: Mapping[str, Any]) -> None:
        self[param].replace(values)

    def __delitem__(self, param: nn.Parameter) -> None:
        self[param].clear()

    def __contains__(self, param: object) -> bool:
        return any(each is param for each in self)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._module.parameters() if self._has(param) and self[param].stepped)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _has(self, param: object) -> bool:
        """Whether it is a parameter of the engine, which is not closed."""
        return getattr(param, "__dict__", {}).get("_infinity_access") is self._access

    def clear(self) -> None:
        """Have all parameters begin anew."""
        self.replace({})

    def replace(self, given: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take the states of `given`; parameters that are not in it begin anew."""
        values = {id(param): states for param, states in given.items()}
        for param in self._module.parameters():
            states = self[param]
            if (new := values.pop(id(param), None)) or states.stepped:
                states.replace(dict(new or {}))
        if values:
            raise ConfigError("optimizer.state: what was assigned has states of a parameter that is not in the model")


# What an optimizer that counts has beside the states of elements; in bitsandbytes' also the values of all codes.
_BESIDE = ("step", "qmap1", "qmap2")


class StatesOf(MutableMapping[str, Any]):
    """The states of one parameter under torch's names: none before its first step, as in torch."""

    def __init__(self, state: ParameterState, step: OptimizerStep, access: ParamAccess) -> None:
        self._state = state
        self._step = step
        self._access = access
        self._name = state.name

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made its states."""
        return self._step.steps.get(self._name, 0) > 0

    @property
    def age(self) -> int:
        """Another number once a step or a load may have changed the states."""
        return self._step.age

    @property
    def _kinds(self) -> dict[str, Kind]:
        """What is kept of an element, by torch's name."""
        return dict(zip(self._rule.names, self._rule.moments, strict=True))

    @property
    def _rule(self) -> UpdateRule:
        return self._step.rules[self._access.params[self._name].rule]

    def __getitem__(self, key: str) -> Any:
        if not self.stepped:
            raise KeyError(key)
        if key in self._kinds:
            return StateTensor.of(self._state.full(self._kinds[key].value), self, key)
        value = self._singles()[key]
        return StateTensor.of(value.clone(), self, key) if isinstance(value, Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_trained()
        if not (self.stepped or self._rule.counted):
            raise StateError(
                f"optimizer.state: {self._name} has no {key} before its first step; assign all of its states at once "
                f"(optimizer.state[param] = {{...}}): {', '.join(self._wanted())}"
            )
        if key in self._kinds:
            self._state.set_full(self._kinds[key].value, torch.as_tensor(value, device="cpu"))
        elif key not in (singles := self._singles()):
            self._refuse([key])
        elif not self._rule.scalars:
            self._count(value)
        else:
            self._put({**singles, key: value})

    def __delitem__(self, key: str) -> None:
        raise StateError(
            f"optimizer.state: {self._name} keeps all of its states or none: write zeros to {key}, or have the "
            "parameter begin anew with optimizer.state[param].clear()"
        )

    def __iter__(self) -> Iterator[str]:
        return iter((*self._singles(), *self._kinds) if self.stepped else ())

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> Any:
        # A plain dictionary, which `torch.load` takes from anybody.
        plain = ((key, torch.clone(value) if isinstance(value, Tensor) else value) for key, value in self.items())
        return OrderedDict, (), None, None, plain

    def __repr__(self) -> str:
        return f"states of {self._name} on their tiers: {', '.join(self) or 'none before its first step'}"

    def clear(self) -> None:
        """Have the parameter begin anew: its next step is its first."""
        self.replace({})

    def replace(self, values: Mapping[str, Any]) -> None:
        """Take all states; none: the parameter begins anew. ConfigError, with nothing changed, where some are missing
        or no such states are kept.
        """
        self._check_trained()
        kinds, rule = self._kinds, self._rule
        if values and (missing := [key for key in self._wanted() if key not in values]):
            raise ConfigError(f"optimizer.state: what was assigned to {self._name} lacks {', '.join(missing)}")
        singles = {key: value for key, value in values.items() if key not in kinds}
        if not rule.scalars and (unknown := [key for key in singles if key not in _BESIDE]):
            self._refuse(unknown)
        for key, kind in kinds.items():
            if values:
                self._state.set_full(kind.value, torch.as_tensor(values[key], device="cpu"))
            else:
                self._state.set_full(kind.value, torch.full(self._state.shape_of(kind.value), rule.start, device="cpu"))
        if not values:
            self._count(0)
        elif not rule.scalars:
            self._count(values.get("step", 1))
        else:
            self._count(max(1, int(values.get("step", 1))))
            self._put(singles)

    def _wanted(self) -> tuple[str, ...]:
        """What has to be assigned together."""
        return (*(["step"] if self._rule.counted else []), *self._kinds)

    def _singles(self) -> dict[str, Any]:
        """Return what the optimizer keeps of the parameter in one value. Collective, unless a native rule steps it."""
        rule, world = self._rule, self._access.groups.world
        if not rule.scalars:
            return {"step": torch.tensor(float(self._step.steps[self._name]), device="cpu")} if rule.counted else {}
        own = self._step.parameter_scalars().get(self._name)
        if world.size == 1:
            return own or {}
        rows = exchange_values(own and encode(own), world, f"state of {self._name}")
        return next((decode(row) for row in rows if row), {})

    def _put(self, singles: Mapping[str, Any]) -> None:
        """Replace what the optimizer keeps in one value, on the ranks that step the parameter."""
        scalars = self._step.parameter_scalars()
        if self._state.local("master").numel():
            scalars[self._name] = decode(encode(dict(singles)))
        self._step.load_parameter_scalars(scalars)

    def _count(self, value: Any) -> None:
        """Set how often the parameter has been stepped."""
        count = float(value)
        if not (count.is_integer() and 0 <= count < 2**31):
            raise ConfigError(f"optimizer.state: {self._name} was stepped {count:g} times: write a whole number from 0")
        # Single values are kept by the count.
        scalars = self._step.parameter_scalars()
        if not count:
            scalars.pop(self._name, None)
        self._step.steps[self._name] = int(count)
        self._step.load_parameter_scalars(scalars)

    def _check_trained(self) -> None:
        if not self._state.trainable:
            raise StateError(f"optimizer.state: {self._name} is frozen and has no states")

    def _refuse(self, keys: list[str]) -> NoReturn:
        raise ConfigError(
            f"optimizer.state: {self._name} has no {', '.join(keys)}: its optimizer keeps "
            f"{', '.join((*self._singles(), *self._kinds)) or 'nothing'}"
        )


class StateTensor(Tensor):
    """A whole state (fp32, in CPU memory): what is written into it, or into a view of it, goes to its tier at once.

    StateError for its use after the next step or load, which has changed the state.
    """

    @staticmethod
    def of(root: Tensor, states: StatesOf, key: str, *, alias: Tensor | None = None) -> StateTensor:
        """Make one of the value `root`; alias: a view of it, which is returned in its place."""
        plain = root if alias is None else alias
        made = plain.as_subclass(StateTensor)
        vars(made).update(source=(root, states, key, states.age), seen=plain._version)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [value for value in _flat((args, kwargs or {})) if isinstance(value, StateTensor)]
        with torch._C.DisableTorchFunctionSubclass():
            for each in given:
                _, states, key, age = vars(each)["source"]
                if age != states.age:
                    raise StateError(
                        f"this {key} was read before the latest step or load, which has changed it: read "
                        f"optimizer.state[param][{key!r}] again"
                    )
            found = func(*args, **(kwargs or {}))
            for each in given:
                if each._version != vars(each)["seen"]:
                    root, states, key, _ = vars(each)["source"]
                    vars(each)["seen"] = each._version
                    states[key] = root
            return _aliased(found, given)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.clone(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: Any) -> Tensor:
        return torch.clone(self)


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, (list, tuple)):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _aliased(found: Any, given: list[StateTensor]) -> Any:
    """Return a result so that nothing is written past the tiers: views write through, arrays are read only."""
    if isinstance(found, (list, tuple)) and type(found) in (list, tuple):
        return type(found)(_aliased(each, given) for each in found)
    if isinstance(found, np.ndarray):
        found.setflags(write=False)
    if type(found) is Tensor and found.is_cpu:
        for each in given:
            root, states, key, _ = vars(each)["source"]
            if root.untyped_storage().data_ptr() == found.untyped_storage().data_ptr() and root.numel():
                return StateTensor.of(root, states, key, alias=found)
    return found
