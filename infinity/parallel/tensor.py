"""The tensor axis in a model: modules that hold a shard get a forward that exchanges what the shard lacks.

`apply` sets `module.forward`, which `Module.__call__` runs behind all pre-hooks: parameters are gathered by then, and
each forward uses the module's own. So whatever gathers, tiles or recomputes sees an ordinary module. Parameters are not
changed here; in its forward each must hold its local shard. Attributes such as `out_features` keep the whole sizes.

A region (an attention, an MLP) copies its inputs once, however many projections read them, so that backward has one sum
a region. With `sequence`, in training, activations between regions are this rank's tokens: regions gather them, and
what would be summed behind them is reduce-scattered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import check_same_batch
from infinity.errors import ConfigError
from infinity.parallel import functions
from infinity.parallel.functions import VocabularySlice, divided_loss, is_causal_loss
from infinity.parallel.random_state import OwnNumbers, has_dropout, share_random_state
from infinity.plan.tensor_axis import Role, TensorAxis
from infinity.zero.forwards import Replaced

# On the head: its `VocabularySlice`, by which `infinity.tiling` computes losses, too.
VOCABULARY = "_infinity_vocabulary"

Forward = Callable[..., Any]

_COMPARED_FORWARDS = 2


@dataclass(frozen=True, slots=True)
class _Place:
    """One module: where it lies, and with whom it communicates.

    copies: whether it copies its own inputs; else the region around it has. root: the model by whose mode the sequence
    is cut around this module; None where it never is.
    """

    module: nn.Module
    path: str
    group: AxisGroup
    copies: bool
    root: nn.Module | None

    @property
    def cut(self) -> bool:
        """Whether activations around this module are this rank's tokens."""
        return self.root is not None and self.root.training

    def copy(self, value: Any) -> Any:
        """Return a value whose gradients are summed over ranks, if it is a tensor that has any."""
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            return functions.copy_in(value, self.group, self.path)
        if isinstance(value, tuple | list) and type(value) in (tuple, list):
            return type(value)(self.copy(each) for each in value)
        return value

    def gather(self, value: Any) -> Any:
        """Return all ranks' tokens of a tensor; backward sums and cuts."""
        return functions.gather_sequence(value, self.group, self.path) if isinstance(value, Tensor) else value

    def leave(self, tensor: Tensor, *, owned: bool = True) -> Tensor:
        """Return the sum over ranks of what the module has computed, or this rank's tokens of it."""
        if self.cut:
            return functions.reduce_scatter_sequence(tensor, self.group, self.path)
        return functions.sum_out(tensor, self.group, self.path, owned=owned)


class _Sharded(Replaced):
    """A `forward` of which a wrapper makes one that computes with shards."""

    compiles = False

    def __init__(self, module: nn.Module, wrapper: Callable[..., Any], context: tuple[Any, ...]) -> None:
        super().__init__(module)
        self._wrapper = wrapper
        self._context = context

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._wrapper(self._forward, *self._context, *args, **kwargs)


class Applied:
    """What `apply` has set in a model. `remove` takes it out again."""

    def __init__(self, group: AxisGroup) -> None:
        self._group = group
        self._forwards: list[_Sharded] = []
        self._heads: list[nn.Module] = []
        # Forwards of which the batches are still to be compared.
        self._compared = _COMPARED_FORWARDS if group.size > 1 else 0

    def check_batch(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ConfigError if ranks of the group are called with different batches. Collective; compares the first
        few, because a program divides its data in one way.
        """
        if self._compared:
            self._compared -= 1
            check_same_batch(args, kwargs, self._group)

    def wrap(self, module: nn.Module, wrapper: Callable[..., Any], *context: Any) -> None:
        """Let `wrapper(former forward, *context, *args, **kwargs)` be the module's forward."""
        self._forwards.append(_Sharded(module, wrapper, context))

    def mark_head(self, module: nn.Module, words: VocabularySlice) -> None:
        """Tell the head which words it has."""
        setattr(module, VOCABULARY, words)
        self._heads.append(module)

    def remove(self) -> None:
        """Give every module its former forward back; idempotent."""
        # Backwards, because a module may have been wrapped twice.
        while self._forwards:
            self._forwards.pop().restore()
        while self._heads:
            delattr(self._heads.pop(), VOCABULARY)


def apply(model: nn.Module, axis: TensorAxis, group: AxisGroup, device: torch.device | None = None) -> Applied:
    """Make `model` compute with the shards that `axis` leaves to this rank of `group`.

    In training, a causal language model with `axis.head` that is called with labels computes its loss from this rank's
    words: its `outputs.logits` are then [..., vocabulary / size]. Otherwise the head gathers them. With `axis.blocks`,
    what the model records between blocks in training (hidden states, router logits) are this rank's tokens; evaluation
    cuts nothing.

    Whether regions need random numbers of their own is decided here, by the dropouts that the model has now. device:
    ranks share the numbers of its default generators, and of the CPU's, from now on. Collective then. ConfigError for
    a module that cannot be divided.
    """
    applied = Applied(group)
    if axis.size == 1:
        return applied
    if axis.size != group.size:
        raise ConfigError(f"the tensor axis is planned for {axis.size} ranks, but its group has {group.size}")
    _check(model, axis)
    if device is not None:
        share_random_state(group, device)
    blocks = () if axis.blocks is None else _paths_between(model, *axis.blocks)
    # A region in a region has its inputs already.
    regions = [each for each in axis.regions if not _lies_in(each.path, (other.path for other in axis.regions))]
    paths = [region.path for region in regions]

    def place(path: str) -> _Place:
        cut = path in blocks or _lies_in(path, blocks)
        module = model.get_submodule(path)
        return _Place(module, path, group, copies=not _lies_in(path, paths), root=model if cut else None)

    for path, role in axis.roles.items():
        # In a region a colwise module does nothing of its own.
        if role is not Role.COLWISE or place(path).copies:
            applied.wrap(model.get_submodule(path), _WRAPPERS[role], place(path))
    numbers = OwnNumbers(group) if has_dropout(model) else None
    for region in regions:
        module, own = model.get_submodule(region.path), numbers if region.divided else None
        if axis.roles.get(region.path) is not Role.EXPERTS:
            first = next(iter(inspect.signature(module.forward).parameters), "")
            applied.wrap(module, _region, place(region.path), first)
            if own is not None:
                applied.wrap(module, _with_numbers, own.on, module)
            elif numbers is not None and axis.sequence:
                # Around it each rank has numbers for its own tokens; here all ranks compute the same.
                applied.wrap(module, _with_numbers, numbers.common_on, module)
        elif own is not None:
            # They have copied their inputs.
            applied.wrap(module, _with_numbers, own.on, module)
    if numbers is not None:
        for path in blocks:
            block = model.get_submodule(path)
            applied.wrap(block, _with_numbers, numbers.on, block)
    for path, wrapper in zip(axis.blocks or (), (_first_block, _last_block), strict=False):
        block = model.get_submodule(path)
        first = next(iter(inspect.signature(block.forward).parameters), "")
        applied.wrap(block, wrapper, place(path), first)
    if axis.head is not None:
        _apply_to_head(applied, model, axis.head, group)
    return applied


def _apply_to_head(applied: Applied, model: nn.Module, path: str, group: AxisGroup) -> None:
    """Let the head tell which words it has, and the model around it compute its loss with them."""
    words = VocabularySlice(group, path)
    applied.mark_head(model.get_submodule(path), words)
    *parents, _ = path.split(".")
    around: list[Any] = [model.get_submodule(".".join(parents[:count])) for count in range(len(parents) + 1)]
    # The innermost module around the head that computes a loss by a function that a program may set.
    owner = next((each for each in reversed(around) if hasattr(each, "loss_function")), None)
    if owner is not None:
        names = list(inspect.signature(owner.forward).parameters)
        applied.wrap(owner, _causal_forward, owner, words, names.index("labels") if "labels" in names else -1)


def _check(model: nn.Module, axis: TensorAxis) -> None:
    for path, role in axis.roles.items():
        module: Any = model.get_submodule(path)
        if role is Role.EMBEDDING and (module.max_norm is not None or module.scale_grad_by_freq):
            raise ConfigError(
                f"{path}: an embedding with max_norm or scale_grad_by_freq needs its whole table, so the tensor axis "
                "cannot divide it: keep it whole by parallel.plan, or turn these off"
            )
        if role is Role.EXPERTS and _lies_in(path, (region.path for region in axis.regions)):
            raise ConfigError(f"{path}: experts copy their inputs themselves, so they cannot lie in another region")
    for region in axis.regions if axis.sequence else ():
        if "forward" in model.get_submodule(region.path).__dict__:
            raise ConfigError(
                f"{region.path} has a forward of its own (infinity.tile_sequence sets one), which may divide tokens "
                "otherwise than parallel.sequence does: call tile_sequence(mlps=False), or turn parallel.sequence off"
            )


def _lies_in(path: str, others: Any) -> bool:
    """Whether `path` is below one of the others."""
    return any(path.startswith(f"{other}." if other else "") and path != other for other in others)


def _paths_between(model: nn.Module, first: str, last: str) -> tuple[str, ...]:
    """The paths of the blocks from the first to the last, which are children of one module."""
    parent, _, name = first.rpartition(".")
    other, _, final = last.rpartition(".")
    names = [each for each, _ in model.get_submodule(parent).named_children()]
    if parent != other or names.index(name) > names.index(final):
        raise ConfigError(f"the sequence cannot be cut from {first} to {last}: they are not blocks of one list")
    prefix = f"{parent}." if parent else ""
    return tuple(prefix + each for each in names[names.index(name) : names.index(final) + 1])


def _colwise(forward: Forward, place: _Place, hidden: Tensor) -> Any:
    if place.copies:
        hidden = place.gather(hidden) if place.cut else place.copy(hidden)
    return forward(hidden)


def _colwise_gather(forward: Forward, place: _Place, hidden: Tensor) -> Any:
    output = _colwise(forward, place, hidden)
    words = place.module.__dict__.get(VOCABULARY)
    # A scalar is a loss already (`infinity.tile_sequence`).
    if (words is not None and words.local) or output.dim() == 0:
        return output
    return functions.gather_columns(output, place.group, place.path)


def _rowwise(forward: Forward, place: _Place, columns: Tensor) -> Tensor:
    module: Any = place.module
    output = place.leave(nn.functional.linear(columns, module.weight))
    return output if module.bias is None else output + module.bias


def _rowwise_split(forward: Forward, place: _Place, hidden: Tensor) -> Tensor:
    return _rowwise(forward, place, functions.split_columns(hidden, place.group, place.path))


def _embedding(forward: Forward, place: _Place, words: Tensor) -> Tensor:
    """Look up this rank's words by the former forward, which may scale them; rows of other words are zero."""
    module: Any = place.module
    rows, padding = module.weight.shape[0], module.padding_idx
    first = rows * place.group.index
    local = words - first
    missing = (local < 0) | (local >= rows)
    if padding is not None:
        module.padding_idx = padding - first if 0 <= padding - first < rows else None
    try:
        found = forward(local.masked_fill(missing, 0))
    finally:
        module.padding_idx = padding
    return functions.sum_out(found.masked_fill(missing.unsqueeze(-1), 0), place.group, place.path, owned=True)


def _experts(forward: Forward, place: _Place, *args: Any, **kwargs: Any) -> Tensor:
    # Cut, the indices of experts are those of this rank's tokens, so all inputs are gathered.
    enter = place.gather if place.cut else place.copy
    output = forward(*(enter(each) for each in args), **{name: enter(each) for name, each in kwargs.items()})
    return place.leave(output, owned=False)


def _region(forward: Forward, place: _Place, first: str, *args: Any, **kwargs: Any) -> Any:
    hidden = args[0] if args else kwargs.get(first)
    if place.cut:
        # The others (masks, tables of positions) are of all tokens already.
        hidden = place.gather(hidden)
        args, kwargs = _with_first(args, kwargs, first, None)
    args, kwargs = tuple(place.copy(each) for each in args), {name: place.copy(each) for name, each in kwargs.items()}
    if place.cut:
        args, kwargs = _with_first(args, kwargs, first, hidden)
    return forward(*args, **kwargs)


def _with_numbers(
    forward: Forward, numbers: Callable[[torch.device], Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    if not module.training:
        return forward(*args, **kwargs)
    device = next(each.device for each in (*args, *kwargs.values()) if isinstance(each, Tensor))
    with numbers(device):
        return forward(*args, **kwargs)


def _first_block(forward: Forward, place: _Place, first: str, *args: Any, **kwargs: Any) -> Any:
    if place.cut:
        hidden = args[0] if args else kwargs[first]
        args, kwargs = _with_first(args, kwargs, first, functions.scatter_sequence(hidden, place.group, place.path))
    return forward(*args, **kwargs)


def _last_block(forward: Forward, place: _Place, first: str, *args: Any, **kwargs: Any) -> Any:
    output = forward(*args, **kwargs)
    if not place.cut:
        return output
    hidden = output if isinstance(output, Tensor) else output[0]
    # What follows is the same on all ranks, and so are its gradients.
    whole = functions.gather_sequence(hidden, place.group, place.path, partial=False)
    return whole if isinstance(output, Tensor) else type(output)((whole, *output[1:]))


def _with_first(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], first: str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, the first one (named `first`) replaced."""
    return ((value, *args[1:]), dict(kwargs)) if args else (args, {**kwargs, first: value})


def _causal_forward(forward: Forward, model: Any, words: VocabularySlice, place: int, *args: Any, **kwargs: Any) -> Any:
    """place: of `labels` among the arguments of the model's forward."""
    labels = args[place] if 0 <= place < len(args) else kwargs.get("labels")
    divided = model.training and labels is not None and is_causal_loss(model.loss_function)
    with divided_loss(model, words) if divided else nullcontext():
        return forward(*args, **kwargs)


_WRAPPERS: dict[Role, Callable[..., Any]] = {
    Role.COLWISE: _colwise, Role.COLWISE_GATHER: _colwise_gather, Role.ROWWISE: _rowwise,
    Role.ROWWISE_SPLIT: _rowwise_split, Role.EMBEDDING: _embedding, Role.EXPERTS: _experts,
}  # fmt: skip
