"""A model cut into stages, at run time: the model's own forward runs on every stage, with stand-ins for other stages.

Nothing is traced or rewritten. While a stage's forward runs, stand-ins replace modules in their parents:

- A block of an earlier stage passes its first argument on, in the form in which the block answers.
- The stage's first block is called with the received tensors in the place of its first argument.
- The first block of the next stage raises `StageEnd` with its first argument, which ends the forward.
- On all stages but the first, modules in front of the blocks that have parameters compute with zeros that take no
  memory. An embedding only answers zeros, of its own, which the model may write to.

Everything else, masks and positions included, is computed by the model's code from the batch, which every stage has.
The stand-ins call modules instead of adding hooks to them, so that all hooks of a stage's blocks see the received
tensors and are done when the stage ends, whenever they were registered. Hooks of modules that are replaced do not run.

The modules are back in their places when `forward` returns or raises: names never change. A stand-in shares the
`__dict__` of its block, so that even code that walks the model in its forward finds the blocks' own children,
parameters and hooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from infinity.errors import ConfigError, StateError
from infinity.plan.stages import StageCut, StageEnd
from infinity.zero.forwards import set_forward

# What crosses the boundary between two stages: the first argument of a block, a tensor or several.
Boundary = tuple[Tensor, ...]

# Rows of an embedding that has no table: more than any vocabulary.
_ROWS = 1 << 31


class StagedModel:
    """A model whose forward runs one stage at a time.

    model: trained as it is; an engine may have its hooks on it. own: the stages of this rank. dtype: the compute dtype,
    that of the zeros in place of embeddings. answers: for blocks that answer with a tuple or a list its length, as
    `record_cut` returns it; the others answer with what the next block takes.
    """

    def __init__(
        self, model: nn.Module, cut: StageCut, *, own: Collection[int], dtype: torch.dtype,
        answers: Mapping[str, int] | None = None,
    ) -> None:  # fmt: skip
        self._model = model
        self._cut = cut
        self._own = frozenset(own)
        self._dtype = dtype
        self._answers = answers or {}
        self._swaps: dict[int, _Swap] = {}
        # Where a caller passes `use_cache` by position; None if the model takes none.
        self._use_cache = position_of_use_cache(model)

    def forward(
        self, stage: int, received: Boundary | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Boundary | Any:
        """Run one stage of the model's forward on a micro-batch.

        received: what the stage before returned, None at stage 0. Return what crosses the boundary behind the stage; of
        the last stage, the model's output. `use_cache` is False unless the caller says otherwise, because stand-ins
        fill no cache. StateError if the model's forward does not call the blocks in their order.
        """
        swap = self._swaps.get(stage) or self._make_swap(stage, received)
        if self._use_cache is not None and len(args) <= self._use_cache and kwargs.get("use_cache") is None:
            kwargs = {**kwargs, "use_cache": False}
        if received is not None:
            swap.received.append(received)
        outputs = None
        swap.put()
        try:
            output = self._model(*args, **kwargs)
        except StageEnd as end:
            outputs = end.outputs
        finally:
            swap.take_out()
            unused = bool(swap.received)
            swap.received.clear()
        if unused or (outputs is None) != (stage == self._cut.last):
            blocks = self._cut.blocks_of(stage)
            raise StateError(
                f"the forward of {type(self._model).__name__} did not run stage {stage} from {blocks[0]} to "
                f"{blocks[-1]}: it must call all blocks once, in their order. What leaves blocks out at random "
                "(LayerDrop) or by a condition cannot be cut into stages: turn it off, or use data or tensor "
                "parallelism"
            )
        return output if outputs is None else outputs

    def remove(self) -> None:
        """Forget all stand-ins; idempotent. None of them is in the model between two forwards."""
        self._swaps.clear()
        self._own = frozenset()

    def _make_swap(self, stage: int, received: Boundary | None) -> _Swap:
        if stage not in self._own:
            raise StateError(f"stage {stage} is not run here, but {sorted(self._own) or 'none, since it was removed'}")
        if (received is None) != (stage == 0):
            raise StateError(f"stage {stage} takes {'no' if stage == 0 else 'the'} tensors of the stage before it")
        swap = self._swaps[stage] = _Swap()
        begin, end = self._cut.bounds[stage : stage + 2]
        blocks = [self._model.get_submodule(path) for path in self._cut.blocks]
        kept = {*blocks, *(self._model.get_submodule(path) for path in self._cut.after)}
        stand_ins: dict[nn.Module, nn.Module] = {}
        for index, (path, block) in enumerate(zip(self._cut.blocks, blocks, strict=True)):
            if index < begin:
                answer = self._answers.get(path, 0)
                stand_ins[block] = _EarlierBlock(block, path, answer=answer, received=swap.received)
            elif index == begin and received is not None:
                stand_ins[block] = _FirstBlock(block, path, received=swap.received)
            elif index >= end:
                stand_ins[block] = _LaterBlock(block, path)
        if received is not None:
            zero = torch.zeros((), dtype=self._dtype, device=received[0].device)
            for module in self._front(kept):
                stand_ins[module] = _weightless(module, zero, kept)
        swap.replace(self._model, stand_ins, kept)
        return swap

    def _front(self, others: Collection[nn.Module]) -> Iterator[nn.Module]:
        """The outermost modules with parameters that run in front of the blocks: all but the blocks, what contains them
        and what runs behind them (`others`).
        """
        around = {self._model.get_submodule(path) for path in paths_around(self._cut.blocks)}

        def visit(module: nn.Module) -> Iterator[nn.Module]:
            for child in module.children():
                if child in around:
                    yield from visit(child)
                elif child not in others and next(child.parameters(), None) is not None:
                    yield child

        return visit(self._model)


def paths_around(blocks: Sequence[str]) -> frozenset[str]:
    """The paths of the modules that contain blocks: those on the way from the root to them."""
    parts = [path.split(".") for path in blocks]
    return frozenset(".".join(names[:end]) for names in parts for end in range(len(names)))


class _Swap:
    """The stand-ins of one stage: where each is put and what it replaces."""

    __slots__ = ("_places", "received")

    def __init__(self) -> None:
        # (children of a module by name, their stand-ins, themselves)
        self._places: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        # What the stage before has sent, until the first block takes it.
        self.received: list[Boundary] = []

    def replace(self, module: nn.Module, stand_ins: Mapping[nn.Module, nn.Module], kept: Collection[nn.Module]) -> None:
        """Note where stand-ins belong in `module` and in what contains blocks; `kept` is not searched."""
        seen = {*stand_ins, *kept}
        pending = [module]
        while pending:
            children = pending.pop()._modules
            inside = {name: child for name, child in children.items() if child is not None}
            theirs = {name: child for name, child in inside.items() if child in stand_ins}
            if theirs:
                self._places.append((children, {name: stand_ins[child] for name, child in theirs.items()}, theirs))
            pending += [child for child in inside.values() if child not in seen]
            seen.update(inside.values())

    def put(self) -> None:
        for children, stand_ins, _ in self._places:
            children.update(stand_ins)

    def take_out(self) -> None:
        for children, _, modules in self._places:
            children.update(modules)


class _StandIn(nn.Module):
    """Stands in a block's place for one stage; to all but its caller, it is the block.

    It shares the block's `__dict__` and says that it is of the block's class; its own state is in slots.
    """

    __slots__ = ("_block", "_first")
    _block: nn.Module
    _first: FirstArgument

    def __init__(self, block: nn.Module, path: str, **slots: Any) -> None:
        # Not by `nn.Module.__init__` and `__setattr__`, which would write to what it shares.
        state = {"__dict__": block.__dict__, "_block": block, "_first": FirstArgument(block, path), **slots}
        for name, value in state.items():
            object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        # What the block's class has; it is not in the `__dict__`.
        return getattr(self._block, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._block)


class _EarlierBlock(_StandIn):
    """A block of an earlier stage. answer: length of the tuple with which the block answers, 0 if with none."""

    __slots__ = ("_answer", "_received")
    _answer: int
    _received: list[Boundary]

    def __init__(self, block: nn.Module, path: str, *, answer: int, received: list[Boundary]) -> None:
        super().__init__(block, path, _answer=answer, _received=received)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        first = self._first.of(args, kwargs)
        if not self._received:
            raise StateError(f"{self._first.path} is called behind blocks of later stages, but blocks run in order")
        return (first, *[None] * (self._answer - 1)) if self._answer else first


class _FirstBlock(_StandIn):
    """The stage's first block: runs with what was received instead of its first argument."""

    __slots__ = ("_received",)
    _received: list[Boundary]

    def __init__(self, block: nn.Module, path: str, *, received: list[Boundary]) -> None:
        super().__init__(block, path, _received=received)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._received:
            raise StateError(f"{self._first.path} is called twice in one forward, but blocks of stages run once")
        args, kwargs = self._first.replaced(args, kwargs, self._received.pop())
        return self._block(*args, **kwargs)


class _LaterBlock(_StandIn):
    """A block of a later stage: ends the forward."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise StageEnd(self._first.tensors(args, kwargs))


class FirstArgument:
    """The first argument of a block, which carries from block to block what crosses a boundary."""

    __slots__ = ("_name", "path")

    def __init__(self, block: nn.Module, path: str) -> None:
        self._name = next(iter(inspect.signature(block.forward).parameters), "")
        self.path = path

    def of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return it from what the block is called with, by position or by name. ConfigError if it is missing."""
        if not args and self._name not in kwargs:
            raise ConfigError(
                f"{self.path} is called without its first argument ({self._name or 'it takes none'}), which is what "
                "crosses the boundary between stages: the model cannot be cut into stages"
            )
        return args[0] if args else kwargs[self._name]

    def tensors(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Boundary:
        """Return it as what is sent: one tensor or several. ConfigError if it is anything else."""
        first = self.of(args, kwargs)
        found = (first,) if isinstance(first, Tensor) else first
        if not isinstance(found, (tuple, list)) or not found or not all(isinstance(each, Tensor) for each in found):
            raise ConfigError(
                f"the first argument of {self.path} is a {type(first).__name__}, but only a tensor or a tuple of "
                "tensors crosses the boundary between stages: the model cannot be cut into stages"
            )
        return tuple(found)

    def replaced(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], boundary: Boundary
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what the block is called with, with the tensors of a boundary in the place of its first argument."""
        first = boundary[0] if len(boundary) == 1 else boundary
        if args:
            return (first, *args[1:]), kwargs
        self.of(args, kwargs)
        return args, {**kwargs, self._name: first}


def _weightless(module: nn.Module, zero: Tensor, kept: Collection[nn.Module]) -> nn.Module:
    """Return a copy of a module that computes with zeros for parameters and runs no hooks.

    zero: a scalar of the compute dtype. The zeros are expanded from it and take no memory. Modules inside that are in
    `kept` or have no parameters are not copied.
    """

    def inside(child: nn.Module | None) -> nn.Module | None:
        plain = child is None or child in kept or next(child.parameters(), None) is None
        return child if child is None or plain else _weightless(child, zero, kept)

    forward = None
    copied: nn.Module = object.__new__(type(module))
    state = {name: value for name, value in module.__dict__.items() if name != "forward"}
    state |= {name: value for name, value in nn.Module().__dict__.items() if "hooks" in name}
    state["_parameters"] = {name: _zeros(param, zero) for name, param in module._parameters.items()}
    state["_modules"] = {name: inside(child) for name, child in module._modules.items()}
    if isinstance(module, nn.Embedding):
        # A shard of a table has fewer rows than there are words, and `max_norm` would write to it.
        state["_parameters"]["weight"] = zero.expand(_ROWS, module.embedding_dim)
        state["max_norm"] = None
        if type(module).forward is nn.Embedding.forward:
            forward = _answer_rows(zero, module.embedding_dim)
    elif isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        forward = _answer_rows(zero, module.out_features, of=-1)
    copied.__dict__.update(state)
    set_forward(copied, forward)
    return copied


def _zeros(param: Tensor | None, zero: Tensor) -> Tensor | None:
    if param is None or param.is_floating_point():
        return None if param is None else zero.expand(param.shape)
    return torch.zeros((), dtype=param.dtype, device=zero.device).expand(param.shape)


def _answer_rows(zero: Tensor, dim: int, of: int | None = None) -> Callable[[Tensor], Tensor]:
    """Return a forward that answers zeros of `dim` for each element of its input, or for each vector with of=-1."""

    def forward(input: Tensor) -> Tensor:
        # Not expanded: models scale embeddings, and add to them, in place.
        return zero.new_zeros(*input.shape[:of], dim)

    return forward


def position_of_use_cache(model: nn.Module) -> int | None:
    """Return the position of `use_cache` among the arguments of a model's forward, also of one that hands on what it
    does not name; None if it takes none.
    """
    params = inspect.signature(model.forward).parameters
    if "use_cache" in params:
        return [*params].index("use_cache")
    passes_on = any(param.kind is inspect.Parameter.VAR_KEYWORD for param in params.values())
    if passes_on and hasattr(getattr(model, "config", None), "use_cache"):
        return sum(param.kind is not inspect.Parameter.VAR_KEYWORD for param in params.values())
    return None
