"""Hooks that tell the coordinator when a module runs forward and when its backward passes through.

A forward pre-hook gathers. An identity function on the module's inputs runs its backward after everything inside the
module: it releases, and gradients can be collected. Hooks on the output tensors run before anything inside: they
gather again. A module of which no input needs a gradient is closed when backward ends.

[Note: compiled regions] Nothing is gathered or released inside a compiled region, because the compiler would move
operators across both. So the region is a module's `forward` (`infinity.zero.compiled`), beneath the hooks, and
everything inside it is whole while it runs. If a program's own compiled function calls a hooked module, the hooks break
its graph: the result is right, and the graph is in pieces.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import on_any_rank
from infinity.errors import StateError
from infinity.plan.stages import StageEnd
from infinity.zero.coordinator import Coordinator, ModuleCall
from infinity.zero.guards import ModelGuards
from infinity.zero.parameter import is_elsewhere, name_of, whole_of
from infinity.zero.unit import Unit

_Function = TypeVar("_Function", bound=Callable[..., Any])
# Whether a transform of torch.func is active; and a block outside such, which would trace what a gather writes.
_transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
_OutsideTransforms = torch._C._DisableFuncTorch


class ModuleHooks:
    """The hooks of one model; `remove` takes them all away.

    synced: whether parameters are partitioned over the data axis, so that all ranks must take part in each forward, and
    in the construction.
    """

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], coordinator: Coordinator, *, group: AxisGroup, synced: bool
    ) -> None:
        self._model = model
        self._coordinator = coordinator
        self._known = {id(whole_of(param)): name_of(whole_of(param)) for unit in units for param in unit.params}
        self._known |= {id(param): name_of(param) for param in model.parameters() if is_elsewhere(param)}
        self._guards = ModelGuards(model)
        self._stack: list[tuple[nn.Module, ModuleCall]] = []
        wanted: dict[str, list[Unit]] = {"": []}
        for unit in units:
            # Tiles are gathered one after the other while the module runs: see `infinity.zero.tiles`.
            for path in () if unit.layout.is_tile else unit.layout.modules:
                wanted.setdefault(path, []).append(unit)
        self._standing: dict[nn.Module, _Standing] = {}
        # Modules that are compiled as one region: see [Note: compiled regions].
        self._regions: set[nn.Module] = set()
        modules = [model.get_submodule(path) for path in wanted]
        lookups = [_looks_up(module) for module in modules]
        if synced:
            # All ranks gather what one of them gathers.
            others = on_any_rank([not lookup for lookup in lookups], group, "what backward needs of embeddings")
            lookups = [not other for other in others]
        for module, needed, lookup in zip(modules, wanted.values(), lookups, strict=True):
            self._stand(module, needed, lookup=lookup)
        if synced and hasattr(model, "generation_config") and hasattr(model, "generate"):
            model.generate = SyncedGenerate(model)  # type: ignore[assignment]

    def check_tree(self) -> None:
        """Raise StateError if a parameter has joined the model since the engine was made, or left it. The first would
        not be trained, the second would be trained without a gradient.
        """
        left = dict(self._known)
        for name, param in self._model.named_parameters():
            left.pop(id(param), None)
            if id(param) not in self._known:
                raise StateError(
                    f"{name} has joined the model after infinity.initialize() and is not in its plan (embeddings "
                    "resized, an adapter added?): change the model before, or close the engine and make a new one"
                )
        if left:
            names = ", ".join([*left.values()][:3])
            raise StateError(
                f"{names}{' and others' if len(left) > 3 else ''} left the model after infinity.initialize() (a module "
                "deleted or replaced?); the engine still has their values. Put the module back and go on; or save with "
                "it in its place, close the engine and make a new one of the changed model"
            )

    def units_at(self, module: nn.Module) -> set[Unit]:
        """Return the units that the module's hooks gather (unless they are whole) and whose gradients they collect."""
        return set(self._standing[module].units) if module in self._standing else set()

    def stands_at(self, module: nn.Module) -> bool:
        """Return whether the module has hooks."""
        return module in self._standing

    def fuse(self, module: nn.Module) -> None:
        """Replace the hooks of all modules inside this one by its own; the units inside are whole while it runs."""
        self._regions.add(module)
        inside = [inner for inner in module.modules() if inner is not module and inner in self._standing]
        if not inside:
            return
        units = {unit: None for inner in inside for unit in self._leave(inner).units}
        own = self._leave(module)
        self._stand(module, [*own.units, *(unit for unit in units if unit not in own.units)], lookup=own.lookup)

    def remove(self) -> None:
        self._guards.remove()
        if isinstance(self._model.__dict__.get("generate"), SyncedGenerate):
            del self._model.generate
        for module in [*self._standing]:
            self._leave(module)

    def _stand(self, module: nn.Module, units: list[Unit], *, lookup: bool) -> None:
        before = self._before(module, units, lookup=lookup)
        handles = [
            module.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
            module.register_forward_hook(self._after(module), always_call=True),
        ]
        self._standing[module] = _Standing(units, lookup, handles)

    def _leave(self, module: nn.Module) -> _Standing:
        """Remove a module's hooks and return them; an empty record if it has none."""
        standing = self._standing.pop(module, None) or _Standing([], False, [])
        for handle in standing.handles:
            handle.remove()
        return standing

    def _before(self, hooked: nn.Module, units: list[Unit], *, lookup: bool) -> Callable[..., Any]:
        def before_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is not hooked:
                # A deep copy of the model has its own parameters, and the original's hooks.
                return None
            if torch.compiler.is_compiling():
                return _outside_compiled_regions(enter, module, args, kwargs)
            if not _transforms_active():
                return enter(module, args, kwargs)
            with _OutsideTransforms():
                return enter(module, args, kwargs)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if module is self._model:
                self._coordinator.begin_pass(_mode(module))
            scope = self._coordinator.open_scope(units, lookup=lookup)
            self._stack.append((module, scope))
            if not _announces_backward():
                return None
            return register_post_backward((args, kwargs), lambda: self._coordinator.leave_backward(scope))

        return before_forward

    def _after(self, hooked: nn.Module) -> Callable[..., None]:
        # Not a bound method: copying one would copy the engine.
        def after_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if module is not hooked:
                return
            if torch.compiler.is_compiling():
                _outside_compiled_regions(leave, module, output)
            elif not _transforms_active():
                leave(module, output)
            else:
                with _OutsideTransforms():
                    leave(module, output)

        def leave(module: nn.Module, output: Any) -> None:
            if any(entry is module for entry, _ in self._stack):
                self._close(module, output)

        return after_forward

    def _close(self, module: nn.Module, output: Any) -> None:
        scope = None
        while scope is None:
            entry, candidate = self._stack.pop()
            scope = candidate if entry is module else None
        if output is None and isinstance(ended := sys.exc_info()[1], StageEnd):
            # The forward of a pipeline's stage ends so, and what it sends carries its gradients.
            output = ended.outputs
        carrying = [tensor for tensor in tensors_in(output) if tensor.requires_grad] if _announces_backward() else []
        returns = register_pre_backward(carrying, self._coordinator, scope)
        self._coordinator.close_scope(scope, will_return=returns)
        if module in self._regions and module in self._standing:
            # A weight that the region borrows is whole at its beginning from now on: a compiler recompiles when the
            # class of a parameter changes.
            units = self._standing[module].units
            units += [unit for unit in scope.units if unit not in units and not unit.placed.whole]
        # A forward that raised has no output. Its pass is abandoned: gathers in flight may never complete.
        raised = output is None and sys.exc_info()[0] is not None
        if module is self._model and not self._stack and not raised:
            self._coordinator.end_forward()
        if module is self._model and not carrying and not self._stack and not raised:
            self._coordinator.end_pass(_mode(module))


@dataclasses.dataclass(frozen=True, slots=True)
class _Standing:
    """The hooks of one module: the units that it needs, and the handles that remove the hooks."""

    units: list[Unit]
    lookup: bool
    handles: list[Any]


def not_compiled(reason: str) -> Callable[[_Function], _Function]:
    """Keep compilers out of a function. `reason` is their error's text under `fullgraph=True`. Unlike
    `torch.compiler.disable`, this loads the compiler when the function is first called, not with this module.
    """

    def mark(function: _Function) -> _Function:
        outside = _disable_dynamo(function)
        outside.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=reason)
        return outside  # type: ignore[return-value]

    return mark


_gathered_outside = not_compiled(
    "infinity gathers and releases weights here: compile the modules that it gathers instead of a function that calls "
    "them, as engine.compile() does, also with fullgraph=True"
)


@_gathered_outside
def _outside_compiled_regions(hook: Callable[..., Any], *args: Any) -> Any:
    """Call a hook: it breaks the graph here. See [Note: compiled regions]."""
    return hook(*args)


def _announces_backward() -> bool:
    """Whether hooks announce a backward. A transform of torch.func runs its own inside, where units stay gathered."""
    return torch.is_grad_enabled() and not _transforms_active()


def _looks_up(module: nn.Module) -> bool:
    """Return whether a module's backward does not need its weight: an embedding's gradient follows from the ids alone.
    False for a module with hooks, which may compute with the weight; a hook that is added later finds the weight
    released, and materializes it.
    """
    plain = type(module) is nn.Embedding and [*module._parameters] == ["weight"]
    return plain and not module._forward_hooks and not module._forward_pre_hooks


def _mode(model: nn.Module) -> str:
    return "train" if torch.is_grad_enabled() and model.training else "eval"


class SyncedGenerate:
    """A transformers model's `generate` while its parameters are partitioned. A rank whose texts are complete keeps
    running forward until all ranks are done, because the others cannot gather without it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._model).generate(self._model, *args, **{"synced_gpus": True, **kwargs})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the model is whole, and generates alone.
        model = memo[id(self._model)]
        return MethodType(type(model).generate, model)


def register_pre_backward(outputs: Sequence[Tensor], coordinator: Coordinator, scope: ModuleCall) -> bool:
    """Enter the call's backward when the first gradient of its outputs arrives. Return whether one will arrive."""
    if not outputs or not backward_comes(coordinator):
        return False

    def before_backward(_: Tensor) -> None:
        refuse_double(scope)
        coordinator.join_backward()
        coordinator.enter_backward(scope)

    for tensor in outputs:
        tensor.register_hook(before_backward)
    return True


def refuse_double(scope: ModuleCall) -> None:
    """Raise StateError if autograd records this backward for a second one. The weights are released after the first,
    no hook announces the second, and it would read zeros. (Recomputation records forwards only.)
    """
    cut = next((unit for unit in scope.units if not unit.placed.whole), None) if torch.is_grad_enabled() else None
    if cut is not None:
        raise StateError(
            f"a double backward (create_graph=True) goes through {cut.layout.name}, whose weights are released after "
            "the first one: use zero_optimization.stage 2, or keep its weights gathered with a "
            f"stage3_param_persistence_threshold above {cut.layout.numel}"
        )


def backward_comes(coordinator: Coordinator) -> bool:
    """Return whether a backward may follow what is computed now. False without gradients, and while non-reentrant
    activation checkpointing recomputes a forward, because it discards the graph of that forward.
    """
    if not torch.is_grad_enabled() or not coordinator.in_backward:
        return torch.is_grad_enabled()
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is None or "_recomputation_hook" not in getattr(hooks[0], "__qualname__", "")


class _AnnounceEnd(torch.autograd.Function):
    """Identity on tensors; its backward runs when the gradients of all of them have arrived."""

    @staticmethod
    def forward(ctx: Any, ended: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ended = ended
        # Autograd would make views of the tensors themselves, and a module may not change a view in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        ctx.ended()
        return (None, *grads)


def register_post_backward(inputs: Any, ended: Callable[[], None]) -> Any:
    """Return `inputs` with every tensor that needs a gradient passed through `_AnnounceEnd`; None without such one."""
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.requires_grad]
    if not tensors:
        return None
    passed = dict(zip(map(id, tensors), _AnnounceEnd.apply(ended, *tensors), strict=True))
    return replace_tensors(inputs, lambda tensor: passed.get(id(tensor), tensor))


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a structure of sequences, mappings, dataclasses and plain objects, each once."""
    found: dict[int, Tensor] = {}
    _find(value, 3, found)
    return list(found.values())


def _find(value: Any, depth: int, found: dict[int, Tensor]) -> None:
    # A closure would refer to itself, and keep the tensors alive until the garbage collector runs.
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
    elif isinstance(value, Mapping):
        for item in value.values():
            _find(item, depth, found)
    elif isinstance(value, (tuple, list, set)):
        for item in value:
            _find(item, depth, found)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        # Dataclasses and other records. A few levels of plain objects are enough; callables are not searched.
        for item in vars(value).values():
            _find(item, depth - 1, found)


def replace_tensors(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of the structure with every tensor replaced. Parts without tensors are passed on unchanged."""
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, tuple):
        items = [replace_tensors(item, replace) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if type(value) is list:
        return [replace_tensors(item, replace) for item in value]
    if type(value) is dict:
        return {key: replace_tensors(item, replace) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: replace_tensors(item, replace) for name, item in fields.items()}
        return value if all(changed[name] is fields[name] for name in fields) else dataclasses.replace(value, **changed)
    return value
