"""Attention over the blocks that a layout and a mask leave, a tile at a time: nothing has the size tokens x tokens.

[Note: tiles] The blocks of a sequence are computed in two sizes. Squares of about 128 tokens of which every pair is
visible are computed as a whole, without a mask; what is left, in single blocks under the mask. A tile is some rows of
one size with equally many columns each: its keys are gathered, and one batched product gives its scores. A tile has at
most `_SCORES` scores (or one block of each head), so that memory does not grow with the length, and a row that is wider
than a tile is joined by the logarithms of its sums of exponentials (Milakov and Gimelshein, "Online normalizer
calculation for softmax", 2018; Dao et al., "FlashAttention", 2022). No block is computed that the layout lacks or that
the causal order, the window, the documents or the padding hide as a whole. Backward computes the scores again, tile by
tile, from the output and these logarithms.

On an accelerator the same blocks go to torch's FlexAttention, which rounds up to squares of 128 tokens. It has no
backward on the CPU, and uncompiled it makes the whole score matrix, so elsewhere tiles are batched products.

Key and value heads that query heads share are read where they lie, never repeated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from infinity.config.sparse_attention import SparseAttention
from infinity.plan.block_layouts import BlockLayout, block_layout

# Tokens of the larger squares, scores of a tile and keys of a tile's row: what a core's caches hold.
_SQUARE, _SCORES, _KEYS = 128, 1 << 18, 1024
# Below every score, and finite, so that differences of two are.
_LOWEST = -1e30
# The document of a key that is padding.
_HIDDEN = -(1 << 30)

# Of the process: blocks of scores, of each head and sample, that forward passes have computed.
computed: Counter[str] = Counter()


def sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, *, layout: SparseAttention | Mapping[str, Any] | BlockLayout | None,
    causal: bool = True, scale: float | None = None, window: int | None = None, padding: Tensor | None = None,
    documents: Tensor | None = None, visible: Tensor | None = None, sinks: Tensor | None = None,
    softcap: float | None = None, seed: int = 0, first_head: int = 0,
) -> Tensor:  # fmt: skip
    """Return the attention of the blocks that a layout has, without a tensor of tokens x tokens.

    query: [batch, heads, tokens, width], fp32, fp64, bf16 or fp16; key and value: [batch, key heads, tokens, width],
    where the key heads divide the heads. Computed in fp32 (fp64 of fp64). Returns [batch, heads, tokens, width] of the
    query's dtype; a query that sees nothing gets 0.

    layout: the keys of the configuration's section `sparse_attention`, such as {"mode": "fixed", "block": 64}; a
    `BlockLayout` of at least so many blocks; None: every block. seed: of its random blocks. first_head: the place of
    these heads among those of the layout. It is an "and" to the other masks:

    causal: no query sees a later key. window: a query sees this many keys, itself and those before it; needs causal.
    padding: [batch, tokens], bool; keys that are False are seen by none. documents: [batch, tokens], int from 0 to
    2^30; queries see keys of the same number only. visible: [tokens, tokens], bool; the pairs that remain, for callers
    that have such.

    scale: of the scores; default: 1 / sqrt(width). softcap: c makes a score s into c tanh(s / c). sinks: [heads]; a
    score of each head that takes part in the softmax and has no value, as in GPT-OSS.

    ConfigError for keys of a layout that contradict each other; ValueError for shapes that do.
    """
    heads, tokens = query.shape[1:3]
    if key.shape[2] != tokens or value.shape != key.shape or heads % key.shape[1] or query.shape[3] != key.shape[3]:
        raise ValueError(
            f"sparse_attention has a query of shape {tuple(query.shape)}, a key of {tuple(key.shape)} and a value of "
            f"{tuple(value.shape)}: tokens and widths must be equal, and key heads must divide heads"
        )
    if window is not None and (not causal or window < 1):
        raise ValueError(f"sparse_attention has a window of {window}: it must be at least 1, and needs causal=True")
    if layout is None:
        layout = SparseAttention(mode="dense", block=_SQUARE)
    if not isinstance(layout, BlockLayout):
        section = SparseAttention.of(layout)
        layout = block_layout(section, first_head + heads, -(-tokens // section.block), seed)
    if layout.blocks * layout.section.block < tokens:
        raise ValueError(f"sparse_attention has {tokens} tokens, and the layout {layout.blocks} blocks of "
                         f"{layout.section.block}")  # fmt: skip
    scale = query.shape[3] ** -0.5 if scale is None else scale
    call = _Call(layout, first_head, tokens, causal, window, scale, softcap or None, visible)
    queries = None if documents is None else documents.expand(query.shape[0], tokens)
    keys = queries
    if padding is not None:
        queries = torch.zeros_like(padding, dtype=torch.int64) if queries is None else queries
        keys = queries.masked_fill(~padding.bool(), _HIDDEN)
    if query.device.type == "cuda" and visible is None:
        return _flex(call, query, key, value, queries, keys, sinks)
    return _Attention.apply(call, query, key, value, queries, keys, sinks)


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What a call asks for beside its tensors."""

    layout: BlockLayout
    first_head: int
    tokens: int
    causal: bool
    window: int | None
    scale: float
    softcap: float | None
    visible: Tensor | None

    @property
    def square(self) -> int:
        """Tokens of the larger squares: a multiple of the block."""
        return max(1, _SQUARE // self.layout.section.block) * self.layout.section.block


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows of blocks of `size` tokens, [rows], and as many columns of each, [rows, columns]; see [Note: tiles]."""

    size: int
    masked: bool
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True, slots=True)
class _Share:
    """What is computed together: samples and key heads, the query heads of each, and the tiles of their layout.

    queries, keys: the documents of tokens of its one sample; None where all see each other.
    """

    samples: slice
    groups: slice
    members: slice
    tiles: tuple[_Tile, ...]
    queries: Tensor | None
    keys: Tensor | None


def _shares(
    call: _Call, batch: int, groups: int, members: int, queries: Tensor | None, keys: Tensor | None
) -> Iterator[_Share]:
    """Samples of their own documents go one by one, and heads of their own layouts."""
    layout = call.layout
    # By group and place within it: all heads together, or one after another.
    parts = [(slice(0, groups), slice(0, members), call.first_head, groups * members)]
    if layout.patterns > 1:
        parts = [
            (slice(group, group + 1), slice(each, each + 1), call.first_head + group * members + each, 1)
            for group in range(groups) for each in range(members)
        ]  # fmt: skip
    together = keys is None and batch * parts[0][3] * call.square**2 <= _SCORES
    for samples in [slice(0, batch)] if together else [slice(sample, sample + 1) for sample in range(batch)]:
        own = [None if each is None else each[samples.start] for each in (queries, keys)]
        numbers = [None if each is None else each.cpu().numpy().astype(np.int32).tobytes() for each in own]
        for group, member, head, count in parts:
            pattern, times = head % layout.patterns, (samples.stop - samples.start) * count
            tiles = _tiles(
                layout, pattern, call.tokens, call.causal, call.window, call.square, call.visible is not None, times,
                *numbers,
            )  # fmt: skip
            yield _Share(samples, group, member, tiles, *own)


# By documents as well, of which long samples have many: a batch's worth is kept.
@lru_cache(maxsize=64)
def _tiles(
    layout: BlockLayout, pattern: int, tokens: int, causal: bool, window: int | None, square: int, masked: bool,
    times: int, queries: bytes | None, keys: bytes | None,
) -> tuple[_Tile, ...]:  # fmt: skip
    """Return the tiles of `times` heads and samples of one layout."""
    size = layout.section.block
    step, blocks = square // size, -(-tokens // size)
    hidden = None if queries is None or keys is None else _Documents(queries, keys, size)
    whole: list[tuple[NDArray[Any], NDArray[Any]]] = []
    single: list[tuple[NDArray[Any], NDArray[Any]]] = []
    for row in range(-(-blocks // step)):
        rows = np.arange(row * step, min((row + 1) * step, blocks))
        # Columns of which the causal order and the window may leave something, in whole squares.
        stop = row + 1 if causal else -(-blocks // step)
        start = 0 if window is None else max(0, row * square - window + 1) // square
        columns = np.arange(start * step, min(stop * step, blocks))
        there = layout.part(pattern, rows, columns)
        if causal:
            there &= columns <= rows[:, None]
        if window is not None:
            there &= (rows[:, None] - columns) * size - size + 1 < window
        if hidden is not None:
            there &= hidden.meet(rows, columns)
        # Squares that are there as a whole, of which all pairs are visible.
        at = np.arange(start, start + len(columns) // step)
        full = np.zeros(stop - start, dtype=bool)
        if len(rows) == step and not masked:
            visible = there[:, : len(at) * step].reshape(step, -1, step).all((0, 2)) & ((at + 1) * square <= tokens)
            if causal:
                visible &= at < row
            if window is not None:
                visible &= (row - at + 1) * square - 1 < window
            if hidden is not None:
                visible &= hidden.all_equal(rows, at * step, step)
            full[: len(at)] = visible
        (squares,) = np.nonzero(full)
        whole.append((np.full(len(squares), row), squares + start))
        left = np.nonzero(there & ~np.repeat(full, step)[: len(columns)])
        single.append((rows[left[0]], columns[left[1]]))
    return (*_cut(square, whole, times, masked=False), *_cut(size, single, times, masked=True))


class _Documents:
    """The least and the greatest document of each block, of queries and of keys."""

    def __init__(self, queries: bytes, keys: bytes, size: int) -> None:
        self._low, self._high, self._holes = [], [], np.zeros(0, dtype=bool)
        for raw in (queries, keys):
            numbers = np.frombuffer(raw, dtype=np.int32)
            at = np.arange(0, len(numbers), size)
            self._holes = np.logical_or.reduceat(numbers == _HIDDEN, at)
            self._low.append(np.minimum.reduceat(np.where(numbers == _HIDDEN, -_HIDDEN, numbers), at))
            self._high.append(np.maximum.reduceat(numbers, at))

    def meet(self, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether blocks may have a pair of one document, [len(rows), len(columns)]."""
        low, high = self._low, self._high
        return (low[0][rows, None] <= high[1][columns]) & (low[1][columns] <= high[0][rows, None])

    def all_equal(self, rows: NDArray[np.int64], starts: NDArray[np.int64], step: int) -> NDArray[np.bool_]:
        """Return of the squares of blocks at `starts` whether all their pairs are of one document."""
        low, high = self._low[0][rows].min(), self._high[0][rows].max()
        columns = starts[:, None] + np.arange(step)
        same = (self._low[1][columns] == low) & (self._high[1][columns] == low) & ~self._holes[columns]
        return same.all(1) & bool(low == high)


def _cut(
    size: int, found: list[tuple[NDArray[Any], NDArray[Any]]], times: int, *, masked: bool
) -> Iterator[_Tile]:
    """Yield the tiles of some blocks, by row and column in the order of rows."""
    rows, columns = (np.concatenate([each[at] for each in found]).astype(np.int32) for at in (0, 1))
    if not len(rows):
        return
    widest = max(1, min(_KEYS // size, _SCORES // (times * size**2)))
    counts = np.bincount(rows)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Pieces of rows, no wider than a tile; the last of a row may be narrower.
    piece = place // widest
    width = np.minimum(widest, np.repeat(counts, counts) - piece * widest)
    # A tile has no row twice: pieces of one place in their rows and of one width go together.
    order = np.lexsort((piece, width))
    rows, columns, piece, width = rows[order], columns[order], piece[order], width[order]
    starts = np.flatnonzero(np.diff(piece, prepend=-1) | np.diff(width, prepend=-1))
    for start, stop in zip(starts, [*starts[1:], len(rows)], strict=True):
        wide = int(width[start])
        own, seen = rows[start:stop:wide], columns[start:stop].reshape(-1, wide)
        many = max(1, _SCORES // (times * size**2 * wide))
        for at in range(0, len(own), many):
            part = slice(at, at + many)
            yield _Tile(size, masked, torch.from_numpy(own[part].astype(np.int64)), torch.from_numpy(seen[part].copy()))


class _Scores:
    """The tensors of one share, from which tiles are gathered: [samples, groups, tokens x members, width] and so on."""

    def __init__(self, call: _Call, share: _Share, query: Tensor, key: Tensor, value: Tensor) -> None:
        """query: [batch, groups, members, tokens, width]."""
        self._call, self._share, self.scale = call, share, call.scale
        self.dtype = torch.promote_types(query.dtype, torch.float32)
        self.members = share.members.stop - share.members.start
        self._query = self.by_token(query)
        self._key, self._value = (self._filled(each[share.samples, share.groups]) for each in (key, value))

    def by_token(self, heads: Tensor) -> Tensor:
        """[batch, groups, members, tokens, ...] of this share as [samples, groups, tokens x members, ...]."""
        share = self._share
        own = heads[share.samples, share.groups, share.members]
        own = own[:, :, 0] if self.members == 1 else own.transpose(2, 3).flatten(2, 3)
        return self._filled(own, self.members)

    def by_head(self, tokens: Tensor) -> Tensor:
        """The opposite of `by_token`."""
        own = tokens[:, :, : self._call.tokens * self.members].unflatten(2, (-1, self.members))
        return own.transpose(2, 3)

    def _filled(self, tensor: Tensor, times: int = 1) -> Tensor:
        """With zeros behind its tokens, dimension 2, to a whole number of squares."""
        more = -self._call.tokens % self._call.square
        return F.pad(tensor, (0, 0) * (tensor.dim() - 3) + (0, more * times)) if more else tensor

    def zeros(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of the shapes in which tiles add up gradients of query, key and value."""
        query, key, value = (torch.zeros_like(each, dtype=self.dtype) for each in (self._query, self._key, self._value))
        return query, key, value

    def count(self, tile: _Tile) -> None:
        size = self._call.layout.section.block
        heads = self._query.shape[0] * self._query.shape[1] * self.members
        computed["blocks"] += tile.columns.numel() * (tile.size // size) ** 2 * heads

    def rows(self, tensor: Tensor, tile: _Tile) -> Tensor:
        """The rows of a tile of what is by token: [samples, groups, rows, size x members, ...]."""
        return tensor.unflatten(2, (-1, tile.size * self.members)).index_select(2, tile.rows.to(tensor.device))

    def query(self, tile: _Tile) -> Tensor:
        return self.rows(self._query, tile).to(self.dtype)

    def key(self, tile: _Tile) -> Tensor:
        return self._columns(self._key, tile)

    def value(self, tile: _Tile) -> Tensor:
        return self._columns(self._value, tile)

    def _columns(self, tensor: Tensor, tile: _Tile) -> Tensor:
        """[samples, groups, rows, columns x size, width]."""
        found = tensor.unflatten(2, (-1, tile.size)).index_select(2, tile.columns.flatten().to(tensor.device))
        return found.to(self.dtype).unflatten(2, tile.columns.shape).flatten(3, 4)

    def of(self, tile: _Tile, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None]:
        """Scores, [samples, groups, rows, size x members, columns x size], and what backward multiplies theirs by."""
        scores, slope = torch.matmul(query * self.scale, key.mT), None
        if (cap := self._call.softcap) is not None:
            scores = scores.div_(cap).tanh_()
            slope = 1 - scores.square()
            scores = scores.mul_(cap)
        if tile.masked:
            hidden = ~self._visible(tile).unsqueeze(-2).to(scores.device)
            scores.unflatten(-2, (tile.size, self.members)).masked_fill_(hidden, -torch.inf)
        return scores, slope

    def _visible(self, tile: _Tile) -> Tensor:
        """Which pairs of a tile see each other, [rows, size, columns x size]."""
        call, share, inside = self._call, self._share, torch.arange(tile.size, device="cpu")
        row = (tile.rows[:, None] * tile.size + inside)[:, :, None]
        column = (tile.columns.long()[:, :, None] * tile.size + inside).flatten(1)[:, None, :]
        found = column < call.tokens
        if call.causal:
            found = found & (column <= row)
        if call.window is not None:
            found = found & (row - column < call.window)
        if share.queries is not None and share.keys is not None:
            last = call.tokens - 1
            found = found & (share.queries[row.clamp(max=last)] == share.keys[column.clamp(max=last)])
        if call.visible is not None:
            last = call.tokens - 1
            found = found & call.visible[row.clamp(max=last), column.clamp(max=last)]
        return found


class _Attention(torch.autograd.Function):
    """Attention tile by tile: see [Note: tiles]."""

    @staticmethod
    def forward(
        ctx: Any, call: _Call, query: Tensor, key: Tensor, value: Tensor, queries: Tensor | None, keys: Tensor | None,
        sinks: Tensor | None,
    ) -> Tensor:  # fmt: skip
        batch, groups = key.shape[:2]
        grouped = query.unflatten(1, (groups, -1))
        members = grouped.shape[2]
        work = torch.promote_types(query.dtype, torch.float32)
        # As attention layers write it: [batch, tokens, heads, width].
        output = query.new_empty(batch, call.tokens, *query.shape[1::2]).transpose(1, 2)
        logs = torch.empty(batch, groups, members, call.tokens, dtype=work, device=query.device)
        for share in _shares(call, batch, groups, members, queries, keys):
            scores = _Scores(call, share, grouped, key, value)
            found = scores.by_token(torch.zeros_like(grouped, dtype=work))
            # Of each row so far: the greatest score, and the sum of exponentials of differences from it.
            most, total = torch.full_like(found[..., 0], _LOWEST), torch.zeros_like(found[..., 0])
            if sinks is not None:
                own = sinks.to(work).view(groups, members)[share.groups, share.members]
                most.unflatten(2, (-1, scores.members)).copy_(own[:, None, :])
                total.fill_(1)
            for tile in share.tiles:
                _join(scores, tile, found, most, total)
            found.div_(total.masked_fill(total == 0, 1).unsqueeze(-1))
            where = share.samples, share.groups, share.members
            output.unflatten(1, (groups, -1))[where].copy_(scores.by_head(found))
            # A row that sees nothing: no exponential of a difference from it is more than 0.
            logs[where] = scores.by_head(torch.where(total > 0, most + total.log(), -_LOWEST))
        ctx.call = call
        ctx.save_for_backward(query, key, value, queries, keys, sinks, output, logs)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        query, key, value, queries, keys, sinks, output, logs = ctx.saved_tensors
        call, (batch, groups), work = ctx.call, key.shape[:2], logs.dtype
        grouped, grad = (each.unflatten(1, (groups, -1)) for each in (query, grad))
        # Of each row, the sum of gradients of its probabilities, weighted with them.
        delta = (output.unflatten(1, (groups, -1)).to(work) * grad).sum(-1)
        query_grad = torch.empty_like(grouped)
        sums: list[Tensor] = []
        for share in _shares(call, batch, groups, grouped.shape[2], queries, keys):
            scores = _Scores(call, share, grouped, key, value)
            rows = tuple(scores.by_token(each) for each in (grad, logs, delta))
            own = scores.zeros()
            for tile in share.tiles:
                _add_gradients(scores, tile, rows, own)
            query_grad[share.samples, share.groups, share.members] = scores.by_head(own[0])
            parts = [part[:, :, : call.tokens] for part in own[1:]]
            if parts[0].shape == key.shape and scores.members == grouped.shape[2]:
                sums = parts
                continue
            sums = sums or [torch.zeros_like(each, dtype=work) for each in (key, value)]
            for total, part in zip(sums, parts, strict=True):
                total[share.samples, share.groups] += part
        sink_grad = None
        if sinks is not None:
            weight = (sinks.to(work).view(groups, -1, 1) - logs).exp()
            sink_grad = -(weight * delta).sum((0, 3)).flatten().to(sinks.dtype)
        found = (query_grad.flatten(1, 2), sums[0].to(key.dtype), sums[1].to(value.dtype))
        return None, *found, None, None, sink_grad


def _join(scores: _Scores, tile: _Tile, found: Tensor, most: Tensor, total: Tensor) -> None:
    """Add a tile to what its rows have so far: sums of values, greatest scores and sums of exponentials."""
    weights, _ = scores.of(tile, scores.query(tile), scores.key(tile))
    before = scores.rows(most, tile)
    now = torch.maximum(before, weights.amax(-1))
    weights.sub_(now.unsqueeze(-1)).exp_()
    shrink = before.sub_(now).exp_()
    sums = scores.rows(total, tile).mul_(shrink).add_(weights.sum(-1))
    values = scores.rows(found, tile).mul_(shrink.unsqueeze(-1)).add_(torch.matmul(weights, scores.value(tile)))
    for whole, part in ((most, now), (total, sums), (found, values)):
        whole.unflatten(2, (-1, part.shape[3])).index_copy_(2, tile.rows.to(whole.device), part)
    scores.count(tile)


def _add_gradients(
    scores: _Scores, tile: _Tile, rows: tuple[Tensor, ...], own: tuple[Tensor, Tensor, Tensor]
) -> None:  # fmt: skip
    """Add a tile's part to the gradients of query, key and value; rows: gradient, logarithms and deltas of all rows."""
    query, key = scores.query(tile), scores.key(tile)
    weights, slope = scores.of(tile, query, key)
    grad, logs, delta = (scores.rows(each, tile).to(scores.dtype) for each in rows)
    weights.sub_(logs.unsqueeze(-1)).exp_()
    value_part = torch.matmul(weights.mT, grad)
    weights.mul_(torch.matmul(grad, scores.value(tile).mT).sub_(delta.unsqueeze(-1)))
    if slope is not None:
        weights.mul_(slope)
    rows_there, columns = (each.flatten().to(grad.device) for each in (tile.rows, tile.columns))
    query_part = torch.matmul(weights, key)
    own[0].unflatten(2, (-1, query.shape[3])).index_add_(2, rows_there, query_part, alpha=scores.scale)
    for whole, part, factor in ((own[1], torch.matmul(weights.mT, query), scores.scale), (own[2], value_part, 1.0)):
        by_block = part.unflatten(3, (-1, tile.size)).flatten(2, 3)
        whole.unflatten(2, (-1, tile.size)).index_add_(2, columns, by_block, alpha=factor)


def _flex(
    call: _Call, query: Tensor, key: Tensor, value: Tensor, queries: Tensor | None, keys: Tensor | None,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attention of the same blocks by FlexAttention's compiled kernels: see [Note: tiles]."""
    cap = call.softcap
    output, found = _compiled_flex()(
        query, key, value, scale=call.scale, enable_gqa=query.shape[1] != key.shape[1],
        score_mod=None if cap is None else lambda score, *_: cap * torch.tanh(score / cap),
        block_mask=_block_mask(call, query, queries, keys), return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    if sinks is not None:
        # What a further score would leave of the others' weights.
        output = output * torch.sigmoid(found.lse - sinks.to(found.lse.dtype)[:, None]).unsqueeze(-1).to(output.dtype)
    return output


@lru_cache(maxsize=1)
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


def _block_mask(call: _Call, query: Tensor, queries: Tensor | None, keys: Tensor | None) -> BlockMask:
    """Return the tiles of a call as FlexAttention has them: squares of which it computes all pairs, and some."""
    layout, device, size = call.layout, query.device, call.layout.section.block
    square = math.lcm(_SQUARE, size)
    count = -(-call.tokens // square)
    samples, heads = 1 if keys is None else len(query), 1 if layout.patterns == 1 else query.shape[1]
    # Squares of some pairs, and of all.
    squares = torch.zeros(2, samples, heads, count, count, dtype=torch.bool, device="cpu")
    for sample in range(samples):
        numbers = [None if each is None else each[sample].cpu().numpy().astype(np.int32).tobytes()
                   for each in (queries, keys)]  # fmt: skip
        for head in range(heads):
            pattern = (call.first_head + head) % layout.patterns
            tiles = _tiles(layout, pattern, call.tokens, call.causal, call.window, square, False, 1, *numbers)
            for tile in tiles:
                rows, columns = tile.rows * tile.size // square, tile.columns.long() * tile.size // square
                squares[int(not tile.masked), sample, head, rows[:, None], columns] = True
    together = len(query) // samples * (query.shape[1] // heads)
    computed["blocks"] += int(squares.any(0).sum()) * (square // size) ** 2 * together
    tables = None
    if layout.section.mode != "dense":
        tables = torch.stack([torch.from_numpy(layout.table(each)) for each in range(layout.patterns)]).to(device)

    def visible(sample: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        seen = row >= column if call.causal else (row >= 0) & (column >= 0)
        if tables is not None:
            seen = seen & tables[(head + call.first_head) % layout.patterns, row // size, column // size]
        if call.window is not None:
            seen = seen & (row - column < call.window)
        if queries is not None and keys is not None:
            seen = seen & (queries[sample, row] == keys[sample, column])
        return seen

    squares = squares.to(device)
    counts, order = squares.sum(-1).int(), squares.int().argsort(dim=-1, descending=True, stable=True).int()
    return BlockMask.from_kv_blocks(
        counts[0], order[0], counts[1], order[1], BLOCK_SIZE=square, mask_mod=visible,
        seq_lengths=(call.tokens, call.tokens),
    )  # fmt: skip
