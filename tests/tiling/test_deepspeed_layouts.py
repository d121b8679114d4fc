"""`deepspeed.ops.sparse_attention`: layouts with the blocks of DeepSpeed's, and attention under one."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from infinity.deepspeed.ops import sparse_attention as names

from infinity.errors import ConfigError
from tests.plan.test_block_layouts import RECORDED

CLASSES = {
    "dense": names.DenseSparsityConfig, "fixed": names.FixedSparsityConfig, "variable": names.VariableSparsityConfig,
    "bigbird": names.BigBirdSparsityConfig, "bslongformer": names.BSLongformerSparsityConfig,
    "local": names.LocalSlidingWindowSparsityConfig,
}  # fmt: skip


def test_classes_have_deepspeeds_defaults_and_draw_from_pythons_numbers() -> None:
    for case in RECORDED:
        random.seed(case["seed"])
        config = CLASSES[case["mode"]](num_heads=case["heads"], block=16, **case["keys"])
        layout = config.make_layout(16 * case["blocks"])
        assert layout.dtype == torch.int64 and layout.shape == (case["heads"], case["blocks"], case["blocks"])
        for table, recorded in zip(layout, case["layout"], strict=True):
            bits = "".join(map(str, table.flatten().tolist()))
            assert int(bits.ljust(4 * len(recorded), "0"), 2) == int(recorded, 16), case


@pytest.mark.parametrize("mode", ["add", "mul"])
def test_attention_is_dense_attention_under_the_same_mask(mode: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))
    config = names.FixedSparsityConfig(4, block=16, num_local_blocks=2)
    order = torch.ones(64, 64).tril()
    padding = torch.ones(2, 64)
    padding[1, 50:] = 0
    blocks = config.make_layout(64).bool().repeat_interleave(16, 1).repeat_interleave(16, 2)
    seen = blocks & order.bool() & padding.bool()[:, None, None]
    wanted = F.scaled_dot_product_attention(query, key, value, attn_mask=seen)
    masks = {"attn_mask": order, "key_padding_mask": padding[:, None, None]}
    if mode == "add":
        masks = {name: torch.where(mask == 0, -torch.inf, 0.0) for name, mask in masks.items()}
    attention = names.SparseSelfAttention(config, mode, mode, max_seq_length=128)
    # Keys may come with their last two sizes swapped.
    output = attention(query, key.transpose(2, 3), value, **masks)
    assert torch.allclose(output, wanted, atol=1e-6)
    for mine, theirs in zip(
        torch.autograd.grad(output.sum(), [query, key, value]),
        torch.autograd.grad(wanted.sum(), [query, key, value]), strict=True,
    ):  # fmt: skip
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_what_is_not_there_is_refused_by_name() -> None:
    attention = names.SparseSelfAttention(names.BigBirdSparsityConfig(2), max_seq_length=128)
    tensors = [torch.zeros(1, 2, 32, 8)] * 3
    with pytest.raises(ConfigError, match="adds no rpe"):
        attention(*tensors, rpe=torch.zeros(1, 2, 32, 32))
    with pytest.raises(ConfigError, match="has 40 tokens, and a layout of 8 blocks of 16"):
        attention(*[torch.zeros(1, 2, 40, 8)] * 3)
    with pytest.raises(ConfigError, match="masks only hide here"):
        attention(*tensors, key_padding_mask=torch.full((1, 32), -3.0))
    with pytest.raises(ConfigError, match="do not divide 40: pad to 48"):
        names.FixedSparsityConfig(2).make_layout(40)
    with pytest.raises(ConfigError, match="use one of its subclasses"):
        names.SparsityConfig(2).make_layout(32)
    for name in ("BertSparseSelfAttention", "SparseAttentionUtils"):
        with pytest.raises(Exception, match="set the section sparse_attention"):
            getattr(names, name)()
