"""A weight in tiles: what stands for it in the model, and how linear layers and embeddings use it.

The plan has cut the weight along its rows into units (see `infinity.plan.spec`), and each unit holds one tile, a
parameter of its own that no module knows. The module keeps its parameter, which looks whole and has no data: a
`TiledParameter`. `F.linear`, `F.embedding` and `torch.bmm` that meet one go tile by tile, in forward as in backward:
gather, use, release; the gradient of a tile is reduced before the next tile is gathered. So the model needs no change,
whoever calls the function with the weight, and a weight that is tied is in tiles wherever it is used.

[Note: a whole weight in training] Inside `infinity.read` the parameter has all of its data, for the block only. What a
program computes with it there may be differentiated later: torch's own functions are given a view of the data, which
autograd keeps for them. An autograd.Function of the program's saves the parameter itself, which has no data in its
backward, and reads it again there, as it would a partitioned one. No hook wraps what autograd saves, or it would get
another tensor back. The gradient comes whole, on the parameter, and is divided among the tiles, whose own are
incomplete until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infinity.errors import StateError
from infinity.plan.layout import Slot, UnitLayout
from infinity.zero import parameter
from infinity.zero.coordinator import Coordinator, ModuleCall, refuse_transform
from infinity.zero.hooks import backward_comes
from infinity.zero.parameter import ReleasedParameter
from infinity.zero.unit import Unit

# Elements that are cast at a time.
_CAST_NUMEL = 1 << 20
# Functions of a parameter itself, for which no view of it can stand: of attributes, of its memory and of its graph.
_OF_THE_PARAMETER = {"__set__", "__delete__", "set_", "resize_", "resize_as_", "grad", "backward"}


class TiledParameter(ReleasedParameter):
    """The class of a parameter whose data lies in tiles; see the module's text.

    Inside `infinity.read` and `infinity.modify` it has its data, too, in memory of its own.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        with _whole([self], "copy.deepcopy"):
            copied = nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _BY_TILES and isinstance(weight := _weight(args, kwargs), TiledParameter):
            transformed = torch._C._are_functorch_transforms_active()
            if transformed and parameter.is_released(weight):
                refuse_transform(parameter.name_of(weight))
            if not transformed or parameter.is_released(weight):
                return _BY_TILES[func](*args, **kwargs)
        if func is Tensor.__repr__ and parameter.is_released(args[0]):
            return parameter.describe_released(args[0])
        name, metadata = getattr(func, "__name__", str(func)), func in parameter.METADATA
        with _whole([] if metadata else list(parameter.kept(args, kwargs)), name):
            if not metadata and name not in _OF_THE_PARAMETER and torch.is_grad_enabled():
                args, kwargs = _viewed(args), _viewed(kwargs)
            return func(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `start` to `stop` of a weight, and the unit that has them."""

    unit: Unit
    param: nn.Parameter
    start: int
    stop: int

    @property
    def wants_gradient(self) -> bool:
        """Whether a gradient is wanted: not for a weight in tiles that no parameter group has."""
        whole = parameter.whole_of(self.param)
        if not whole.requires_grad or whole is self.param:
            return whole.requires_grad
        # A weight that was frozen when it was cut may require a gradient since: FrozenGradients refuses that gradient.
        return self.unit.layout.trainable or not self.param.requires_grad

    def add_gradient(self, grad: Tensor) -> None:
        """Add a gradient [rows, width] to `param.grad`, as autograd would."""
        grad = grad.to(self.param.dtype)
        self.param.grad = grad if self.param.grad is None else self.param.grad.add_(grad)

    def add_product(self, product: Callable[..., Tensor], left: Tensor, right: Tensor, room: Tensor) -> None:
        """Add the gradient `product(left, right)`, which is left in `room`."""
        # Under autocast the factors have another dtype than the weight.
        same = room.dtype is left.dtype
        self.add_gradient(product(left, right, out=room) if same else room.copy_(product(left, right)))


class Tiles:
    """The tiles of one weight, in the order of its rows, and the owner of the parameter that stands for them."""

    def __init__(self, param: nn.Parameter, tiles: Sequence[Tile], coordinator: Coordinator) -> None:
        self.param = param
        self.tiles = tuple(tiles)
        self.coordinator = coordinator
        # Of blocks that made the weight whole in a forward: its gradient is to come.
        self._awaited: ModuleCall | None = None
        self._listens = False

    @property
    def gathers_on_use(self) -> bool:
        """Never: see `materialize`."""
        return False

    def materialize(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Raise StateError: the whole weight is too large to be gathered implicitly."""
        name = parameter.name_of(self.param)
        if self.coordinator.closed:
            raise StateError(
                f"{name} was left on its tier when the engine was closed, and {use} needs its data: keep the weights "
                "with engine.close(keep_weights=True), or read it before with infinity.read(param)"
            )
        raise StateError(
            f"{name} is executed in {len(self.tiles)} tiles, because it is too large to gather, and {use} needs all of "
            "it at once: use `with infinity.read(param):` outside of forward; inside call torch.nn.functional.linear "
            "or embedding (for a stack of matrices torch.bmm) with the weight, or set "
            "zero_optimization.tile_parameters to 0 to have it gathered whole"
        )

    def forward(self, *, returns: bool, lookup: bool = False) -> Iterator[tuple[Tile, Tensor, ModuleCall]]:
        """(tile, its rows [rows, width], scope) one after the other, gathered while the loop's body runs. `returns`:
        whether `backward` (of a `lookup`, `passed`) will be called with the scopes.
        """
        for tile in self.tiles:
            scope = self.coordinator.open_scope([tile.unit], lookup=lookup)
            try:
                yield tile, tile.param.detach(), scope
            finally:
                # may_hold would keep all tiles gathered at once, from a recomputed forward to its backward.
                self.coordinator.close_scope(scope, will_return=returns, may_hold=False)

    def passed(self, scopes: Sequence[ModuleCall]) -> Iterator[Tile]:
        """The tiles in backward, the last first, for the scopes that forward gave."""
        self.coordinator.join_backward()
        for tile, scope in zip(reversed(self.tiles), reversed(scopes), strict=True):
            self.coordinator.enter_backward(scope)
            yield tile
            self.coordinator.leave_backward(scope)

    def backward(self, scopes: Sequence[ModuleCall]) -> Iterator[tuple[Tile, Tensor, Tensor | None]]:
        """The same with their rows, gathered, and room for the gradient, where one is wanted."""
        room: Tensor | None = None
        latest: Tile | None = None
        for tile in self.passed(scopes):
            rows = tile.param.detach()
            if not tile.wants_gradient:
                yield tile, rows, None
            else:
                # The room is reused from tile to tile: allocated for each, it would leave holes in the C library's
                # heap. An accelerator's allocator leaves none, and a copy out of it may still be running there.
                free = latest is not None and latest.param.grad is None and rows.is_cpu
                if room is None or not free or len(room) < len(rows):
                    room = torch.empty_like(rows)
                latest = tile
                yield tile, rows, room[: len(rows)]

    def await_gradient(self) -> None:
        """A block that made the weight whole is over, and its backward may follow."""
        if not self.param.requires_grad or not backward_comes(self.coordinator):
            return
        if not self._listens:
            self.param.register_post_accumulate_grad_hook(_divide_gradient)
            self._listens = True
        calls = self.coordinator.calls
        # Outside of a forward most programs only look at values. A gradient that comes all the same may be late: then
        # the boundary collects it.
        if calls.innermost is not None and (self._awaited is None or not calls.waits(self._awaited)):
            self._awaited = ModuleCall([tile.unit for tile in self.tiles])
            calls.await_backward(self._awaited)

    def divide_gradient(self) -> None:
        """Give the gradient of the whole weight to the tiles: all uses have run backward. None where functions of this
        module were the only ones.
        """
        grad, self.param.grad = self.param.grad, None
        self.coordinator.join_backward()
        for tile in self.tiles:
            if grad is not None and tile.wants_gradient:
                tile.add_gradient(grad[tile.start : tile.stop])
        if self._awaited is not None:
            self.coordinator.collect(self._awaited)
            self._awaited = None

    def returns(self, *others: Tensor | None) -> bool:
        """Return whether a function of the weight and of `others` that is called now will run backward."""
        return backward_comes(self.coordinator) and any(
            each is not None and each.requires_grad for each in (self.param, *others)
        )


def params_of(layout: UnitLayout, by_name: Mapping[str, nn.Parameter]) -> list[nn.Parameter]:
    """Return a unit's parameters by slot: the model's own, and a new parameter for each tile."""
    return [_tile(by_name[slot.name], slot) if slot.is_tile else by_name[slot.name] for slot in layout.slots]


def adopt_tiles(units: Sequence[Unit], coordinator: Coordinator) -> None:
    """Turn every parameter that lies in tiles into one that stands for them."""
    found: dict[str, list[Tile]] = {}
    for unit in units:
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            if slot.is_tile:
                rows, *inner = slot.own_shape
                first = slot.start // math.prod(inner)
                found.setdefault(slot.name, []).append(Tile(unit, param, first, first + rows))
    for name, tiles in found.items():
        whole = parameter.whole_of(tiles[0].param)
        parameter.attach(whole, Tiles(whole, tiles, coordinator), name)
        whole.__class__ = TiledParameter


def tiles_of(param: Any) -> Tiles | None:
    """Return the tiles of a parameter that lies in tiles; None for any other."""
    owner = parameter.owner_of(param) if isinstance(param, TiledParameter) else None
    return owner if isinstance(owner, Tiles) else None


@contextmanager
def assembled(param: nn.Parameter, data: Tensor) -> Iterator[None]:
    """Give a parameter in tiles `data` of its whole shape for the block."""
    with torch._C.DisableTorchFunctionSubclass():
        stand_in = param.data
    param.__dict__["_infinity_assembled"] = data
    try:
        param.data = data
        yield
    finally:
        param.data = stand_in
        param.__dict__.pop("_infinity_assembled", None)


def _divide_gradient(param: nn.Parameter) -> None:
    """Called by autograd; not once the parameter is the program's again."""
    if (tiles := tiles_of(param)) is not None:
        tiles.divide_gradient()


def _viewed(value: Any) -> Any:
    """Arguments of a call with a view in place of each parameter that is whole for a block."""
    if isinstance(value, TiledParameter):
        return value.view_as(value)
    if type(value) in (list, tuple):
        return type(value)(map(_viewed, value))
    return {key: _viewed(each) for key, each in value.items()} if type(value) is dict else value


def _tile(whole: nn.Parameter, slot: Slot) -> nn.Parameter:
    with torch._C.DisableTorchFunctionSubclass():
        stand_in = parameter.placeholder(slot.own_shape, whole.dtype, whole.device)
        tile = nn.Parameter(stand_in, whole.requires_grad)
    tile.__dict__["_infinity_whole"] = whole
    return tile


@contextmanager
def _whole(params: Sequence[nn.Parameter], use: str) -> Iterator[None]:
    """A block in which `params` may be used as the tensors that they are; those that have no data are asked for."""
    for param in filter(parameter.is_released, params):
        parameter.owner_of(param).materialize([param], use)
    with torch._C.DisableTorchFunctionSubclass():
        yield


def _weight(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The second argument of F.linear and of F.embedding."""
    return args[1] if len(args) > 1 else kwargs.get("weight")


def _linear(input: Tensor, weight: TiledParameter, bias: Tensor | None = None) -> Tensor:
    """`F.linear` on a weight in tiles."""
    tiles = tiles_of(weight)
    assert tiles is not None
    if isinstance(bias, nn.Parameter) and parameter.is_released(bias):
        parameter.owner_of(bias).materialize([bias], "linear")
    with torch._C.DisableTorchFunctionSubclass():
        return _Linear.apply(tiles, tiles.returns(input, bias), input, bias, weight)


def _embedding(
    input: Tensor, weight: TiledParameter, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:  # fmt: skip
    """`F.embedding` on a weight in tiles."""
    tiles = tiles_of(weight)
    assert tiles is not None
    if max_norm is not None or sparse:
        tiles.materialize([weight], "an embedding with max_norm or sparse gradients")
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx % rows
    with torch._C.DisableTorchFunctionSubclass():
        return _Embedding.apply(tiles, tiles.returns(), input, weight, padding, scale_grad_by_freq)


def _bmm(input: Tensor, weight: TiledParameter) -> Tensor:
    """`torch.bmm` with a stack of matrices in tiles."""
    tiles = tiles_of(weight)
    assert tiles is not None
    with torch._C.DisableTorchFunctionSubclass():
        return _Bmm.apply(tiles, tiles.returns(input), input, weight)


_BY_TILES: dict[Any, Callable[..., Tensor]] = {F.linear: _linear, F.embedding: _embedding, torch.bmm: _bmm}


class _Linear(torch.autograd.Function):
    """`input @ weight.T + bias`, columns of the output tile by tile. Gradients of the input are summed over the tiles,
    in fp32 where they are of 16 bits.
    """

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, returns: bool, input: Tensor, bias: Tensor | None, weight: nn.Parameter
    ) -> Tensor:
        given, x = input.dtype, input.to(dtype := _computed_dtype(input, weight))
        output = x.new_empty(*x.shape[:-1], weight.shape[0])
        scopes = []
        for tile, rows, scope in tiles.forward(returns=returns):
            part = None if bias is None else bias[tile.start : tile.stop].to(dtype)
            output[..., tile.start : tile.stop] = F.linear(x, rows.to(dtype), part)
            scopes.append(scope)
        ctx.tiles, ctx.scopes, ctx.given, ctx.bias_dtype = tiles, scopes, given, None if bias is None else bias.dtype
        ctx.save_for_backward(x)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        inputs, grads = x.reshape(-1, x.shape[-1]), grad.to(x.dtype).reshape(-1, grad.shape[-1])
        _, _, wants_input, wants_bias, _ = ctx.needs_input_grad
        of_input = ProductSum(inputs.shape, inputs) if wants_input else None
        for tile, rows, room in ctx.tiles.backward(ctx.scopes):
            part = grads[:, tile.start : tile.stop]
            if of_input is not None:
                of_input.add(part, rows.to(x.dtype))
            if room is not None:
                tile.add_product(torch.mm, part.t(), inputs, room)
        to_input = None if of_input is None else of_input.total.to(ctx.given).view(x.shape)
        to_bias = grads.sum(0).to(ctx.bias_dtype) if wants_bias else None
        return None, None, to_input, to_bias, None


def _computed_dtype(input: Tensor, weight: nn.Parameter) -> torch.dtype:
    """What autocast would cast both to, cast here, where backward sees it."""
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class _Bmm(torch.autograd.Function):
    """Each matrix of a stack on the right of its own part of the input: [matrices, rows, width]."""

    @staticmethod
    def forward(ctx: Any, tiles: Tiles, returns: bool, input: Tensor, weight: nn.Parameter) -> Tensor:
        given, x = input.dtype, input.to(dtype := _computed_dtype(input, weight))
        output = x.new_empty(*x.shape[:-1], weight.shape[2])
        scopes = []
        for tile, matrices, scope in tiles.forward(returns=returns):
            output[tile.start : tile.stop] = torch.bmm(x[tile.start : tile.stop], matrices.to(dtype))
            scopes.append(scope)
        ctx.tiles, ctx.scopes, ctx.given = tiles, scopes, given
        ctx.save_for_backward(x)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        grad = grad.to(x.dtype)
        to_input = torch.empty_like(x) if ctx.needs_input_grad[2] else None
        for tile, matrices, room in ctx.tiles.backward(ctx.scopes):
            part = slice(tile.start, tile.stop)
            if to_input is not None:
                to_input[part] = torch.bmm(grad[part], matrices.to(x.dtype).mT)
            if room is not None:
                tile.add_product(torch.bmm, x[part].mT, grad[part], room)
        return None, None, None if to_input is None else to_input.to(ctx.given), None


class ProductSum:
    """A sum of matrix products: of 16-bit factors in fp32, so that it is rounded once, as one large product is."""

    def __init__(self, shape: tuple[int, ...], factor: Tensor) -> None:
        """`factor`: a tensor of the factors' dtype and device."""
        self.total = factor.new_zeros(shape, dtype=torch.float32 if factor.itemsize < 4 else factor.dtype)
        self._cast: Tensor | None = None

    def add(self, left: Tensor, right: Tensor, rows: slice = slice(None)) -> None:
        """`total[rows] += left @ right`."""
        target = self.total[rows]
        if target.dtype is left.dtype:
            target.addmm_(left, right)
        elif target.is_cuda:
            target.add_(torch.mm(left, right, out_dtype=target.dtype))
        else:
            # No such product on the CPU: the factor is cast a part at a time, always into the same memory.
            step = min(max(_CAST_NUMEL // right.shape[1], 1), len(right))
            if self._cast is None or len(self._cast) < step:
                self._cast = target.new_empty(step, right.shape[1])
            for first in range(0, len(right), step):
                part = right[first : first + step]
                target.addmm_(left[:, first : first + step].to(target.dtype), self._cast[: len(part)].copy_(part))


class _Embedding(torch.autograd.Function):
    """Rows of the weight that `ids` name, those of each tile at once."""

    @staticmethod
    def forward(
        ctx: Any, tiles: Tiles, returns: bool, ids: Tensor, weight: nn.Parameter, padding: int, by_frequency: bool
    ) -> Tensor:
        flat = ids.reshape(-1)
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < weight.shape[0]:
            raise IndexError(f"index out of range in {parameter.name_of(weight)}: it has {weight.shape[0]} rows")
        output = torch.empty(flat.numel(), weight.shape[1], dtype=weight.dtype, device=weight.device)
        scopes = []
        for tile, rows, scope in tiles.forward(returns=returns, lookup=True):
            at = _inside(flat, tile)
            output[at] = rows[flat[at] - tile.start]
            scopes.append(scope)
        ctx.tiles, ctx.scopes, ctx.padding, ctx.by_frequency = tiles, scopes, padding, by_frequency
        ctx.save_for_backward(flat)
        return output.view(*ids.shape, -1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (flat,) = ctx.saved_tensors
        grads = grad.reshape(flat.numel(), -1)
        for tile in ctx.tiles.passed(ctx.scopes):
            if tile.wants_gradient:
                at = _inside(flat, tile)
                padding = ctx.padding - tile.start if tile.start <= ctx.padding < tile.stop else -1
                part = torch.ops.aten.embedding_dense_backward(
                    grads[at], flat[at] - tile.start, tile.stop - tile.start, padding, ctx.by_frequency
                )
                tile.add_gradient(part)
        return (None,) * 6


def _inside(flat: Tensor, tile: Tile) -> Tensor:
    """Positions of the ids that name rows of the tile."""
    return ((flat >= tile.start) & (flat < tile.stop)).nonzero().squeeze(1)
