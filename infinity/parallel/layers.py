"""The layers of a `PipelineModule`: what a program lists becomes one module each, and none stands in two places.

A layer that uses a module again, by its key or because the program lists it twice, is a module of its own that has the
same parameters. So a parameter has a name in each layer that uses it, as other tied weights have; hooks that gather
weights stand at each of these layers, and a stage can have one of them without the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from torch import nn

from infinity.errors import ConfigError
from infinity.parallel.layer_seeds import LayerSeeds
from infinity.plan.spec import LEAF_MARK

_Forward = Callable[[Any, Any], Any]


class LayerSpec:
    """A layer that is built when the `PipelineModule` is: the class of a module, and the arguments for it."""

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not isinstance(typename, type) or not issubclass(typename, nn.Module):
            raise ConfigError(
                f"{type(self).__name__} takes the class of a torch.nn.Module and its arguments, got {typename!r}: list "
                "a module that is built already, or a function, as it is"
            )
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """Return a new module. log: accepted and without effect."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        values = [self.typename.__name__, *map(repr, self.module_args)]
        values += [f"{name}={value!r}" for name, value in self.module_kwargs.items()]
        return f"{type(self).__name__}({', '.join(values)})"


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with the others of the same key.

    The first of a key builds a module. A later one of the same class uses that module with all its parameters, and its
    own arguments have no effect. A later one of another class builds a module of its own, whose `tied_weight_attr` (a
    name such as "weight" or "embedding.weight", or several) becomes the first one's parameter of that name.

    forward_fn: called as `forward_fn(module, inputs)` in place of the module; each layer of a key has its own.
    """

    def __init__(
        self, key: str, typename: type[nn.Module], *module_args: Any, forward_fn: _Forward | None = None,
        tied_weight_attr: str | Sequence[str] = "weight", **module_kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(typename, *module_args, **module_kwargs)
        if forward_fn is not None and not callable(forward_fn):
            raise ConfigError(f"TiedLayerSpec({key!r}): forward_fn must be a function, got {forward_fn!r}")
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = tied_weight_attr


def build_layers(layers: Iterable[Any], seeds: LayerSeeds) -> tuple[list[nn.Module], list[str]]:
    """Return a module for each layer, in order, and the names of the layers' classes (a function's own name).

    layers: modules, `LayerSpec`s, and functions of one argument. Raises ConfigError for anything else.
    """
    made: list[nn.Module] = []
    names: list[str] = []
    # The first module of each key, and all that have their place.
    first_of: dict[str, nn.Module] = {}
    placed: set[nn.Module] = set()
    for index, layer in enumerate(layers):
        forward = layer.forward_fn if isinstance(layer, TiedLayerSpec) else None
        with seeds.on(seeds.of_building(index)):
            module = _module_of(layer, index, first_of)
        names.append(module.name if isinstance(module, FunctionLayer) else type(module).__name__)
        if module in placed:
            made.append(TiedUse(module, forward))
        else:
            placed.add(module)
            made.append(module if forward is None else ForwardLayer(module, forward))
    return made, names


def _module_of(layer: Any, index: int, first_of: dict[str, nn.Module]) -> nn.Module:
    """Return the module that a layer runs, which may have its place already."""
    if isinstance(layer, TiedLayerSpec):
        first = first_of.get(layer.key)
        if first is not None and type(first) is layer.typename:
            return first
        module = layer.build()
        if first is not None:
            _tie(layer, module, first)
        first_of.setdefault(layer.key, module)
        return module
    if isinstance(layer, LayerSpec):
        return layer.build()
    if isinstance(layer, nn.Module):
        return layer
    if isinstance(layer, type) or not callable(layer):
        raise ConfigError(
            f"layer {index} of a PipelineModule is {layer!r}: list modules, LayerSpec(class, arguments ...) and "
            "functions of one argument"
        )
    return FunctionLayer(layer)


def _tie(spec: TiedLayerSpec, module: nn.Module, first: nn.Module) -> None:
    """Give a module the tied parameters of the first one of its key."""
    names = [spec.tied_weight_attr] if isinstance(spec.tied_weight_attr, str) else spec.tied_weight_attr
    for name in names:
        own, shared = (_parameter_at(each, name, spec) for each in (module, first))
        if own.shape != shared.shape:
            raise ConfigError(
                f"TiedLayerSpec({spec.key!r}): {name} is {tuple(shared.shape)} in {type(first).__name__} and "
                f"{tuple(own.shape)} in {type(module).__name__}: tied weights need equal shapes"
            )
        # The name may be a property's: the parameter has its place somewhere in the module.
        for inner in module.modules():
            for attribute in [key for key, param in inner._parameters.items() if param is own]:
                setattr(inner, attribute, shared)


def _parameter_at(module: nn.Module, name: str, spec: TiedLayerSpec) -> nn.Parameter:
    try:
        found = attrgetter(name)(module)
    except AttributeError:
        found = None
    if not isinstance(found, nn.Parameter):
        raise ConfigError(
            f"TiedLayerSpec({spec.key!r}): {type(module).__name__} has no parameter {name!r}: name the tied weight in "
            "tied_weight_attr"
        )
    return found


class FunctionLayer(nn.Module):
    """A plain function as a layer."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    @property
    def name(self) -> str:
        """The function's own name; of an object that can be called, its class's."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__name__", type(function).__name__)

    def forward(self, inputs: Any) -> Any:
        """Call the function."""
        return self.function(inputs)

    def extra_repr(self) -> str:
        """Return the name for the module's text."""
        return self.name


class ForwardLayer(nn.Module):
    """A module that runs by another function than its own forward; what this function uses of it is gathered here."""

    def __init__(self, module: nn.Module, function: _Forward) -> None:
        super().__init__()
        self.module = module
        self._function = function
        self.__dict__[LEAF_MARK] = True

    def forward(self, inputs: Any) -> Any:
        """Call the function with the module."""
        return self._function(self.module, inputs)


class _SameParameters(nn.Module):
    """Has the parameters of another module, under the same names; the module tree finds them here, too."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # The very dictionary: a parameter that is replaced in one of the two is replaced in both.
        self._parameters = module._parameters
        for name, child in module.named_children():
            self.add_module(name, _SameParameters(child))


class TiedUse(_SameParameters):
    """A layer that runs a module that has its place elsewhere; the weights are gathered here, too."""

    def __init__(self, module: nn.Module, function: _Forward | None) -> None:
        super().__init__(module)
        # In a tuple, so that the module is no child.
        self._used = (module, function)
        self.__dict__[LEAF_MARK] = True

    def forward(self, inputs: Any) -> Any:
        """Run the module, or call the function with it."""
        module, function = self._used
        return module(inputs) if function is None else function(module, inputs)
