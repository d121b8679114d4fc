"""`optimizer.state` of an engine: a parameter's states from their tiers, whole, as torch's optimizers show them.

What is written there, in place too, goes to the tiers at once. Reading a value is collective, like `infinity.state`;
every rank must write the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from infinity.checkpoint.codec import decode, encode
from infinity.distributed.collectives import exchange_values
from infinity.errors import ConfigError, StateError
from infinity.optim.stepper import Stepper
from infinity.plan.types import Kind
from infinity.zero.param_access import ParamAccess
from infinity.zero.states import ParameterState


class OptimizerStates(MutableMapping[nn.Parameter, "StatesOf"]):
    """The states of all parameters that an engine trains, by parameter; it has those that were stepped.

    params: returns the model's parameters.
    """

    def __init__(self, access: ParamAccess, stepper: Stepper, params: Callable[[], Iterator[nn.Parameter]]) -> None:
        self._access = access
        self._stepper = stepper
        self._params = params

    def __getitem__(self, param: nn.Parameter) -> StatesOf:
        if not self._has(param):
            raise ConfigError(
                "optimizer.state has the parameters of the engine's model only, by themselves: write "
                "optimizer.state[model.layer.weight]"
            )
        return StatesOf(ParameterState(param), self._stepper, self._access)

    def __setitem__(self, param: nn.Parameter, values: Mapping[str, Any]) -> None:
        self[param].replace(values)

    def __delitem__(self, param: nn.Parameter) -> None:
        self[param].clear()

    def __contains__(self, param: object) -> bool:
        return any(each is param for each in self)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (param for param in self._params() if self._has(param) and self[param].stepped)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _has(self, param: object) -> bool:
        """Whether it is a parameter of the engine, which is not closed."""
        return getattr(param, "__dict__", {}).get("_infinity_owner") is self._access

    def clear(self) -> None:
        """Have all parameters begin anew."""
        self.replace({})

    def replace(self, given: Mapping[Any, Mapping[str, Any]]) -> None:
        """Take the states of `given`; parameters that are not in it begin anew."""
        values = {id(param): states for param, states in given.items()}
        for param in self._params():
            states = self[param]
            if (new := values.pop(id(param), None)) or states.stepped:
                states.replace(dict(new or {}))
        if values:
            raise ConfigError("optimizer.state: what was assigned has states of a parameter that is not in the model")


class StatesOf(MutableMapping[str, Any]):
    """The states of one parameter under torch's names: none before its first step, as in torch."""

    def __init__(self, state: ParameterState, stepper: Stepper, access: ParamAccess) -> None:
        self._state = state
        self._stepper = stepper
        self._access = access
        self._name = state.name

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has made its states."""
        return self._stepper.steps.get(self._name, 0) > 0

    @property
    def age(self) -> int:
        """Another number once a step or a load may have changed the states."""
        return self._stepper.age

    @property
    def _kinds(self) -> dict[str, Kind]:
        """What is kept of an element, by torch's name."""
        return dict(zip(self._stepper.rule.names, self._stepper.rule.moments, strict=True))

    def __getitem__(self, key: str) -> Any:
        if not self.stepped:
            raise KeyError(key)
        if key in self._kinds:
            return StateTensor.of(self._state.full(self._kinds[key].value), self, key)
        value = self._singles()[key]
        return StateTensor.of(value.clone(), self, key) if isinstance(value, Tensor) else value

    def __setitem__(self, key: str, value: Any) -> None:
        self._check_trained()
        if not (self.stepped or self._stepper.rule.counted):
            raise StateError(
                f"optimizer.state: {self._name} has no {key} before its first step; assign all of its states at once "
                f"(optimizer.state[param] = {{...}}): {', '.join(self._wanted())}"
            )
        if key in self._kinds:
            self._state.set_full(self._kinds[key].value, torch.as_tensor(value, device="cpu"))
        elif key not in (singles := self._singles()):
            self._refuse([key])
        elif self._stepper.rule.joins:
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
        kinds, rule = self._kinds, self._stepper.rule
        if values and (missing := [key for key in self._wanted() if key not in values]):
            raise ConfigError(f"optimizer.state: what was assigned to {self._name} lacks {', '.join(missing)}")
        singles = {key: value for key, value in values.items() if key not in kinds}
        if rule.joins and (unknown := [key for key in singles if key != "step"]):
            self._refuse(unknown)
        for key, kind in kinds.items():
            value = values[key] if values else torch.full(self._state.shape, rule.start, device="cpu")
            self._state.set_full(kind.value, torch.as_tensor(value, device="cpu"))
        if not values:
            self._count(0)
        elif rule.joins:
            self._count(values.get("step", 1))
        else:
            self._count(max(1, int(values.get("step", 1))))
            self._put(singles)

    def _wanted(self) -> tuple[str, ...]:
        """What has to be assigned together."""
        return (*(["step"] if self._stepper.rule.counted else []), *self._kinds)

    def _singles(self) -> dict[str, Any]:
        """Return what the optimizer keeps of the parameter in one value. Collective, unless a native rule steps it."""
        rule, world = self._stepper.rule, self._access.groups.world
        if rule.joins:
            return {"step": torch.tensor(float(self._stepper.steps[self._name]), device="cpu")} if rule.counted else {}
        own = self._stepper.parameter_scalars().get(self._name)
        if world.size == 1:
            return own or {}
        rows = exchange_values(own and encode(own), world, f"state of {self._name}")
        return next((decode(row) for row in rows if row), {})

    def _put(self, singles: Mapping[str, Any]) -> None:
        """Replace what the optimizer keeps in one value, on the ranks that step the parameter."""
        scalars = self._stepper.parameter_scalars()
        if self._state.local("master").numel():
            scalars[self._name] = decode(encode(dict(singles)))
        self._stepper.load_parameter_scalars(scalars)

    def _count(self, value: Any) -> None:
        """Set how often the parameter has been stepped."""
        count = float(value)
        if not (count.is_integer() and 0 <= count < 2**31):
            raise ConfigError(f"optimizer.state: {self._name} was stepped {count:g} times: write a whole number from 0")
        # Single values are kept by the count.
        scalars = self._stepper.parameter_scalars()
        if not count:
            scalars.pop(self._name, None)
        self._stepper.steps[self._name] = int(count)
        self._stepper.load_parameter_scalars(scalars)

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
