"""Modules that a program wants gathered as one unit, whatever they call inside: DeepSpeed's leaf modules.

A mark on the module, which cutting into units reads beside `zero_optimization.leaf_module`; so it is set before
`infinity.initialize`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from infinity.errors import ConfigError, StateError
from infinity.plan.spec import LEAF_MARK
from infinity.zero.parameter import name_of

Kinds = type[nn.Module] | str | Iterable[type[nn.Module] | str]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Kinds, raise_if_not_found: bool = True
) -> list[nn.Module]:  # fmt: skip
    """Have every module of these classes fetched as one unit at stage 3; return the modules.

    leaf_module_classes: classes (their subclasses count), or names of classes, with or without their module. For a
    module that chooses by the data which of its members run, such as a mixture of experts: all ranks gather it whole
    then. Known kinds of such modules are found without it.

    Raises ConfigError where the model has no such module, StateError after `infinity.initialize`.
    """
    return _mark_kinds(model, leaf_module_classes, marked=True, needed=raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Kinds, raise_if_not_found: bool = True
) -> list[nn.Module]:  # fmt: skip
    """Undo `set_z3_leaf_modules` for the modules of these classes; return the modules. It raises the same errors."""
    return _mark_kinds(model, leaf_module_classes, marked=False, needed=raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Do the same as `set_z3_leaf_modules` for modules by their full names; return the modules, and the names that the
    model has not, which are a ConfigError if `raise_if_not_found`.
    """
    return _mark_named(model, module_names, str.__eq__, needed=raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Iterable[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Do the same as `set_z3_leaf_modules_by_name` for modules whose full names end in one of these."""
    return _mark_named(model, module_name_suffixes, str.endswith, needed=raise_if_not_found)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `set_z3_leaf_modules` has marked."""
    return [module for module in model.modules() if module.__dict__.get(LEAF_MARK, False)]


def z3_leaf_module(module: nn.Module) -> bool:
    """Return whether `set_z3_leaf_modules` has marked the module."""
    return bool(module.__dict__.get(LEAF_MARK, False))


def _mark_kinds(model: nn.Module, given: Kinds, *, marked: bool, needed: bool) -> list[nn.Module]:
    kinds = [given] if isinstance(given, type | str) else list(given)
    found = [module for module in model.modules() if any(_is_of(module, kind) for kind in kinds)]
    if not found and needed:
        names = ", ".join(kind if isinstance(kind, str) else kind.__name__ for kind in kinds) or "no class"
        raise ConfigError(
            f"leaf modules: {type(model).__name__} has no module of {names}; its classes are "
            + ", ".join(sorted({type(module).__name__ for module in model.modules()}))
        )
    return _mark(model, found, marked=marked)


def _mark_named(
    model: nn.Module, given: Iterable[str], matches: Callable[[str, str], bool], *, needed: bool
) -> tuple[list[nn.Module], list[str]]:  # fmt: skip
    wanted, named = list(given), dict(model.named_modules())
    missing = [name for name in wanted if not any(matches(path, name) for path in named)]
    if missing and needed:
        raise ConfigError(f"leaf modules: {type(model).__name__} has no module {missing[0]!r}; see named_modules()")
    found = [module for path, module in named.items() if any(matches(path, name) for name in wanted)]
    return _mark(model, found, marked=True), missing


def _mark(model: nn.Module, found: list[nn.Module], *, marked: bool) -> list[nn.Module]:
    for param in model.parameters():
        owner = param.__dict__.get("_infinity_owner")
        if owner is not None and not owner.coordinator.closed:
            raise StateError(
                f"leaf modules decide how a model is cut into units, and {name_of(param)} is in an engine's units "
                "already: set them before infinity.initialize()"
            )
    for module in found:
        module.__dict__[LEAF_MARK] = marked
    return found


def _is_of(module: nn.Module, kind: type[nn.Module] | str) -> bool:
    if isinstance(kind, type):
        return isinstance(module, kind)
    own = type(module)
    return kind in (own.__name__, f"{own.__module__}.{own.__qualname__}")
