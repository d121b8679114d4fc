"""Guards against pickling, loading into and saving a model that an engine trains.

Pickling and loading would appear to work. A pickle would hold placeholders and the engine's hooks; loaded values would
be lost with the next step, which writes the weights from their masters. Saving a partitioned model would fail halfway
and leave half a folder. So each of them raises a StateError at its beginning that says what to do instead.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from infinity.errors import StateError
from infinity.zero.parameter import (
    SAVE_PRETRAINED,
    STATE_DICT,
    is_elsewhere,
    is_released,
    is_writable,
    name_of,
    owner_of,
)

_NAME = "_infinity_engine"
_PARTS = "_infinity_parts"
_SAVE = "save_pretrained"


class ModelGuards:
    """Guards of one model, until `remove`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # Before all else of it: a pickler meets the guard first, and has written nothing.
        rest = dict(model.__dict__)
        model.__dict__.clear()
        model.__dict__.update({_NAME: _NotPickled(model), **rest})
        self._handles = [
            register(hook)
            for module in model.modules()
            if module._parameters
            for register, hook in (
                (module.register_load_state_dict_pre_hook, _before_load),
                (module.register_state_dict_pre_hook, _before_state_dict),
            )
        ]  # fmt: skip
        self._savers = [module for module in model.modules() if hasattr(type(module), _SAVE)]
        for module in self._savers:
            module.__dict__.setdefault(_SAVE, _SaveWhole(module))

    def remove(self) -> None:
        """Take the guards away."""
        self._model.__dict__.pop(_NAME, None)
        for module in self._savers:
            if isinstance(module.__dict__.get(_SAVE), _SaveWhole):
                del module.__dict__[_SAVE]
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def name_engine(model: nn.Module, engine: object) -> None:
    """Have a guarded model keep its engine, for `engines_of`. The two are collected together."""
    model.__dict__[_NAME] = _NotPickled(model, engine)


def engines_of(model: nn.Module) -> list[Any]:
    """Return the open engines of a model and of models in it."""
    held = (module.__dict__.get(_NAME) for module in model.modules())
    return [each.engine for each in held if isinstance(each, _NotPickled) and each.engine is not None]


def mark_parts(model: nn.Module, reason: str) -> None:
    """Note why the weights that a closed engine has left in a model are parts only."""
    model.__dict__[_PARTS] = reason


def why_parts(model: nn.Module) -> str | None:
    """Return what `mark_parts` has noted; None for a model that is whole."""
    return model.__dict__.get(_PARTS)


class _NotPickled:
    """Stands in the model's attributes. In a deep copy, which is free of the engine, stands None."""

    def __init__(self, model: nn.Module, engine: object = None) -> None:
        self._model = model
        self.engine = engine

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_pickle(self._model, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Leave the engine's hooks out of the copy: what is in `memo` is not copied again."""
        for module in self._model.modules():
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                others = {key: hook for key, hook in hooks.items() if not _is_ours(hook)}
                if len(others) < len(hooks):
                    memo[id(hooks)] = OrderedDict(copy.deepcopy(others, memo))


class _SaveWhole:
    """Stands for a module's `save_pretrained`, which makes a folder before it looks for values: where they are not
    there, and the program gives none, it is told before.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, kwargs.get("state_dict")) if isinstance(value, Mapping)]
        if not given:
            _need(self._module.parameters(), SAVE_PRETRAINED)
        return getattr(type(self._module), _SAVE)(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the module is whole, and saves itself.
        module = memo[id(self._module)]
        return MethodType(getattr(type(module), _SAVE), module)


def refuse_pickle(module: nn.Module, protocol: Any) -> NoReturn:
    """The `__reduce_ex__` of an engine, and of the model that it trains."""
    raise not_pickled(type(module).__name__)


def not_pickled(what: str) -> StateError:
    """The error of pickling a part of an engine."""
    return StateError(
        f"cannot pickle {what}: its values lie in the partitions of an engine. Save "
        "engine.state_dict(), call engine.export(folder) or engine.save_checkpoint(folder); or pickle a copy of the "
        "model (`with infinity.read(model): copied = copy.deepcopy(model)`)"
    )


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("infinity.zero.")


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if keep_vars:
        return
    params = [param for param in module._parameters.values() if param is not None]
    _need(params, STATE_DICT)
    owners = (param.__dict__.get("_infinity_access") for param in params)
    if (access := next(filter(None, owners), None)) is not None:
        # Whole values are a mixture, too, after a step or a load that has failed in its middle.
        access.health.check(f"take the {STATE_DICT} of its model")


def _need(params: Iterable[nn.Parameter], use: str) -> None:
    """Have the owner make released parameters whole, or say why it does not."""
    released = next(filter(is_released, params), None)
    if released is not None:
        owner_of(released).materialize([released], use)


def _before_load(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, param in module._parameters.items():
        engine = None if param is None else param.__dict__.get("_infinity_access")
        if param is None or engine is None or f"{prefix}{name}" not in state or is_writable(param):
            continue
        if is_elsewhere(param):
            _need([param], "load_state_dict()")
        raise StateError(
            f"{name_of(param)} belongs to an engine, whose next step would undo what load_state_dict puts there; "
            "nothing of this module was loaded: use `with infinity.modify(model): model.load_state_dict(...)`, or "
            "engine.load_checkpoint(folder)"
        )
