"""A model that is a list of layers, which a pipeline can cut between any two of them.

A batch is (inputs, labels). The layers run in their order, each on what the one before it returned: a tensor, or a
tuple of tensors as one argument. Behind the last one, `loss_fn(outputs, labels)` makes the loss. A stage runs the same
forward over a range of layers.

[Note: layer boundaries] A cut model has the bits of a whole one. So between any two layers, cut there or not, each
tensor is contiguous, and so is its gradient; one that a layer passes on unchanged gets its gradients from the layers
behind first; and a tuple of one tensor is that tensor, since a message does not tell the two apart.

The layers of a `PipelineModule`: what a program lists becomes one module each, and none stands in two places.

A layer that uses a module again, by its key or because the program lists it twice, is a module of its own that has the
same parameters. So a parameter has a name in each layer that uses it, as other tied weights have; hooks that gather
weights stand at each of these layers, and a stage can have one of them without the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.errors import ConfigError, StateError
from infinity.parallel.random_state import LayerSeeds
from infinity.parallel.stage import Boundary
from infinity.plan.spec import LEAF_MARK
from infinity.plan.stages import StageCut, counts_by_method

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


_Loss = Callable[[Any, Any], Any]


class PipelineModule(nn.Module):
    """Layers that run one after the other, and their loss; `layers.0`, `layers.1` ... are the blocks of stages.

    layers: modules, `LayerSpec`s and `TiedLayerSpec`s (built here, in order), and functions of one argument.
    num_stages, topology: ranks along the pipeline axis, for a configuration that does not say it; of a topology,
    `get_dim("pipe")`.
    loss_fn: called with the last layer's outputs and the labels. None: the last layer returns the loss.
    seed_layers: build each layer, and run it in training on each micro-batch, with random numbers of its own, which
    follow from `base_seed`; then dropout does not depend on the cut. seed_fn: called with a seed before each.
    partition_method: how layers are divided among stages where the configuration does not say it: "parameters",
    "uniform" or "type:REGEX" (see `infinity.plan.stages`).
    activation_checkpoint_interval: how many layers are computed again together in backward; 0: none are.
    activation_checkpoint_func: called as `func(run, *tensors)`; default: torch's non-reentrant checkpoint.
    checkpointable_layers: names of classes; layers of other classes are not computed again.
    dynamic_shape: without effect; shapes may always change between batches.

    Raises ConfigError for a layer that is neither of these.
    """

    def __init__(
        self, layers: Iterable[Any], num_stages: int | None = None, topology: Any = None, loss_fn: _Loss | None = None,
        seed_layers: bool = False, seed_fn: Callable[[int], Any] | None = None, base_seed: int = 1234,
        partition_method: str = "parameters", activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] | None = None,
        checkpointable_layers: Collection[str] | None = None, dynamic_shape: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.num_stages = _stages(num_stages, topology)
        self.partition_method = partition_method
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.checkpointable_layers = checkpointable_layers
        self.dynamic_shape = dynamic_shape
        self._topology = topology
        self._recompute = activation_checkpoint_func or partial(checkpoint, use_reentrant=False)
        self._seeds = LayerSeeds(seed_layers, seed_fn, base_seed)
        # By first layer of a range: the micro-batches that it has run in training.
        self._ran: dict[int, int] = {}
        made, names = build_layers(layers, self._seeds)
        if not made:
            raise ConfigError("PipelineModule(layers=...) needs at least one layer")
        # Of the classes (or functions) that the program listed.
        self.layer_names = tuple(names)
        self.layers = nn.ModuleList(made)
        # Behind the layers in the tree, too, where it may be a module.
        self.loss_fn = loss_fn

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def forward_funcs(self) -> list[nn.Module]:
        """The layers, under DeepSpeed's name."""
        return list(self.layers)

    @property
    def blocks(self) -> tuple[str, ...]:
        """The paths of the layers, as a `StageCut` names them."""
        return tuple(f"layers.{index}" for index in range(len(self.layers)))

    def topology(self) -> Any:
        """Return what the program passed as such, or None."""
        return self._topology

    def stage_counts(self, stages: int) -> tuple[int, ...]:
        """Return how many layers each of `stages` stages gets by `partition_method`. A weight that several layers share
        counts in each. ConfigError where the layers cannot be divided so.
        """
        numels = [sum(param.numel() for param in layer.parameters()) for layer in self.layers]
        return counts_by_method(self.partition_method, numels, self.layer_names, stages)

    def forward(self, inputs: Any, labels: Any = None, *, layers: range | None = None) -> Any:
        """Run the layers, or those in `layers`, on what the first of them takes.

        Returns what the last of them returns; behind the last layer of all, with labels, the loss.
        """
        chosen = range(self.num_layers) if layers is None else layers
        outputs = self.forward_range(chosen.start, chosen.stop, inputs)
        return outputs if labels is None or chosen.stop < self.num_layers else self.loss(outputs, labels)

    def forward_range(self, begin: int, end: int, inputs: Any) -> Any:
        """Run the layers [begin, end) and return what the last of them returns. Hooks of this module stand at its call,
        `self(inputs, layers=range(begin, end))`, and not here.
        """
        hidden = _as_tuple(inputs) if begin == 0 else _passed_on(inputs)
        micro_batch = self._ran.get(begin, 0)
        if self.training:
            self._ran[begin] = micro_batch + 1
        together = self.activation_checkpoint_interval if torch.is_grad_enabled() else 0
        for first in range(begin, end, together or end - begin):
            last = min(first + (together or end - begin), end)
            run = partial(self._run, first, last, micro_batch)
            if together and self._is_recomputed(first, last):
                hidden = self._recompute(run, *(hidden if isinstance(hidden, tuple) else (hidden,)))
            else:
                hidden = run(hidden)
        return hidden

    def loss(self, outputs: Any, labels: Any) -> Any:
        """Return the loss: `loss_fn` of both, or the outputs where there is no `loss_fn`."""
        return outputs if self.loss_fn is None else self.loss_fn(outputs, _as_tuple(labels))

    def count_from(self, micro_batches: int) -> None:
        """Continue the seeds of `seed_layers` behind `micro_batches` of the run: for one that is resumed."""
        self._ran = dict.fromkeys(range(self.num_layers), micro_batches)

    def _run(self, first: int, last: int, micro_batch: int, *inputs: Any) -> Any:
        """Run the layers [first, last). inputs: one value, or the tensors of a tuple."""
        hidden: Any = inputs[0] if len(inputs) == 1 else inputs
        for index in range(first, last):
            if self.training and self._seeds.enabled:
                seed = self._seeds.of_forward(index, self.num_layers, micro_batch)
                with self._seeds.on(seed, _device_of(hidden)):
                    hidden = self.layers[index](hidden)
            else:
                hidden = self.layers[index](hidden)
            if index + 1 < self.num_layers:
                hidden = _passed_on(hidden)
        return hidden

    def _is_recomputed(self, first: int, last: int) -> bool:
        """Return whether layers are computed again: all are of the given classes, or without these, one has weights."""
        if self.checkpointable_layers is not None:
            return all(name in self.checkpointable_layers for name in self.layer_names[first:last])
        return any(True for layer in self.layers[first:last] for _ in layer.parameters())


class StagedLayers:
    """A `PipelineModule` that runs one stage at a time, with the interface of `StagedModel`.

    own: the stages of this rank. Each is a call of the model, so that hooks of the model and of the stage's layers run.
    Nothing of the model changes. A stage runs the micro-batches in their order, each once (see `seed_layers`).
    """

    def __init__(self, model: PipelineModule, cut: StageCut, *, own: Collection[int]) -> None:
        if cut.blocks != model.blocks:
            raise StateError(f"a cut of {len(cut.blocks)} blocks is not one of these {model.num_layers} layers")
        self._model = model
        self._cut = cut
        self._own = frozenset(own)

    def forward(
        self, stage: int, received: Boundary | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Boundary | Any:
        """Run one of this rank's stages on a micro-batch.

        received: what the stage before returned, None at stage 0. args, kwargs: the micro-batch, as (inputs, labels) or
        by these names; a stage takes of it what it needs.

        Return what crosses the boundary behind the stage; of the last stage the loss, or the outputs of a batch without
        labels. ConfigError if the last layer of another stage returns something else than tensors.
        """
        if stage not in self._own:
            raise StateError(f"stage {stage} is not run here, but {sorted(self._own) or 'none, since it was removed'}")
        if (received is None) != (stage == 0):
            raise StateError(f"stage {stage} takes {'no' if stage == 0 else 'the'} tensors of the stage before it")
        begin, end = self._cut.bounds[stage : stage + 2]
        inputs, labels = _batch(*args, **kwargs)
        if received is not None:
            inputs = received
        if stage == self._cut.last:
            return self._model(inputs, labels, layers=range(begin, end))
        outputs = self._model(inputs, layers=range(begin, end))
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not tensors or not all(isinstance(each, Tensor) for each in tensors):
            returned = ", ".join(type(each).__name__ for each in tensors)
            raise ConfigError(
                f"{self._cut.blocks[end - 1]} ({self._model.layer_names[end - 1]}) is the last layer of stage {stage} "
                f"and returns {'a tuple of ' if isinstance(outputs, tuple) else ''}{returned or 'nothing'}: what goes "
                "to the next stage must be a tensor, or a tuple of tensors"
            )
        return tensors

    def remove(self) -> None:
        """Run no stage any more; idempotent. Nothing of the model was changed."""
        self._own = frozenset()


def _batch(inputs: Any = None, labels: Any = None) -> tuple[Any, Any]:
    return inputs, labels


def _stages(given: int | None, topology: Any) -> int | None:
    """Return the number of stages that the program asks for, if it does."""
    along = None if topology is None else int(topology.get_dim("pipe"))
    if given is not None and along is not None and given != along:
        raise ConfigError(f"PipelineModule: num_stages is {given} and the topology has {along} along its axis 'pipe'")
    stages = along if given is None else given
    if stages is not None and stages < 1:
        raise ConfigError(f"PipelineModule: num_stages is {stages}; it must be at least 1")
    return stages


def _as_tuple(value: Any) -> Any:
    """Return a list as a tuple (torch's default collation makes lists), and one of a single tensor as that tensor."""
    if isinstance(value, (list, tuple)):
        return value[0] if len(value) == 1 else tuple(value)
    return value


def _device_of(hidden: Any) -> torch.device | None:
    tensors = hidden if isinstance(hidden, tuple) else (hidden,)
    return next((each.device for each in tensors if isinstance(each, Tensor)), None)


def _passed_on(value: Any) -> Any:
    """Return what a layer returned as the next one takes it. See [Note: layer boundaries]."""
    value = _as_tuple(value) if isinstance(value, tuple) else value
    tensors = value if isinstance(value, tuple) else (value,)
    if not all(isinstance(each, Tensor) for each in tensors):
        # It goes no further than its stage.
        return value
    passing = [each for each in tensors if each.requires_grad] if torch.is_grad_enabled() else []
    passed = iter(_LayerBoundary.apply(*passing) if passing else ())
    found = tuple(next(passed) if passing and each.requires_grad else each.contiguous() for each in tensors)
    return found if isinstance(value, tuple) else found[0]


class _LayerBoundary(torch.autograd.Function):
    """Identity whose outputs and gradients are contiguous."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # Detached: autograd would make views of the tensors themselves, which a layer may not change in place.
        return tuple(tensor.detach().contiguous() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.contiguous() for grad in grads)
