"""The loss of a divided vocabulary is transformers', and no rank ever makes the whole logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.loss.loss_utils import ForCausalLMLoss

from infinity.parallel.functions import VocabularySlice, causal_loss
from tests.parallel.divided import axis_of, batch, divide, make
from tests.parallel.groups import open_tensor_group

WORDS, TOKENS = 40, 12


def losses(rank: int, world: int) -> list[tuple[float, float]]:
    """Relative errors of loss and gradient, by case."""
    group = open_tensor_group(rank, world)
    words = VocabularySlice(group, "lm_head")
    torch.manual_seed(3)
    logits, labels = torch.randn(2, TOKENS, WORDS) * 20, torch.randint(WORDS, (2, TOKENS))
    labels[0, :5] = -100
    cases: list[dict[str, Any]] = [
        {}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(9)}, {"ignore_index": int(labels[1, 3])},
        {"shift_labels": labels.roll(1, 1)}, {"dtype": torch.bfloat16},
    ]  # fmt: skip
    found = []
    own = slice(rank * WORDS // world, (rank + 1) * WORDS // world)
    for case in cases:
        dtype = case.pop("dtype", torch.float32)
        given = labels.masked_fill(labels == -100, case.get("ignore_index", -100))
        whole = logits.to(dtype, copy=True).requires_grad_()
        mine = whole.detach()[..., own].requires_grad_()
        expected = ForCausalLMLoss(whole, given, WORDS, **case)
        loss = causal_loss(words, mine, given, WORDS, **case)
        (expected * 3).backward(), (loss * 3).backward()
        error = (mine.grad - whole.grad[..., own]).abs().max() / whole.grad.abs().max()
        found.append((abs(float(loss.detach()) / float(expected.detach()) - 1), float(error)))
    nothing = causal_loss(words, logits[..., own].clone().requires_grad_(), torch.full_like(labels, -100))
    assert nothing.isnan()
    for wrong in (WORDS, -1):
        with pytest.raises(IndexError, match=f"{wrong}.*-100"):
            causal_loss(words, logits[..., own], torch.full_like(labels, wrong))
    return found


def test_the_loss_and_its_gradients_are_those_of_transformers(rank_pools):
    for found in rank_pools[2].run(losses):
        assert all(loss <= 1e-6 and grad <= 1e-6 for loss, grad in found[:-1]), found
        assert found[-1][0] <= 1e-6 and found[-1][1] <= 2**-8


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))])
        return result


def largest(rank: int, world: int) -> tuple[int, int]:
    """The most elements of a tensor in training, in a model that is divided and in one that is not."""
    group = open_tensor_group(rank, world)
    found = []
    for size in (world, 1):
        model = make("gemma2", vocab_size=4096)
        if size > 1:
            divide(model, axis_of(model, size), group)
        # Backward runs in this thread's mode, too.
        with Largest() as seen:
            model(**batch(32, 4096)).loss.backward()
        found.append(seen.numel)
    return found[0], found[1]


def test_no_rank_makes_a_tensor_of_all_logits(rank_pools):
    for divided, whole in rank_pools[2].run(largest):
        assert whole >= 2 * 32 * 4096
        assert divided <= 2 * 32 * 4096 // 2
