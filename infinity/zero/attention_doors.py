"""What stands around the attention of transformers' models, and around the functions that make their masks. Only this
file puts it there, and takes it out again.

[Note: doors] transformers' attention layers ask `ALL_ATTENTION_FUNCTIONS` for their function, and their models make
masks by functions of `transformers.masking_utils`. Both are names in the file of a model's class. While a model needs
it, their places there are taken by an interface and by functions that give those of before through what stands around
them. Models for which nothing does pass through as if nothing were there. Several may stand around one model, each
around the one before: attention of blocks, then the exchange of heads along a sequence axis.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from torch import nn

from infinity.errors import ConfigError

# Called as a function of transformers' interface, with the one that it stands around before these arguments.
AroundAttention = Callable[..., Any]
# Called with what makes the mask of some arguments, the function's name and its arguments by name.
AroundMask = Callable[[Callable[[dict[str, Any]], Any], str, dict[str, Any]], Any]

# What stands around the attention of each module, and the masks of each configuration (by identity), innermost first.
_attention: weakref.WeakKeyDictionary[nn.Module, list[AroundAttention]] = weakref.WeakKeyDictionary()
_masks: dict[int, list[AroundMask]] = {}
# How many need the doors in a file, and what stood there before.
_users: Counter[str] = Counter()
_before: dict[str, dict[str, Any]] = {}


def models_of_transformers(model: nn.Module) -> list[Any]:
    """Return the models of transformers that a model is or has."""
    transformers = sys.modules.get("transformers.modeling_utils")
    return [each for each in model.modules() if transformers and isinstance(each, transformers.PreTrainedModel)]


def all_causal(model: nn.Module) -> bool:
    """Return whether no layer of a model says that its tokens see later ones."""
    return all(getattr(module, "is_causal", True) for module in model.modules())


def forward_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of a module by name."""
    given = inspect.signature(type(module).forward).bind_partial(module, *args, **kwargs).arguments
    return given | given.pop("kwargs", {})


def check_options(
    name: str, options: Mapping[str, Any], refused: Sequence[str], *, dropout: str, others: str, way_out: str
) -> None:
    """ConfigError for a layer that drops out attention, or gives its function one of the `refused` options. dropout,
    others: why that is not right here. way_out: what to do instead.
    """
    if options.get("dropout"):
        raise ConfigError(
            f"{name} drops out attention ({options['dropout']:g}), {dropout}: set attention_dropout to 0 in the "
            f"model's configuration, or {way_out}"
        )
    for option in refused:
        if options.get(option) is not None:
            raise ConfigError(f"{name} gives attention {option}, {others}: {way_out}")


def open_doors(model: nn.Module, attention: AroundAttention, mask: AroundMask) -> ExitStack:
    """Put functions around the attention and the masks of a model; closing what is returned takes them out."""
    undo, models = ExitStack(), models_of_transformers(model)
    for module in model.modules():
        _attention.setdefault(module, []).append(attention)
        undo.callback(_attention[module].remove, attention)
    for config in {id(each.config): each.config for each in models}:
        _masks.setdefault(config, []).append(mask)
        undo.callback(_take_out, config, mask)
    for file in {cls.__module__ for each in models for module in each.modules() for cls in type(module).__mro__}:
        if hasattr(sys.modules.get(file), "ALL_ATTENTION_FUNCTIONS") and file != "transformers.modeling_utils":
            _open(file)
            undo.callback(_close, file)
    return undo


def _take_out(config: int, mask: AroundMask) -> None:
    _masks[config].remove(mask)
    if not _masks[config]:
        # Another configuration may get its identity.
        del _masks[config]


def _open(file: str) -> None:
    """Take the places of a file's interface and mask functions: see [Note: doors]."""
    _users[file] += 1
    if _users[file] > 1:
        return
    module: Any = sys.modules[file]
    masks = {
        name: value for name, value in vars(module).items()
        if name.startswith("create_") and getattr(value, "__module__", "") == "transformers.masking_utils"
    }  # fmt: skip
    _before[file] = {**masks, "ALL_ATTENTION_FUNCTIONS": module.ALL_ATTENTION_FUNCTIONS}
    for name, function in masks.items():
        setattr(module, name, partial(_make_mask, function))
    module.ALL_ATTENTION_FUNCTIONS = _Door(module.ALL_ATTENTION_FUNCTIONS)


def _close(file: str) -> None:
    _users[file] -= 1
    if not _users[file]:
        for name, value in _before.pop(file).items():
            setattr(sys.modules[file], name, value)


class _Door:
    """transformers' interface of attention functions, each within what stands around its layer's."""

    def __init__(self, interface: Any) -> None:
        self._interface = interface

    def get_interface(self, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return partial(_attend, self._interface.get_interface(implementation, default))

    def __getitem__(self, implementation: str) -> Callable[..., Any]:
        return partial(_attend, self._interface[implementation])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interface, name)


def _attend(core: Callable[..., Any], module: Any, *args: Any, **options: Any) -> Any:
    for function in _attention.get(module, ()):
        core = partial(function, core)
    return core(module, *args, **options)


def _make_mask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    given |= given.pop("kwargs", {})

    def make(arguments: dict[str, Any]) -> Any:
        return original(**arguments)

    for function in _masks.get(id(given.get("config")), ()):
        make = partial(function, make, original.__name__)
    return make(given)
