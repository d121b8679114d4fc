"""What activations and their gradients do between the ranks of a tensor group, as autograd functions on plain tensors.

Each has the other direction as its backward. `what` names the module in the names of collectives, such as "sum of
layers.1.mlp": the watchdog shows them. All ranks of the group call the same functions in the same order; each call
blocks until its tensor is there. Sums have the same bits on all ranks.

A compiler leaves them out: its graphs end at a collective, whose messages and waits are no operators.

The sequence is dimension 1 of [batch, sequence, ...]; of tensors with fewer dimensions, where tokens lie one behind
the other, it is dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.errors import ConfigError

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_graphs(function: _Function) -> _Function:
    """Keep compilers out of a function; unlike torch's own decorator, load none before one is at work."""
    eager = _disable_dynamo(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (eager if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call  # type: ignore[return-value]


@outside_graphs
def copy_in(tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
    """Return `tensor`, which all ranks have alike, for a computation that differs by rank; gradients are summed."""
    return _Copy.apply(tensor, group, what)


@outside_graphs
def sum_out(tensor: Tensor, group: AxisGroup, what: str, *, owned: bool = False) -> Tensor:
    """Return the sum of all ranks' tensors; gradients stay.

    owned: the caller just made `tensor`, and the operation that made it does not need its values in backward (as
    `F.linear`), so the sum may take its place in memory, under its own gradient function.
    """
    if owned and tensor.is_contiguous():
        collectives.sum_in_order(tensor.detach(), group, f"sum of {what}")
        return tensor
    return _Sum.apply(tensor, group, what)


@outside_graphs
def gather_columns(tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
    """Return all ranks' columns [..., columns] side by side; a rank gets the gradient of its own."""
    return _Gather.apply(tensor, -1, group, what)


@outside_graphs
def split_columns(tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
    """Return this rank's columns of a tensor that all ranks have alike; gradients are gathered."""
    return _Split.apply(tensor, -1, group, what)


@outside_graphs
def gather_sequence(tensor: Tensor, group: AxisGroup, what: str, *, partial: bool = True) -> Tensor:
    """Return all ranks' tokens.

    partial: each rank's gradient is a part, so that backward sums and cuts (reduce-scatter). Otherwise all ranks have
    the same gradient, and backward cuts it.
    """
    apply = _GatherPartial.apply if partial else _Gather.apply
    return apply(tensor, sequence_dim(tensor), group, what)


@outside_graphs
def scatter_sequence(tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
    """Return this rank's tokens of a tensor that all ranks have alike; gradients are gathered.

    ConfigError if the group's size does not divide the tokens.
    """
    _check_divides(tensor, group, what)
    return _Split.apply(tensor, sequence_dim(tensor), group, what)


@outside_graphs
def reduce_scatter_sequence(tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
    """Return this rank's tokens of the sum of all ranks' tensors; gradients are gathered."""
    _check_divides(tensor, group, what)
    return _ReduceScatter.apply(tensor, sequence_dim(tensor), group, what)


def sequence_dim(tensor: Tensor) -> int:
    """Return the dimension along which tokens lie."""
    return 1 if tensor.dim() > 2 else 0


def _check_divides(tensor: Tensor, group: AxisGroup, what: str) -> None:
    length = tensor.shape[sequence_dim(tensor)]
    if length % group.size:
        raise ConfigError(
            f"{what}: a sequence of {length} tokens cannot be cut into {group.size} equal parts: pad batches to a "
            f"multiple of {group.size} tokens (the next is {length + -length % group.size}), or set "
            "parallel.sequence to false"
        )


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
        ctx.group, ctx.what = group, what
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        # A copy, because others may hold the same gradient.
        total = grad.clone(memory_format=torch.contiguous_format)
        return collectives.sum_in_order(total, ctx.group, f"sum of gradients of {ctx.what}"), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: AxisGroup, what: str) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        return collectives.sum_in_order(total, group, f"sum of {what}")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: AxisGroup, what: str) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _gathered(tensor, dim, group, f"gather of {what}")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _own(grad, ctx.dim, ctx.group), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: AxisGroup, what: str) -> Tensor:
        ctx.dim, ctx.group, ctx.what = dim, group, what
        return _own(tensor, dim, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(grad, ctx.dim, ctx.group, f"gather of gradients of {ctx.what}"), None, None, None


class _GatherPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: AxisGroup, what: str) -> Tensor:
        ctx.dim, ctx.group, ctx.what = dim, group, what
        return _gathered(tensor, dim, group, f"gather of {what}")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduced(grad, ctx.dim, ctx.group, f"sum of gradients of {ctx.what}"), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: AxisGroup, what: str) -> Tensor:
        ctx.dim, ctx.group, ctx.what = dim, group, what
        return _reduced(tensor, dim, group, f"sum of {what}")

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _gathered(grad, ctx.dim, ctx.group, f"gather of gradients of {ctx.what}"), None, None, None


def _own(tensor: Tensor, dim: int, group: AxisGroup) -> Tensor:
    """Return this rank's part along `dim`, in memory of its own."""
    length = tensor.shape[dim] // group.size
    return tensor.narrow(dim, group.index * length, length).clone(memory_format=torch.contiguous_format)


def _gathered(tensor: Tensor, dim: int, group: AxisGroup, name: str) -> Tensor:
    """Return all ranks' parts one behind the other along `dim`."""
    parts = tensor.new_empty((group.size, *tensor.shape))
    collectives.all_gather(parts.view(-1), tensor.contiguous().view(-1), group, name).wait()
    return parts.flatten(0, 1) if dim == 0 else torch.cat(parts.unbind(), dim)


def _reduced(tensor: Tensor, dim: int, group: AxisGroup, name: str) -> Tensor:
    """Return this rank's part along `dim` of the sum over ranks."""
    parts = tensor.contiguous() if dim == 0 else torch.stack(tensor.chunk(group.size, dim))
    shape = list(tensor.shape)
    shape[dim] //= group.size
    return collectives.sum_slices(parts.view(-1), group, name).view(shape)
