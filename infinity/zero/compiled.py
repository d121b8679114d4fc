"""Compiles whole modules of a model, between gathering and releasing.

A program compiles its model as in plain torch, before `infinity.initialize` or after. Torch compiles a module's call
with all hooks; here the module's `forward` is compiled, beneath the hooks that gather and release: see [Note: compiled
regions] in `infinity.zero.hooks`. A module is not compiled as one region if modules inside it gather for themselves, or
if its gradients would be too many at once. Then the outermost modules below it that can be regions are compiled, each
with the same options, and the code between them runs eagerly. Leaf modules of torch.nn are left out then: each is one
operator.

[Note: kinds of blocks] Torch keeps graphs, and the sizes of inputs that it has seen, by code object. In a model that is
compiled whole, each call of a block is traced with sizes of its own. Blocks that are compiled one by one share the code
of their class. If their weights differ in shape (the stages of a vision model), torch takes the sizes of their inputs
for ones that vary: it compiles with symbolic sizes, at which inductor can fail, and compiles no more than
`recompile_limit` kinds. Classes can share code, too: that of a decorator. So blocks of another class, or whose weights
have other shapes, get a copy of the code.
"""

from __future__ import annotations

import copy
import functools
import sys
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.log import logger, warn_once
from infinity.plan.plan import Plan
from infinity.zero.activation_checkpoint import OffloadedForward, Recomputed
from infinity.zero.forwards import Replaced
from infinity.zero.hooks import ModuleHooks, not_compiled
from infinity.zero.tiles import TiledParameter

# Compiles a function, with the options that a program has given.
Compiler = Callable[[Callable[..., Any]], Any]
_Verb = TypeVar("_Verb", bound=Callable[..., Any])


class CompiledModules:
    """The compiled modules of one model. Made when its hooks stand, and what replaces a `forward` is in place.

    accelerator: whether it runs on one. `close` leaves every module compiled as plain torch would have done it.
    """

    def __init__(self, model: nn.Module, hooks: ModuleHooks, plan: Plan, *, accelerator: bool) -> None:
        self._model = model
        self._hooks = hooks
        self._accelerator = accelerator
        # The gradients of a region arrive at once. If gradients leave as they arrive, the plan has room for one unit's.
        largest = max((layout.numel for layout in plan.layouts), default=0)
        self._grad_numel_max = sys.maxsize if plan.placement.grad_whole else largest
        self._paths = {module: path for path, module in model.named_modules()}
        self._kinds = _Kinds()
        # The replaced `forward`s, and the compilers of modules that are compiled again when the engine is closed.
        self._replaced: list[Replaced] = []
        self._asked: dict[nn.Module, Compiler] = {}
        self._later = {module: None for module in self._paths if any(map(hooks.stands_at, module.modules()))}
        try:
            found = {module: compiler for module in self._paths if (compiler := self._take_off(module)) is not None}
            for module, compiler in found.items():
                self._compile(module, compiler, leave=found)
        except ConfigError:
            self.close()
            raise
        for module in self._later:
            module.compile = _Compile(self, module)

    @property
    def active(self) -> bool:
        """Whether a module is compiled."""
        return bool(self._replaced or self._asked)

    def compile_model(
        self, *args: Any, compile_kwargs: Mapping[str, Any] | None = None, schedule: Any = None,
        compiled_autograd_enabled: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        """Compile the model, with torch's arguments, or with DeepSpeed's, which has torch's in `compile_kwargs`."""
        if schedule is not None or compiled_autograd_enabled:
            name = "schedule" if schedule is not None else "compiled_autograd_enabled"
            raise ConfigError(
                f"engine.compile({name}=...) is not supported: weights are gathered by hooks, outside of what is "
                "compiled. Leave it out"
            )
        self.compile(self._model, *args, **{**(compile_kwargs or {}), **kwargs})

    def compile(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Replace `module.compile` while the engine trains the module; torch's arguments."""

        def compiler(function: Callable[..., Any]) -> Any:
            # torch takes entries out of the options that it is given.
            own: dict[str, Any] = {name: copy.copy(value) for name, value in kwargs.items()}
            return torch.compile(function, *args, **own)

        self._compile(module, compiler, leave=())
        self._asked[module] = compiler

    def close(self) -> None:
        """Give the modules their own `forward` back, and compile them with all their hooks."""
        for module in self._later:
            if isinstance(module.__dict__.get("compile"), _Compile):
                del module.compile
        while self._replaced:
            self._replaced.pop().restore()
        for module, compiler in self._asked.items():
            module._compiled_call_impl = compiler(module._call_impl)
        self._asked.clear()

    def _take_off(self, module: nn.Module) -> Compiler | None:
        """Return the compiler that the program has used on a module's call or `forward`, and let it run eagerly.

        None if there is none, also if the compiled call is the module's own: torch returns that when disabled.
        """
        call = module.__dict__.get("_compiled_call_impl")
        if call is not None and call != module._call_impl:
            compiler = self._compiler_of(module, call)
            if compiler is not None:
                module._compiled_call_impl = None
                self._asked[module] = compiler
            return compiler
        if module in self._later and hasattr(module.forward, "_torchdynamo_orig_callable"):
            compiler = self._compiler_of(module, getattr(module.forward, "__func__", module.forward))
            if compiler is not None:
                self._replaced.append(_Eager(module))
            return compiler
        return None

    def _compiler_of(self, module: nn.Module, compiled: Any) -> Compiler | None:
        """What has compiled a function; None where that was `torch.compiler.disable`."""
        if getattr(compiled, "_torchdynamo_disable", False):
            return None
        cells = [cell.cell_contents for cell in getattr(compiled, "__closure__", None) or ()]
        compiler = next((value for value in cells if hasattr(value, "compiler_config")), None)
        if compiler is None:
            raise ConfigError(
                f"{self._name(module)} was compiled in a way that infinity does not recognize: give initialize() the "
                "model as it was, and call engine.compile(...), or module.compile(...) of a block, after it"
            )
        return compiler

    def _compile(self, module: nn.Module, compiler: Compiler, *, leave: Collection[nn.Module]) -> None:
        """Compile a module, or the parts of it that can be. `leave`: modules that have a compiler of their own."""
        self._refuse_graphs(module, compiler)
        parts = [*self._outermost(module, leave)] if self._is_open(module) else [module]
        for part in () if _is_off(module) else parts:
            self._hooks.fuse(part)
            region = part.__dict__.get("forward")
            if not isinstance(region, Replaced) or not region.compiles:
                region = _Region(part)
                self._replaced.append(region)
            region.compile(compiler, self._kinds.function_of(part, region.eager))
        if parts != [module]:
            names = ", ".join(self._name(part) for part in parts[:3]) + (", ..." if len(parts) > 3 else "")
            logger.info(
                "%s is compiled in parts, because weights or gradients come and go inside: %s; the rest runs eagerly",
                self._name(module), f"{len(parts)} modules ({names})" if parts else "no module inside can be compiled",
            )  # fmt: skip

    def _outermost(self, module: nn.Module, leave: Collection[nn.Module]) -> Iterator[nn.Module]:
        """The outermost modules below one that can be compiled as they are, each once."""
        seen = {module}
        pending = [*module.children()][::-1]
        while pending:
            part = pending.pop()
            if part in seen or part in leave or _is_off(part):
                continue
            seen.add(part)
            children = [*part.children()]
            if self._is_open(part) or isinstance(part, (nn.ModuleList, nn.ModuleDict)):
                pending += children[::-1]
            elif children or not type(part).__module__.startswith("torch.nn."):
                yield part

    def _is_open(self, module: nn.Module) -> bool:
        """Return whether a module cannot be one region: modules inside gather for themselves or are recomputed, the
        plan has no room for all its gradients at once, weights lie in tiles, or checkpoints made inside have a tier.
        """
        inside = [inner for inner in module.modules() if inner is not module]
        own, theirs = self._hooks.units_at(module), {unit for inner in inside for unit in self._hooks.units_at(inner)}
        grad_numel = sum(unit.layout.numel for unit in own | theirs if unit.layout.trainable)
        return (
            any(not unit.placed.whole for unit in theirs - own)
            or (bool(theirs - own) and grad_numel > self._grad_numel_max)
            or any(isinstance(inner.__dict__.get("forward"), Recomputed) for inner in inside)
            or any(isinstance(param, TiledParameter) for param in module.parameters())
            or isinstance(module.__dict__.get("forward"), OffloadedForward)
        )

    def _refuse_graphs(self, module: nn.Module, compiler: Compiler) -> None:
        """ConfigError for CUDA graphs, which read weights where they lay when they were recorded."""
        units = [unit for inner in module.modules() for unit in self._hooks.units_at(inner)]
        if not self._accelerator or all(unit.placed.whole for unit in units) or _is_off(module):
            return
        settings: dict[str, Any] = getattr(compiler(_nothing), "get_compiler_config", dict)() or {}
        if settings.get("triton.cudagraphs"):
            raise ConfigError(
                f"{self._name(module)} is compiled with CUDA graphs, which need weights that never move, and stage 3 "
                'gathers them anew for each use: leave mode="reduce-overhead" out, take "max-autotune-no-cudagraphs" '
                "for \"max-autotune\", or set zero_optimization.stage to 2"
            )

    def _name(self, module: nn.Module) -> str:
        return self._paths.get(module) or type(module).__name__


class _Kinds:
    """The functions that are compiled for modules of one code and several kinds: see [Note: kinds of blocks]."""

    def __init__(self) -> None:
        # By code; then by the module's class and the shapes of its weights. The first kind has the code itself.
        self._codes: dict[CodeType, dict[tuple[Any, ...], CodeType]] = {}

    def function_of(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a module's `forward`, on the code of the module's kind; a callable that is no method, unchanged."""
        if not isinstance(forward, MethodType) or not isinstance(forward.__func__, FunctionType):
            return forward
        function, code = forward.__func__, forward.__func__.__code__
        kind = (type(module), *(param.shape for param in module.parameters()))
        kinds = self._codes.setdefault(code, {kind: code})
        if kind not in kinds:
            # Torch keeps sizes by the name of the code: the same in every process, and another for each kind.
            kinds[kind] = code.replace(co_name=f"{code.co_name}_{zlib.crc32(repr(kind).encode()):08x}")
        return forward if kinds[kind] is code else MethodType(_with_code(function, kinds[kind]), forward.__self__)


def _with_code(function: FunctionType, code: CodeType) -> FunctionType:
    made = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    return made


class _Region(Replaced):
    """A module's `forward`, compiled."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class _Eager(_Region):
    """A module's `forward` before the program compiled it, for the whole class or for this module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        plain = self._forward._torchdynamo_orig_callable  # type: ignore[attr-defined]
        self._forward = self._eager = plain if self._own is not None else MethodType(plain, module)


class _Compile:
    """Stands in for a module's `compile`. A deep copy of the module has its class's own."""

    def __init__(self, modules: CompiledModules, module: nn.Module) -> None:
        self._modules = modules
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._modules.compile(self._module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        module = memo[id(self._module)]
        return MethodType(type(module).compile, module)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model with what `torch.compile(module)` has put around it or around modules inside taken away, each module
    compiled in place (`module.compile`) instead: parameters have their own names again.
    """
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return model

    def opened(module: Any) -> Any:
        if not isinstance(module, dynamo.OptimizedModule):
            return module
        inner = opened(module._orig_mod)
        if inner.__dict__.get("_compiled_call_impl") is None:
            inner._compiled_call_impl = module.dynamo_ctx(inner._call_impl)
        return inner

    model = opened(model)
    for parent in [*model.modules()]:
        for name, child in parent._modules.items():
            parent._modules[name] = opened(child)
    return model


def untraced(verb: _Verb) -> _Verb:
    """A method of an engine that compilers do not look into: a program's compiled function that calls it is cut there,
    and the verb runs as without it.
    """

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        return _outside(verb, *args, **kwargs) if torch.compiler.is_compiling() else verb(*args, **kwargs)

    return call  # type: ignore[return-value]


def eager_backward(verb: _Verb) -> _Verb:
    """`untraced`, for the verb that runs backward: ConfigError where backward itself is compiled."""

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        autograd = sys.modules.get("torch._dynamo.compiled_autograd")
        if autograd is not None and autograd.compiled_autograd_enabled:
            raise ConfigError(
                "backward is compiled (compiled autograd), which would read weights before hooks have gathered them: "
                "switch it off around engine.backward(); engine.compile() compiles what backward computes, too"
            )
        return verb(*args, **kwargs)

    return untraced(call)  # type: ignore[return-value]


@not_compiled("an engine's verbs are not compiled: call engine.compile() instead of compiling what calls the engine")
def _outside(verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    warn_once(
        "traced",
        "torch.compile was given the engine, or a function that calls it: that compiles nothing of the model. Call "
        "engine.compile(...) with the same options",
    )
    return verb(*args, **kwargs)


def _is_off(module: nn.Module) -> bool:
    """Whether the program has asked that a module is never compiled."""
    forward = module.forward
    functions = (module.__dict__.get("_compiled_call_impl"), getattr(forward, "eager", forward))
    return any(getattr(function, "_torchdynamo_disable", False) for function in functions)


def _nothing() -> None:
    """What a compiler is asked about its options with."""
