"""Block-sparse layouts of attention: which blocks of keys each block of queries sees.

They are those of DeepSpeed 0.17's `make_layout`, block for block: "fixed" and "variable" after Child et al.,
"Generating Long Sequences with Sparse Transformers" (arXiv 1904.10509), "bigbird" after Zaheer et al. (2007.14062),
"bslongformer" after Beltagy, Peters and Cohan, "Longformer" (2004.05150).

A layout is a value without torch and without a table of all blocks, of which a million tokens have 4 x 10^9: it says
which of some rows and columns are there, from a few numbers for each row, and the random blocks that were drawn. It
follows from the section, the heads, the number of blocks and a seed alone, so that every rank, and a recomputation,
has the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from infinity.config.sparse_attention import SparseAttention
from infinity.errors import ConfigError

# As `random.sample`.
Sample = Callable[[range, int], list[int]]
# Side of the drawing in characters, at most.
_DRAWN_MAX = 32
# Of a layout with more, so many rows stand for all.
_SAMPLED_ROWS = 64


class BlockLayout:
    """The layout of one section for so many heads and blocks.

    patterns: how many layouts there are; head h has number h modulo `patterns`.
    """

    def __init__(self, section: SparseAttention, heads: int, blocks: int, sample: Sample) -> None:
        """sample: draws random blocks, by head and row. ConfigError if a row has fewer blocks than it shall draw."""
        self.section, self.heads, self.blocks = section, heads, blocks
        drawn = section.num_random_blocks if section.mode in ("variable", "bigbird") else 0
        self.patterns = 1
        if section.per_head and drawn:
            self.patterns = heads
        elif section.per_head and section.mode == "fixed":
            self.patterns = min(heads, section.num_different_global_patterns)
        if drawn > blocks:
            raise ConfigError(
                f"sparse_attention.num_random_blocks is {drawn}, and {blocks * section.block:,} tokens are {blocks} "
                f"blocks of {section.block}: set it to {blocks} or less, or give the model longer samples"
            )
        later = section.mode == "variable" or section.attention == "bidirectional"
        # [patterns, blocks, random blocks of a row]
        self._random = np.array(
            [
                [sample(range(blocks if later else row + 1), drawn) for row in range(blocks)]
                for _ in range(self.patterns)
            ]
            if drawn else np.empty((self.patterns, blocks, 0)), dtype=np.int32,
        )  # fmt: skip
        # [patterns, blocks]: the first row that sees a column of everyone's (`blocks`: none), and rows that see all.
        self._first_row = np.full((self.patterns, blocks), blocks, dtype=np.int64)
        self._sees_all = np.zeros((self.patterns, blocks), dtype=bool)
        for pattern in range(self.patterns):
            self._place_global(pattern)
        sizes = {"fixed": (section.num_local_blocks,), "variable": section.local_window_blocks}.get(section.mode, ())
        # The window of each block, where windows lie one behind the other.
        self._window = None
        if sizes:
            more = max(0, blocks - sum(sizes)) // sizes[-1] + 1
            counts = (*sizes, *(sizes[-1],) * more)
            self._window = np.repeat(np.arange(len(counts)), counts)[:blocks]

    def part(self, head: int, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which blocks are there, [len(rows), len(columns)]."""
        section, pattern = self.section, head % self.patterns
        row, column = rows[:, None], columns[None, :]
        if section.mode == "dense":
            return np.ones((len(rows), len(columns)), dtype=bool)
        earlier = column <= row if section.attention == "unidirectional" else None
        found: NDArray[np.bool_]
        if self._window is not None:
            found = self._window[row] == self._window[column]
            if earlier is not None:
                found &= earlier
        else:
            found = np.abs(row - column) <= section.num_sliding_window_blocks // 2
        found |= (row >= self._first_row[pattern, column]) | self._sees_all[pattern, row]
        if self._random.shape[2]:
            drawn = np.zeros((len(rows), self.blocks), dtype=bool)
            np.put_along_axis(drawn, self._random[pattern, rows].astype(np.int64), values=True, axis=1)
            found |= drawn[:, columns]
        if self._window is None and earlier is not None:
            found &= earlier
        return found

    def keys_of_causal(self, window: int | None = None) -> float:
        """Return how many keys of its block's row a token's query is multiplied with on average, where a model sees no
        later token, and none that lies `window` tokens or more behind. Every row of short layouts, 64 of long ones.
        """
        columns, block = np.arange(self.blocks), self.section.block
        rows = np.unique(np.linspace(0, self.blocks - 1, min(self.blocks, _SAMPLED_ROWS)).astype(np.int64))
        seen = columns[None, :] <= rows[:, None]
        if window is not None:
            # The row's first token sees `window` - 1 tokens of the blocks before.
            seen &= columns[None, :] >= rows[:, None] - (window - 1 + block - 1) // block
        found = [np.count_nonzero(self.part(head, rows, columns) & seen) for head in range(self.patterns)]
        return float(np.mean(found) / len(rows) * block)

    def table(self, head: int = 0) -> NDArray[np.bool_]:
        """Return all blocks of a head, [blocks, blocks]."""
        every = np.arange(self.blocks)
        return self.part(head, every, every)

    def draw(self, head: int = 0) -> list[str]:
        """Return the layout of a head as lines of text, at most 32: "#" for blocks that are all there, "+" for some."""
        step = -(-self.blocks // _DRAWN_MAX)
        lines = []
        for start in range(0, self.blocks, step):
            rows = self.part(head, np.arange(start, min(start + step, self.blocks)), np.arange(self.blocks))
            shares = [float(rows[:, at : at + step].mean()) for at in range(0, self.blocks, step)]
            lines.append("".join("#" if share == 1 else "+" if share else "." for share in shares))
        return lines

    def _place_global(self, pattern: int) -> None:
        """Note the columns that many rows see, and the rows that see all."""
        section, blocks, share = self.section, self.blocks, self.section.num_global_blocks
        # Beginning and end of each, as slices have them: in a short sequence a beginning may lie before it.
        ranges: list[tuple[int, int]] = []
        directed, rows = section.attention == "unidirectional", section.horizontal_global_attention
        match section.mode:
            case "dense":
                return
            case "fixed":
                local, whole = section.num_local_blocks, blocks - blocks % section.num_local_blocks
                first = local - (1 + pattern) * share
                ranges = [(at, at + share) for at in range(first, whole, local)]
                if whole < blocks:
                    start = min(whole + first, blocks - share)
                    ranges.append((start, start + share))
            case "bigbird":
                ranges, directed, rows = [(0, share)], False, True
            case _:
                starts, ends = section.global_block_indices, section.global_block_end_indices
                ends = tuple(start + 1 for start in starts) if ends is None else ends
                ranges = [(start, end) for start, end in zip(starts, ends, strict=True) if start < blocks]
                if section.mode == "bslongformer":
                    directed, rows = False, True
        for start, end in ranges:
            columns = slice(start, end)
            first = columns.indices(blocks)[0] if directed else 0
            self._first_row[pattern, columns] = np.minimum(self._first_row[pattern, columns], first)
            if rows:
                self._sees_all[pattern, columns] = True


@lru_cache(maxsize=64)
def block_layout(section: SparseAttention, heads: int, blocks: int, seed: int) -> BlockLayout:
    """Return the layout of a run with this seed, made once for each number of blocks."""
    return BlockLayout(section, heads, blocks, random.Random(seed).sample)
