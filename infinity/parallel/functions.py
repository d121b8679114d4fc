"""What activations and their gradients do between the ranks of a tensor group, as autograd functions on plain tensors.

Each has the other direction as its backward. `what` names the module in the names of collectives, such as "sum of
layers.1.mlp": the watchdog shows them. All ranks of the group call the same functions in the same order; each call
blocks until its tensor is there. Sums have the same bits on all ranks.

A compiler leaves them out: its graphs end at a collective, whose messages and waits are no operators.

The sequence is dimension 1 of [batch, sequence, ...]; of tensors with fewer dimensions, where tokens lie one behind
the other, it is dimension 0.

Below them is the loss of a causal language model whose head gives each rank of the group its own words only. Nothing of
the size [tokens, vocabulary] is made: from each rank's logits follow, for each token, their maximum, their
sum of exponentials and the chosen logit, and one gather of these three gives the whole vocabulary's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
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


class VocabularySlice:
    """This rank's words: of a head with `rows` rows here, [rows * index, rows * (index + 1)) of the vocabulary."""

    def __init__(self, group: AxisGroup, path: str, *, copies: bool = True) -> None:
        """path: the head's, for names of collectives. copies: whether losses copy the head's input."""
        self._group, self._path, self._copies = group, path, copies
        # Whether the head leaves its outputs as they are, because the loss under way needs no more.
        self.local = False

    @contextmanager
    def ungathered(self) -> Iterator[None]:
        """Let the head give this rank's words in the block."""
        self.local = True
        try:
            yield
        finally:
            self.local = False

    def first_word(self, rows: int) -> int:
        """Return the word of the first row here."""
        return rows * self._group.index

    def count(self, rows: int) -> int:
        """Return the number of all words."""
        return rows * self._group.size

    def copy(self, hidden: Tensor) -> Tensor:
        """Return the head's input with gradients summed over ranks."""
        if not self._copies or not hidden.requires_grad or not torch.is_grad_enabled():
            return hidden
        return copy_in(hidden, self._group, self._path)

    def of_copied(self) -> VocabularySlice:
        """Return the same for a loss whose input has been copied."""
        return VocabularySlice(self._group, self._path, copies=False)

    def combine(self, highest: Tensor, total: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same of the whole vocabulary, the same bits on all ranks. Collective.

        [tokens] fp32 each. highest: the maximum of the logits here. total: the sum of exp(logit - highest). chosen: the
        label's logit, zero where the label is another rank's.
        """
        mine = torch.stack((highest, total, chosen))
        everyone = mine.new_empty((self._group.size, *mine.shape))
        name = f"sum of the loss over {self._path}"
        collectives.all_gather(everyone.view(-1), mine.view(-1), self._group, name).wait()
        peaks, totals, choices = everyone.unbind(1)
        peak = peaks.amax(0)
        return peak, (totals * (peaks - peak).exp_()).sum(0), choices.sum(0)


def is_causal_loss(function: Any) -> bool:
    """Return whether this is transformers' loss of causal language models, for which `causal_loss` stands in."""
    return getattr(function, "__name__", "") == "ForCausalLMLoss" and function.__module__.startswith("transformers.")


@contextmanager
def divided_loss(model: Any, words: VocabularySlice) -> Iterator[None]:
    """In the block the model's head gives this rank's words, and its `loss_function` computes with them."""
    former = model.__dict__.get("_loss_function")
    model.loss_function = partial(causal_loss, words)
    try:
        with words.ungathered():
            yield
    finally:
        if former is None:
            del model._loss_function
        else:
            model.loss_function = former


@outside_graphs
def causal_loss(
    words: VocabularySlice, logits: Tensor, labels: Tensor | None, vocab_size: int | None = None,
    num_items_in_batch: Tensor | float | None = None, ignore_index: int = -100, shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:  # fmt: skip
    """transformers' `ForCausalLMLoss` of logits [..., tokens, this rank's words]. Collective.

    Each token predicts the next one's label, or its own of `shift_labels`. Returns the mean over labels that are not
    `ignore_index`, or their sum divided by `num_items_in_batch`. A label that is no word raises IndexError on the CPU
    and makes the loss NaN elsewhere.
    """
    if shift_labels is None:
        assert labels is not None
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    rows = logits.shape[-1]
    flat = shift_labels.reshape(-1).to(logits.device)
    valid = (flat == ignore_index) | ((flat >= 0) & (flat < words.count(rows)))
    if flat.is_cpu and not bool(valid.all()):
        raise IndexError(
            f"label {int(flat[~valid][0])} is neither {ignore_index} nor one of the head's {words.count(rows)} words"
        )
    total = _CrossEntropy.apply(words, logits.reshape(-1, rows), flat, ignore_index)
    if not flat.is_cpu:
        # An error would wait for the device.
        total = torch.where(valid.all(), total, float("nan"))
    if num_items_in_batch is None:
        return total / (flat != ignore_index).sum()
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


class _CrossEntropy(torch.autograd.Function):
    """The sum over tokens of -log softmax(logits)[label]."""

    @staticmethod
    def forward(ctx: Any, words: VocabularySlice, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        rows = logits.shape[1]
        counts = labels != ignore_index
        local = labels - words.first_word(rows)
        here = counts & (local >= 0) & (local < rows)
        columns = local.masked_fill(~here, 0)
        # The only tensor that lives until backward; fp32, as transformers' logits are for the loss.
        soft = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
        picked = soft.gather(1, columns[:, None]).squeeze(1).masked_fill(~here, 0)
        peak = soft.amax(1)
        own_total = soft.sub_(peak[:, None]).exp_().sum(1)
        highest, total, chosen = words.combine(peak, own_total, picked)
        soft.mul_(((peak - highest).exp_() / total)[:, None])
        ctx.save_for_backward(soft, columns, here, counts)
        ctx.given = logits.dtype
        losses = highest + total.log() - chosen
        return torch.where(counts, losses, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        soft, columns, here, counts = ctx.saved_tensors
        # A product would give NaN: the gradient of a mean over no tokens is infinite.
        scale = torch.where(counts, grad, 0)
        wrong = soft * scale[:, None]
        wrong.scatter_add_(1, columns[:, None], torch.where(here, -scale, 0)[:, None].to(wrong.dtype))
        return None, wrong.to(ctx.given), None, None
