"""Tiles: a weight too large to gather is cut along its rows, and used a tile at a time.

Rows are the first dimension, so that a tile is one range of the tensor in memory order. Each tile is a unit of its own:
gathered, used, reduced and stored as any other. Only weights that linear layers and embeddings use are cut, because
those use each row on its own: outputs of a linear layer come one behind the other, and a lookup needs the rows that it
names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

# Of a loss in tiles, tokens of a tile and words of a block of the vocabulary: 16 MiB of logits in fp32.
TILE_TOKENS = 1024
TILE_WORDS = 4096
# Class names of modules whose attribute `weight` may be cut.
_CUT = ("Linear", "Embedding")


def may_be_cut(class_name: str, attribute: str, shape: tuple[int, ...]) -> bool:
    """Whether a module of this class uses its parameter row by row."""
    return class_name in _CUT and attribute == "weight" and len(shape) == 2


def cut_rows(shape: tuple[int, ...], numel_max: int) -> Iterator[tuple[int, int]]:
    """(first element, elements) of tiles of whole rows: near-equal ones, each of at most `numel_max` elements or of one
    row.
    """
    rows, width = shape[0], math.prod(shape[1:])
    count = -(-rows // max(numel_max // max(width, 1), 1))
    each = -(-rows // count)
    for row in range(0, rows, each):
        yield row * width, min(each, rows - row) * width
