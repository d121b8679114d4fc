"""A parameter while it is partitioned: it looks whole, and its owner is asked when its data is used.

While released, `param.data` is a NaN scalar expanded to the logical shape, and the parameter's class is
`ReleasedParameter`, whose `__torch_function__` answers questions about shape, dtype, gradient and hooks, and passes
every other use to the parameter's owner. The owner either makes the parameter whole (a forward is running, or the
model is being built) or raises an error that names the parameter and the fix. `isinstance(p, nn.Parameter)` stays true.

What programs written for DeepSpeed read from a parameter and from an optimizer, while they believe it is there.

A program that sees `ds_id` on a parameter imports deepspeed. So the attributes exist only where the conventions ask for
them (`infinity.config.Conventions.parameter_attributes`); an engine's own code reads none of them.

Parameters of a pipeline's other stages: they keep their names and shapes in the model, and have no values here.

Modules that a program wants gathered as one unit, whatever they call inside: DeepSpeed's leaf modules.

A mark on the module, which cutting into units reads beside `zero_optimization.leaf_module`; so it is set before
`infinity.initialize`.
"""

from __future__ import annotations

import enum
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import get_default_nowrap_functions

from infinity.errors import ConfigError, StateError
from infinity.log import warn_once
from infinity.plan.spec import LEAF_MARK

# Uses that ask for every value of a model at once.
STATE_DICT, SAVE_PRETRAINED = "state_dict()", "save_pretrained()"
WHOLE_MODEL_USES = (STATE_DICT, SAVE_PRETRAINED)


class ZeroParamStatus(enum.Enum):
    """Whether a parameter has its data, under DeepSpeed's names: see `infinity.zero.parameter`."""

    # Its data is there, whole.
    AVAILABLE = 1
    # It is partitioned, or on its tier.
    NOT_AVAILABLE = 2
    # Never here: a gather in flight belongs to a unit.
    INFLIGHT = 3


# What `infinity.zero.parameter` gives to a parameter.
FOREIGN_ATTRIBUTES = ("ds_id", "ds_numel", "ds_shape", "ds_status", "ds_active_sub_modules", "partition_numel")


class ParamOwner(Protocol):
    """An object that can make released parameters whole.

    One that has a method `stand_in(param) -> Tensor | None` is asked there for what `param.detach()` returns; one that
    has `fill_by_parts(param, fill) -> bool`, to do without making it whole what replaces all of its values.
    """

    # Whether it does so now for an operation that uses their data.
    @property
    def gathers_on_use(self) -> bool: ...

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        """Make all `params` whole (some may be already), or raise an error that says how the program can."""


class ReleasedParameter(nn.Parameter):
    """The class of a parameter between release and gather; see the module's text."""

    @property
    def ds_status(self) -> ZeroParamStatus:
        """Overrides what a published parameter says of itself while it is whole."""
        if "ds_status" not in self.__dict__:
            raise AttributeError("this parameter has no ds_status: its engine has infinity's own conventions")
        # During a forward or backward whoever uses the data gets it; a program that reads this gathers nothing then.
        away = is_released(self) and not owner_of(self).gathers_on_use
        return ZeroParamStatus.NOT_AVAILABLE if away else ZeroParamStatus.AVAILABLE

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        # The copy is an ordinary parameter, so this one must be whole before deepcopy looks at its class.
        owner_of(self).materialize([self], "copy.deepcopy")
        return nn.Parameter.__deepcopy__(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # As for a copy: the owner provides the data first, or raises.
        owner_of(self).materialize([self], "pickle")
        return nn.Parameter.__reduce_ex__(self, protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                found = func(*args, **kwargs)
            if found is None and func == _GET_GRAD:
                _tell_clipper(sys._getframe(1))
            return found
        if func is Tensor.__repr__:
            return describe_released(args[0])
        if func in _FILLS and _filled_by_parts(func, args, kwargs):
            return args[0] if args else kwargs["tensor"]
        if func is Tensor.detach and is_released(args[0]):
            stand_in = getattr(owner_of(args[0]), "stand_in", None)
            if stand_in is not None and (found := stand_in(args[0])) is not None:
                return found
        used = list(kept(args, kwargs))
        for owner in {id(owner): owner for owner in map(owner_of, filter(is_released, used))}.values():
            owned = [param for param in used if owner_of(param) is owner]
            owner.materialize(owned, getattr(func, "__name__", str(func)))
        return func(*args, **kwargs)


# Functions that need no data of a parameter.
METADATA = {
    *get_default_nowrap_functions(),
    Tensor.size, Tensor.numel, Tensor.nelement, Tensor.dim, Tensor.ndimension, Tensor.element_size, Tensor.get_device,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.is_signed, Tensor.register_hook, Tensor.retain_grad,
    Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.__len__, Tensor.__hash__,
    torch.is_floating_point, torch.is_complex, torch.numel,
    *(
        getattr(Tensor, name).__get__
        for name in (
            "shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "ndim", "itemsize", "nbytes",
            "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_cpu", "is_nested", "is_mkldnn", "is_sparse_csr",
            "_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad", "output_nr", "names", "is_xpu", "is_mps",
        )
        if hasattr(Tensor, name)
    ),
    *(getattr(Tensor, name).__set__ for name in ("grad", "requires_grad", "_backward_hooks")),
    Tensor.grad.__delete__,  # type: ignore[union-attr]
}  # fmt: skip


# Functions that give each element a new value, one after the other. Those of torch.nn.init name all their arguments.
_FILLS = {
    nn.init.normal_, nn.init.uniform_, nn.init.constant_, Tensor.normal_, Tensor.uniform_, Tensor.zero_, Tensor.fill_
}  # fmt: skip


def _filled_by_parts(func: Any, args: Any, kwargs: Any) -> bool:
    """Have a parameter's owner fill it, where it can do that without all of it in memory; return whether it did."""
    (param, *others), given = args or (kwargs["tensor"],), {key: kwargs[key] for key in kwargs if key != "tensor"}
    fill = getattr(owner_of(param), "fill_by_parts", None) if is_released(param) else None
    tensors = any(isinstance(each, Tensor) for each in (*others, *given.values()))
    if fill is None or tensors or (args and torch.is_grad_enabled()):
        return False
    return bool(fill(param, lambda part: func(part, *others, **given)))


_GET_GRAD = Tensor.grad.__get__  # type: ignore[union-attr]


def _tell_clipper(caller: FrameType) -> None:
    """Warn once if torch's clipping reads a gradient: it takes None for nothing to clip, and returns 0. For all other
    callers None is the right answer.
    """
    if caller.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
        warn_once(
            "clip-grad",
            "torch.nn.utils.clip_grad found no gradients and clips nothing: the engine took them into its partitions "
            'in backward, and clips them itself in step(). Set "gradient_clipping" (or "gradient_clipping_value") in '
            "the configuration, and read the norm with engine.get_global_grad_norm() after engine.step()",
        )


def owner_of(param: nn.Parameter) -> ParamOwner:
    """Return the owner that `attach` gave to a parameter."""
    return param.__dict__["_infinity_owner"]


def is_kept(param: nn.Parameter) -> bool:
    """Return whether a parameter has an owner."""
    return "_infinity_owner" in param.__dict__


def name_of(param: nn.Parameter) -> str:
    """Return the parameter's name in the model, or its shape in words while it has no name."""
    return param.__dict__.get("_infinity_name") or f"a parameter of shape {tuple(param.shape)}"


def attach(param: nn.Parameter, owner: ParamOwner, name: str = "") -> None:
    """Give a parameter its owner, and its name for messages."""
    param.__dict__["_infinity_owner"] = owner
    param.__dict__["_infinity_name"] = name or param.__dict__.get("_infinity_name", "")


def give_to(param: nn.Parameter, access: object) -> None:
    """Remember the `infinity.zero.access.ParamAccess` of the engine that trains a parameter of the model."""
    param.__dict__["_infinity_access"] = access


def forget(param: nn.Parameter) -> None:
    """Undo `attach`: the parameter is an ordinary one of the program's."""
    for name in ("_infinity_owner", "_infinity_name", "_infinity_access", *FOREIGN_ATTRIBUTES):
        param.__dict__.pop(name, None)


@contextmanager
def writable(params: Sequence[nn.Parameter]) -> Iterator[None]:
    """Open a block in which the engine keeps what is written into `params`: see `is_writable`."""
    _writable.update(map(id, params))
    try:
        yield
    finally:
        _writable.subtract(map(id, params))
        for key in map(id, params):
            if not _writable[key]:
                del _writable[key]


def is_writable(param: nn.Parameter) -> bool:
    """Return whether a `writable` block of the parameter is open."""
    return id(param) in _writable


_writable: Counter[int] = Counter()
# Types of devices between which torch lets a tensor change in place.
_EXCHANGEABLE = {"cpu", "cuda", "xpu", "hpu", "mps", "mtia"}


def is_released(param: nn.Parameter) -> bool:
    """Return whether the parameter has no data."""
    return isinstance(param, ReleasedParameter) and "_infinity_assembled" not in param.__dict__


def whole_of(param: nn.Parameter) -> nn.Parameter:
    """Return the parameter that a tile is a part of, and any other parameter itself."""
    return param.__dict__.get("_infinity_whole", param)


def release(param: nn.Parameter, placeholder: Tensor) -> None:
    """Take the data away. `placeholder` is a NaN scalar of the parameter's dtype and device, expanded to its shape."""
    set_data(param, placeholder)
    if type(param) is not nn.Parameter and not is_released(param):
        # A class of its own, as the packed weights of quantized models have.
        param.__dict__["_infinity_class"] = type(param)
    param.__class__ = ReleasedParameter


def restore(param: nn.Parameter, data: Tensor) -> None:
    """Give the parameter its data, a tensor of its logical shape."""
    param.__class__ = param.__dict__.get("_infinity_class", nn.Parameter)
    set_data(param, data)


def set_data(param: nn.Parameter, data: Tensor) -> None:
    """`param.data = data`. torch refuses that where only one of them is on a device of PrivateUse1 (every device that
    torch does not know itself); then the parameter becomes a tensor of that device, and stays the same object.
    """
    if param.device.type == data.device.type or {param.device.type, data.device.type} <= _EXCHANGEABLE:
        param.data = data
        return
    # `data.data`: with a version counter of its own. That of `data` goes on with every gather.
    other = nn.Parameter(data.data, param.requires_grad)
    torch.utils.swap_tensors(param, other)
    param.__class__, other.__class__ = other.__class__, param.__class__
    param.__dict__, other.__dict__ = other.__dict__, param.__dict__


def placeholder(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """What stands for the data of a released parameter: logical shape, four bytes of storage, NaN where dtype has
    one.
    """
    floating = dtype.is_floating_point and dtype not in (torch.float8_e4m3fn, torch.float8_e5m2)
    scalar = torch.full((), float("nan") if floating else 0, dtype=dtype, device=device)
    return scalar.expand(shape)


def describe_released(param: nn.Parameter) -> str:
    """What `repr` of a released parameter says: logical shape, and that it is partitioned."""
    return (
        f"Parameter(partitioned by infinity: {name_of(param)}, shape={tuple(param.shape)}, dtype={param.dtype}, "
        f"requires_grad={param.requires_grad})"
    )


def kept(args: Any, kwargs: Any) -> Iterator[nn.Parameter]:
    """Every parameter with an owner among the arguments of a call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, nn.Parameter) and "_infinity_owner" in value.__dict__:
            yield value
        elif isinstance(value, (tuple, list)):
            yield from kept(value, {})
        elif isinstance(value, dict):
            yield from kept((), value)


_ids = itertools.count()


def publish(param: nn.Parameter, *, parts: int) -> None:
    """Give a parameter `ds_id`, `ds_numel`, `ds_shape`, `ds_status`, `partition_numel()`, `ds_active_sub_modules`.

    parts: how many ranks share it. A second call keeps the id. `infinity.zero.parameter.forget` takes them away.
    """
    param.__dict__.update(
        ds_id=param.__dict__["ds_id"] if "ds_id" in param.__dict__ else next(_ids), ds_numel=param.numel(),
        ds_shape=param.shape, partition_numel=partial(math.ceil, param.numel() / parts), ds_active_sub_modules=set(),
        # While the parameter is released, its class says otherwise.
        ds_status=ZeroParamStatus.AVAILABLE,
    )  # fmt: skip


def publish_model(model: nn.Module, *, parts: int) -> None:
    """Publish every parameter of a model, and give its modules `ds_external_parameters()`."""
    for param in model.parameters():
        publish(param, parts=parts)
    for module in model.modules():
        module.__dict__["ds_external_parameters"] = _no_external_parameters


def _no_external_parameters() -> Iterable[tuple[str, nn.Parameter]]:
    """Every parameter is gathered where its data is used, so no module has to name those of others."""
    return ()


class ParameterOffload:
    """What DeepSpeed's optimizer keeps of its hooks, for programs that take them off around `generate`.

    Such a program (TRL) gathers all parameters, removes `forward_hooks` and `backward_hooks`, and registers the module
    again afterwards. The engine's hooks stay: within a block that holds all parameters they gather nothing.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # Nothing that could be removed. The program assigns empty lists of its own.
        self.forward_hooks: list[object] = []
        self.backward_hooks: list[object] = []

    def _register_deepspeed_module(self, module: nn.Module) -> None:
        """Do nothing: the hooks are still there."""


class OtherStage:
    """The owner of a parameter that ranks of other stages have."""

    # No operation brings it here.
    gathers_on_use = False

    def __init__(self, holders: Sequence[int]) -> None:
        """holders: the pipeline indices of those ranks."""
        self._holders = tuple(holders)

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        """Raise StateError: a program on this rank cannot use them."""
        places = " and ".join(f"pp {index}" for index in self._holders)
        raise StateError(
            f"{name_of(params[0])} belongs to another stage of the pipeline, on the ranks at {places}, and "
            f"{use} needs its data here: train with engine.train_batch(batches) and evaluate with "
            "engine.eval_batch(batches), which run all stages; engine.state_dict(), engine.export(folder) and "
            "infinity.state(param) put whole values together"
        )


def leave_to_others(param: nn.Parameter, name: str, holders: Sequence[int], stand_in: torch.Tensor) -> None:
    """Free a parameter's memory for good. stand_in: see `parameter.release`, of the shape that it has on its ranks."""
    if is_released(param):
        restore(param, stand_in)
    release(param, stand_in)
    attach(param, OtherStage(holders), name)


def is_elsewhere(param: nn.Parameter) -> bool:
    """Return whether ranks of other stages have a parameter, and this one has not."""
    return is_kept(param) and isinstance(owner_of(param), OtherStage)


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
        owner = param.__dict__.get("_infinity_access")
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
