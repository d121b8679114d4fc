"""The loss of a causal language model whose head gives each rank of the tensor group its own words only.

Nothing of the size [tokens, vocabulary] is made: from each rank's logits follow, for each token, their maximum, their
sum of exponentials and the chosen logit, and one gather of these three gives the whole vocabulary's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.parallel import functions


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
        return functions.copy_in(hidden, self._group, self._path)

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


@functions.outside_graphs
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
