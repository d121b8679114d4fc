"""`deepspeed.ops.sparse_attention`: classes of layouts, and attention under one, by infinity's own.

A class has the keys of the section `sparse_attention` as arguments, with the defaults that DeepSpeed's class has, and
`make_layout` draws random blocks from Python's `random`, as there.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config.sparse_attention import SparseAttention
from infinity.errors import ConfigError
from infinity.plan.block_layouts import BlockLayout
from infinity.tiling.sparse_attention import sparse_attention

# A mask that is added hides where it is at most this: masks of fp16 have -10,000 or less.
_HIDES = -10_000.0


class SparsityConfig:
    """The keys of a layout."""

    mode = ""

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, **keys: Any) -> None:
        """ConfigError for numbers that contradict each other."""
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1
        self.section: SparseAttention | None = None
        if self.mode:
            keys = {name: value for name, value in keys.items() if value is not None}
            self.section = SparseAttention.of(
                {"mode": self.mode, "block": block, "different_layout_per_head": different_layout_per_head, **keys}
            )

    def blocks(self, seq_len: int) -> BlockLayout:
        """Return the layout of a length; ConfigError for one that the block does not divide."""
        if self.section is None:
            raise ConfigError("SparsityConfig has no layout: use one of its subclasses, such as FixedSparsityConfig")
        if seq_len % self.block:
            raise ConfigError(
                f"{type(self).__name__} has blocks of {self.block} tokens, which do not divide {seq_len}: pad to "
                f"{seq_len + -seq_len % self.block}"
            )
        return BlockLayout(self.section, self.num_heads, seq_len // self.block, random.sample)

    def make_layout(self, seq_len: int) -> Tensor:
        """Return 1 for blocks that are there and 0 for others, [heads, blocks, blocks], int64."""
        layout = self.blocks(seq_len)
        return torch.stack([torch.from_numpy(layout.table(head)) for head in range(self.num_heads)]).long()


class DenseSparsityConfig(SparsityConfig):
    """Every block."""

    mode = "dense"


class FixedSparsityConfig(SparsityConfig):
    """Local windows, and blocks of each that all rows see."""

    mode = "fixed"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_local_blocks: int = 4,
        num_global_blocks: int = 1, attention: str = "bidirectional", horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, block, different_layout_per_head, num_local_blocks=num_local_blocks,
            num_global_blocks=num_global_blocks, attention=attention,
            horizontal_global_attention=horizontal_global_attention,
            num_different_global_patterns=num_different_global_patterns,
        )  # fmt: skip


class VariableSparsityConfig(SparsityConfig):
    """Local windows of several sizes, random blocks, and some that all rows see."""

    mode = "variable"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 0,
        local_window_blocks: tuple[int, ...] | list[int] = (4,),
        global_block_indices: tuple[int, ...] | list[int] = (0,),
        global_block_end_indices: list[int] | None = None, attention: str = "bidirectional",
        horizontal_global_attention: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, block, different_layout_per_head, num_random_blocks=num_random_blocks,
            local_window_blocks=local_window_blocks, global_block_indices=global_block_indices,
            global_block_end_indices=global_block_end_indices, attention=attention,
            horizontal_global_attention=horizontal_global_attention,
        )  # fmt: skip


class BigBirdSparsityConfig(SparsityConfig):
    """A window around each block, random blocks, and the first ones."""

    mode = "bigbird"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False, num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3, num_global_blocks: int = 1, attention: str = "bidirectional",
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, block, different_layout_per_head, num_random_blocks=num_random_blocks,
            num_sliding_window_blocks=num_sliding_window_blocks, num_global_blocks=num_global_blocks,
            attention=attention,
        )  # fmt: skip


class BSLongformerSparsityConfig(SparsityConfig):
    """A window around each block, and some that all rows see."""

    mode = "bslongformer"

    def __init__(
        self, num_heads: int, block: int = 16, different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3, global_block_indices: tuple[int, ...] | list[int] = (0,),
        global_block_end_indices: list[int] | None = None, attention: str = "bidirectional",
    ) -> None:  # fmt: skip
        super().__init__(
            num_heads, block, different_layout_per_head, num_sliding_window_blocks=num_sliding_window_blocks,
            global_block_indices=global_block_indices, global_block_end_indices=global_block_end_indices,
            attention=attention,
        )  # fmt: skip


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A window around each block, and nothing else."""

    mode = "bslongformer"

    def __init__(
        self, num_heads: int, block: int = 16, num_sliding_window_blocks: int = 3, attention: str = "unidirectional"
    ) -> None:
        super().__init__(
            num_heads, block, num_sliding_window_blocks=num_sliding_window_blocks, global_block_indices=(),
            attention=attention,
        )  # fmt: skip


class SparseSelfAttention(nn.Module):
    """Attention under the layout of a configuration; without `attn_mask` its blocks see each other as a whole."""

    def __init__(
        self, sparsity_config: SparsityConfig | None = None, key_padding_mask_mode: str = "add",
        attn_mask_mode: str = "mul", max_seq_length: int = 2048,
    ) -> None:  # fmt: skip
        """The modes: "add" for masks that are 0 where a key is seen and at most -10,000 where not, "mul" for masks that
        are 0 where not. max_seq_length: tokens of the layout, which is made here; a shorter sample has its first
        blocks. Ranks draw the same random blocks if they have seeded Python's `random` alike.
        """
        super().__init__()
        self.sparsity_config = DenseSparsityConfig(4) if sparsity_config is None else sparsity_config
        self.key_padding_mask_mode, self.attn_mask_mode = key_padding_mask_mode, attn_mask_mode
        self.layout = self.sparsity_config.blocks(max_seq_length)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, rpe: Tensor | None = None,
        key_padding_mask: Tensor | None = None, attn_mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Return [batch, heads, tokens, width]. query, value: of that shape; key too, or with its last two swapped.

        key_padding_mask: of batch x tokens elements. attn_mask: of tokens x tokens elements.

        ConfigError for `rpe`, a length that the block does not divide, or a mask that does more than hide.
        """
        tokens = query.shape[2]
        if rpe is not None:
            raise ConfigError(
                "SparseSelfAttention adds no rpe to the scores: call torch's flex_attention with a score_mod, or turn "
                "positions into the query and key (rotary embeddings)"
            )
        if tokens % self.layout.section.block or tokens > self.layout.blocks * self.layout.section.block:
            raise ConfigError(
                f"SparseSelfAttention has {tokens} tokens, and a layout of {self.layout.blocks} blocks of "
                f"{self.layout.section.block}: pad to a multiple, up to max_seq_length"
            )
        if key.shape[2] != tokens:
            key = key.transpose(2, 3)
        padding = _seen("key_padding_mask", key_padding_mask, self.key_padding_mask_mode, (len(query), tokens))
        visible = _seen("attn_mask", attn_mask, self.attn_mask_mode, (tokens, tokens))
        return sparse_attention(
            query, key, value, layout=self.layout, causal=False, padding=padding, visible=visible
        )  # fmt: skip


def _seen(name: str, mask: Tensor | None, mode: str, shape: tuple[int, int]) -> Tensor | None:
    """Return which elements of a mask hide nothing, of this shape."""
    if mask is None:
        return None
    seen = mask != 0 if mode == "mul" else mask > _HIDES
    if mode == "add" and bool((mask[seen] != 0).any()):
        raise ConfigError(
            f"{name} has values between 0 and {_HIDES:g}, and masks only hide here: use 0 and -inf, or mode \"mul\""
        )
    return seen.reshape(shape)
