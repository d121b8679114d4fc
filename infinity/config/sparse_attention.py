"""The section `sparse_attention`: DeepSpeed's keys of block-sparse layouts, and which layers have one.

It is also the value that `infinity.plan.block_layouts` makes layouts of, wherever its keys come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ValidationError

from infinity.config.section import (
    Count,
    Counts,
    Differs,
    Direction,
    Flag,
    Layers,
    LayoutMode,
    Natural,
    Naturals,
    Section,
    shown,
)
from infinity.errors import ConfigError

_GLOBAL = ("global_block_indices", "global_block_end_indices")
# The keys that each mode reads, beside `mode`, `block`, `attention` and `layers`.
KEYS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "fixed": (
        "different_layout_per_head", "num_local_blocks", "num_global_blocks", "horizontal_global_attention",
        "num_different_global_patterns",
    ),
    "variable": (
        "different_layout_per_head", "num_random_blocks", "local_window_blocks", *_GLOBAL,
        "horizontal_global_attention",
    ),
    "bigbird": (
        "different_layout_per_head", "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks",
    ),
    "bslongformer": ("different_layout_per_head", "num_sliding_window_blocks", *_GLOBAL),
}  # fmt: skip


class SparseAttention(Section):
    """Attention of blocks of tokens that a layout names. It is an "and" to the model's own mask, and computed a tile at
    a time: nothing has the size tokens x tokens."""

    mode: LayoutMode = "fixed"
    """The layout: "dense" (every block), "fixed", "variable", "bigbird" or "bslongformer"."""
    block: Count = 16
    """Tokens of a block."""
    different_layout_per_head: Flag = False
    """Each head has random or global blocks of its own."""
    num_local_blocks: Count = 4
    """"fixed": blocks of a local window."""
    num_global_blocks: Natural = 1
    """"fixed": blocks of each window that all rows see; "bigbird": blocks at the beginning that all rows see."""
    attention: Annotated[
        Direction, Differs('"bigbird" and "bslongformer" read it too, which they do not in DeepSpeed\'s section')
    ] = "bidirectional"
    """"unidirectional": no block sees a later one. A causal model has the lower half of either."""
    horizontal_global_attention: Flag = False
    """"fixed" and "variable": global blocks also see all blocks. It needs "bidirectional"."""
    num_different_global_patterns: Count = 1
    """"fixed": how many places of a window's global blocks heads take turns with."""
    num_random_blocks: Natural = 0
    """"variable" and "bigbird": random blocks of each row, drawn by rank 0's `torch.initial_seed()`."""
    local_window_blocks: Counts = (4,)
    """"variable": blocks of the first, second, ... local window; the last number counts for all that follow."""
    global_block_indices: Naturals = (0,)
    """"variable" and "bslongformer": blocks that all rows see; with the next key where ranges of such begin."""
    global_block_end_indices: Naturals | None = None
    """Where those ranges end, exclusive."""
    num_sliding_window_blocks: Count = 3
    """"bigbird" and "bslongformer": blocks of the window around each block."""
    layers: Layers = "all"
    """Ours. Indices of the layers that have the layout, or "all". Others see all that the model's mask lets them."""

    @property
    def per_head(self) -> bool:
        """Whether heads may differ."""
        return self.different_layout_per_head and self.mode != "dense"

    def problems(self) -> list[str]:
        """Return one sentence for each pair of numbers that contradict each other."""
        local, shared, patterns = self.num_local_blocks, self.num_global_blocks, self.num_different_global_patterns
        starts, ends = self.global_block_indices, self.global_block_end_indices
        found = []
        if self.horizontal_global_attention and self.attention != "bidirectional":
            found.append('horizontal_global_attention is true and attention "unidirectional": leave one of them out')
        if self.mode == "fixed" and (shared == 0 or local % shared):
            found.append(
                f"num_global_blocks is {shared}, which does not divide num_local_blocks {local}: set it to a divisor"
            )
        elif self.mode == "fixed" and patterns > local // shared:
            found.append(
                f"num_different_global_patterns is {patterns}, and a window of {local} blocks has {local // shared} "
                f"places for {shared} global ones: set it to {local // shared} or less"
            )
        if self.mode == "fixed" and patterns > 1 and not self.different_layout_per_head:
            found.append(
                f"num_different_global_patterns is {patterns} and all heads have one layout: set "
                "different_layout_per_head to true"
            )
        if self.mode == "variable" and not self.local_window_blocks:
            found.append("local_window_blocks is empty: name at least one window, such as [4]")
        if ends is not None and len(starts) != len(ends):
            found.append(
                f"global_block_indices has {len(starts)} numbers and global_block_end_indices {len(ends)}: give each "
                "range a beginning and an end"
            )
        elif ends is not None and any(start >= end for start, end in zip(starts, ends, strict=True)):
            found.append(
                f"global_block_indices {list(starts)} are not all below global_block_end_indices {list(ends)}: ends "
                "are exclusive"
            )
        if self.mode == "bigbird" and self.attention == "unidirectional" and self.num_random_blocks > 1:
            found.append(
                f'num_random_blocks is {self.num_random_blocks} and attention "unidirectional", where the first row '
                "has one block to draw from: set it to 1, or attention to \"bidirectional\""
            )
        return [f"sparse_attention.{each}" for each in found]

    @classmethod
    def of(cls, keys: SparseAttention | Mapping[str, Any]) -> SparseAttention:
        """Return the section of some keys; ConfigError for those that it has not, or that contradict each other."""
        try:
            section = keys if isinstance(keys, SparseAttention) else cls.model_validate(dict(keys))
        except ValidationError as error:
            problem = error.errors()[0]
            path = ".".join(map(str, ("sparse_attention", *problem["loc"])))
            said = problem["msg"].removeprefix("Value error, ")
            raise ConfigError(f"{path}: {shown(problem['input'])} is not usable: {said}") from None
        if problems := section.problems():
            raise ConfigError("; ".join(problems))
        return section
