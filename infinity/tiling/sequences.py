"""Long contexts: an MLP and the loss of a language model a few tokens at a time.

The inner activations of each MLP, and the logits with their gradient, take most of a long sequence's memory, and live
shortly. Both are computed here tile by tile along the sequence, and again in backward, so that only one tile is in
memory at a time. Partitioned weights are gathered once for the whole call in forward, and once in backward; the tiles
of a weight that is itself in tiles (`infinity.zero.tiles`) are gathered once each.

The loss never has a whole row of logits: it walks over blocks of the vocabulary and keeps each token's maximum and sum
of exponentials (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.plan.spec import TILE_TOKENS, TILE_WORDS
from infinity.zero.coordinator import Coordinator
from infinity.zero.hooks import register_post_backward, register_pre_backward
from infinity.zero.tiles import ProductSum, Tile, Tiles, tiles_of

# How many tiles are being computed, one within another: their intermediates go with each, in backward as well.
tiles_running = 0


def tiled_mlp(
    mlp: nn.Module, hidden: Tensor, *, tile_tokens: int = TILE_TOKENS, forward: Callable[[Tensor], Tensor] | None = None
) -> Tensor:  # fmt: skip
    """`mlp(hidden)` for a module that treats each token on its own, `tile_tokens` tokens at a time.

    hidden: [..., tokens, width]; the module gets [..., tile_tokens, width] with leading dimensions of 1, and may change
    the width. Intermediates are not saved; backward recomputes them with the same RNG state. forward: a function to
    call instead of `mlp` that uses parameters of `mlp`.
    """
    call = forward or mlp
    coordinator, units = _units_below(mlp)
    if coordinator is None:
        return _by_tiles(call, hidden, tile_tokens)
    # Gather however few tokens this rank has: tiles may differ between ranks, gathers may not.
    scope = coordinator.open_scope(units)
    if torch.is_grad_enabled():
        passed = register_post_backward((hidden,), lambda: coordinator.leave_backward(scope))
        hidden = hidden if passed is None else passed[0]
    output = _by_tiles(call, hidden, tile_tokens)
    # Of one tile it is the last layer's own, whose hooks would come first and gather what that layer needs.
    output = output.view_as(output)
    returns = register_pre_backward([output] if output.requires_grad else [], coordinator, scope)
    coordinator.close_scope(scope, will_return=returns)
    return output


def _by_tiles(call: Callable[[Tensor], Tensor], hidden: Tensor, tile_tokens: int) -> Tensor:
    """`call` on `tile_tokens` tokens at a time, and again in backward; on all at once where they are no more."""
    if hidden.numel() <= tile_tokens * hidden.shape[-1]:
        return call(hidden)
    # All tokens one behind the other, so that tiles are contiguous.
    tiles = hidden.reshape(*(1 for _ in hidden.shape[:-2]), -1, hidden.shape[-1]).split(tile_tokens, -2)
    if not torch.is_grad_enabled():
        return torch.cat([call(tile) for tile in tiles], -2).view(*hidden.shape[:-1], -1)
    own = hidden.device.type == "cpu" and not torch.compiler.is_compiling()
    parts = [
        checkpoint(_tile, call, tile, [] if own else None, use_reentrant=False, preserve_rng_state=not own)
        for tile in tiles
    ]  # fmt: skip
    return torch.cat(parts, -2).view(*hidden.shape[:-1], -1)


def _tile(call: Callable[[Tensor], Tensor], tile: Tensor, drawn_from: list[Tensor | None] | None) -> Tensor:
    """drawn_from: where the first run notes the state of the CPU's generator that it draws from, or None; one list for
    the runs of a tile. None: checkpoint notes the states. It does so of a tile that draws nothing, too, and 5 KB of the
    heap for each tile until backward leave gaps in which the next layer's tiles have no room.
    """
    global tiles_running
    tiles_running += 1
    try:
        if drawn_from is None:
            return call(tile)
        if drawn_from:
            with nullcontext() if drawn_from[0] is None else torch.random.fork_rng([]):
                if drawn_from[0] is not None:
                    torch.set_rng_state(drawn_from[0])
                return call(tile)
        before = torch.get_rng_state()
        output = call(tile)
        drawn_from.append(None if torch.equal(before, torch.get_rng_state()) else before)
        return output
    finally:
        tiles_running -= 1


def tiled_cross_entropy(
    hidden: Tensor, head: nn.Linear, labels: Tensor, *, shift: bool = False, ignore_index: int = -100,
    reduction: str = "mean", divisor: float | Tensor | None = None, tile_tokens: int = TILE_TOKENS,
    vocabulary: Any = None,
) -> Tensor:  # fmt: skip
    """`F.cross_entropy(head(hidden).float(), labels)` without the logits.

    hidden: [..., tokens, width]. labels: [..., tokens], int64; `ignore_index` marks tokens that do not count. shift:
    each token predicts the next one's label, and the last none. reduction: "mean" over the tokens that count, or "sum";
    with `divisor` the sum divided by it. Returns a scalar in fp32. Logits and their gradient have the dtype of `head`,
    as plain layers give them; everything is summed in fp32.

    vocabulary: of a head that holds a slice of the words, the rest being other ranks': how to combine with them
    (`infinity.parallel.functions.VocabularySlice`); by default the one that the tensor axis has put on the head. The
    call is then collective, and labels count in the whole vocabulary.
    """
    if not isinstance(head, nn.Linear):
        raise TypeError(f"tiled_cross_entropy needs the head as a torch.nn.Linear, got {type(head).__name__}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction is {reduction!r}; there are 'mean' and 'sum'")
    if labels.shape != hidden.shape[:-1]:
        raise ValueError(f"labels have shape {tuple(labels.shape)}, hidden states {tuple(hidden.shape)}")
    if shift and labels.shape[-1]:
        labels = F.pad(labels[..., 1:], (0, 1), value=ignore_index)
    flat = labels.reshape(-1).to(hidden.device)
    counts = flat != ignore_index
    if flat.numel() and not bool(((flat >= 0) & (flat < head.out_features) | ~counts).all()):
        raise IndexError(f"a label is neither {ignore_index} nor one of the head's {head.out_features} outputs")
    if divisor is None:
        divisor = counts.sum() if reduction == "mean" else 1
    words = head.__dict__.get("_infinity_vocabulary") if vocabulary is None else vocabulary
    if words is not None:
        hidden, flat = words.copy(hidden), flat - words.first_word(len(head.weight))
    call = _Loss(_pieces_of(head.weight), _pieces_of(head.bias), flat, counts, tile_tokens, words)
    inputs = hidden.reshape(-1, hidden.shape[-1])
    with torch._C.DisableTorchFunctionSubclass():
        total = _CrossEntropy.apply(call, call.returns(inputs), inputs, head.weight, head.bias)
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


class _Plain:
    """An ordinary parameter in the place of `Tiles`: whole, and its gradient goes back to autograd."""

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.start, self.stop = 0, len(param)
        self.grad: Tensor | None = None

    def forward(self, *, returns: bool) -> Iterator[tuple[_Plain, Tensor, None]]:
        yield self, self.param.detach(), None

    def backward(self, scopes: Sequence[Any]) -> Iterator[tuple[_Plain, Tensor, Tensor | None]]:
        values = self.param.detach()
        yield self, values, torch.empty_like(values) if self.param.requires_grad else None

    def returns(self, *others: Tensor | None) -> bool:
        return torch.is_grad_enabled() and any(each.requires_grad for each in (self.param, *others) if each is not None)

    def add_gradient(self, grad: Tensor) -> None:
        self.grad = grad.to(self.param.dtype)


def _pieces_of(param: Any) -> Tiles | _Plain | None:
    """How a parameter is brought: by its own tiles, as one that an engine gathers, or as it is."""
    if param is None:
        return None
    tiles = tiles_of(param)
    owner = param.__dict__.get("_infinity_owner")
    if tiles is not None or not isinstance(owner, Coordinator) or owner.closed:
        return tiles or _Plain(param)
    return Tiles(param, [Tile(owner.unit_of(param), param, 0, len(param))], owner)


def _units_below(module: nn.Module) -> tuple[Coordinator | None, list[Any]]:
    """Return the coordinator of a module's parameters and their units, each once, without tiles."""
    coordinator, units = None, {}
    for param in module.parameters():
        owner = param.__dict__.get("_infinity_owner")
        if isinstance(owner, Coordinator) and not owner.closed:
            coordinator, unit = owner, owner.unit_of(param)
            units[unit.layout.index] = unit
    return coordinator, list(units.values())


class _Loss:
    """One call: the head's weight and bias, and the tokens that count. Yields blocks of logits."""

    def __init__(
        self, weight: Tiles | _Plain | None, bias: Tiles | _Plain | None, labels: Tensor, counts: Tensor, step: int,
        words: Any,
    ) -> None:  # fmt: skip
        """labels: counted from the head's first row. words: how to combine with other ranks' rows, or None."""
        assert weight is not None
        self.weight, self.bias, self.words = weight, bias, words
        self.labels, self.counts, self._step = labels, counts, step

    def returns(self, hidden: Tensor) -> bool:
        """Return whether backward of this call will run."""
        return self.weight.returns(hidden, None if self.bias is None else self.bias.param)

    def whole_bias(self, returns: bool) -> tuple[Tensor | None, list[Any]]:
        """Return a copy of the bias, and the calls of its gather."""
        found, scopes = None, []
        for _, values, scope in self.bias.forward(returns=returns) if self.bias is not None else ():
            found = values.clone()
            scopes.append(scope)
        return found, scopes

    def blocks(self, piece: Any) -> Iterator[tuple[slice, slice]]:
        """Blocks of a piece's rows: in the piece, and in the vocabulary."""
        for first in range(0, piece.stop - piece.start, TILE_WORDS):
            last = min(first + TILE_WORDS, piece.stop - piece.start)
            yield slice(first, last), slice(piece.start + first, piece.start + last)

    def tokens(self) -> Iterator[slice]:
        """Tiles of the tokens."""
        for first in range(0, len(self.labels), self._step):
            yield slice(first, min(first + self._step, len(self.labels)))

    def own(self, tokens: slice, rows: slice) -> tuple[Tensor, Tensor]:
        """Return the positions of the tokens whose label is in the block, and their columns in it."""
        labels = self.labels[tokens]
        at = (self.counts[tokens] & (labels >= rows.start) & (labels < rows.stop)).nonzero().squeeze(1)
        return at, labels[at] - rows.start


class _CrossEntropy(torch.autograd.Function):
    """The sum of -log softmax(hidden @ weight.T + bias)[label] over the tokens that count."""

    @staticmethod
    def forward(ctx: Any, call: _Loss, returns: bool, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        kind = hidden.device.type
        ctx.given = hidden.dtype
        hidden = hidden.to(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype)
        offsets, bias_scopes = call.whole_bias(returns)
        highest = hidden.new_full((len(hidden),), float("-inf"), dtype=torch.float32)
        total, chosen = torch.zeros_like(highest), torch.zeros_like(highest)
        scopes = []
        for piece, values, scope in call.weight.forward(returns=returns):
            scopes.append(scope)
            for rows, names in call.blocks(piece):
                part = values[rows].to(hidden.dtype)
                for tokens in call.tokens():
                    logits = _logits(hidden[tokens], part, offsets, names)
                    before, after = highest[tokens], torch.maximum(highest[tokens], logits.amax(1))
                    total[tokens] = total[tokens] * (before - after).exp() + (logits - after[:, None]).exp_().sum(1)
                    highest[tokens] = after
                    at, columns = call.own(tokens, names)
                    chosen[tokens][at] = logits[at, columns]
        if call.words is not None:
            highest, total, chosen = call.words.combine(highest, total, chosen)
        ctx.call, ctx.scopes, ctx.bias_scopes, ctx.offsets = call, scopes, bias_scopes, offsets
        normal = highest + total.log()
        ctx.save_for_backward(hidden, normal)
        # An index by `counts` would wait for the device, because shapes do not tell how many tokens count.
        return torch.where(call.counts, normal - chosen, 0).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        hidden, normal = ctx.saved_tensors
        call: _Loss = ctx.call
        # A product would give NaN: the gradient of a mean over no tokens is infinite.
        scale = torch.where(call.counts, grad, 0)
        _, _, wants_hidden, _, wants_bias = ctx.needs_input_grad
        of_hidden = ProductSum(hidden.shape, hidden) if wants_hidden else None
        of_bias = None if ctx.offsets is None else torch.zeros_like(ctx.offsets, dtype=torch.float32)
        for piece, values, of_piece in call.weight.backward(ctx.scopes):
            for rows, names in call.blocks(piece):
                part = values[rows].to(hidden.dtype)
                of_block = ProductSum(part.shape, part) if of_piece is not None else None
                for tokens in call.tokens():
                    logits = _logits(hidden[tokens], part, ctx.offsets, names)
                    wrong = logits.sub_(normal[tokens, None]).exp_()
                    at, columns = call.own(tokens, names)
                    wrong[at, columns] -= 1
                    # As the gradient of logits of 16 bits would be.
                    wrong = wrong.mul_(scale[tokens, None]).to(hidden.dtype)
                    if of_hidden is not None:
                        of_hidden.add(wrong, part, tokens)
                    if of_block is not None:
                        of_block.add(wrong.t(), hidden[tokens])
                    if of_bias is not None:
                        of_bias[names] += wrong.float().sum(0)
                if of_piece is not None and of_block is not None:
                    of_piece[rows] = of_block.total
            if of_piece is not None:
                piece.add_gradient(of_piece)
        if call.bias is not None and of_bias is not None and wants_bias:
            for piece, _, _ in call.bias.backward(ctx.bias_scopes):
                piece.add_gradient(of_bias)
        to_hidden = None if of_hidden is None else of_hidden.total.to(ctx.given)
        # The gradients of an engine's parameters are on them already, before their unit is released.
        return None, None, to_hidden, _taken(call.weight), _taken(call.bias)


def _taken(pieces: Tiles | _Plain | None) -> Tensor | None:
    """Return a plain parameter's gradient and drop it here, so that autograd alone holds it."""
    if not isinstance(pieces, _Plain):
        return None
    grad, pieces.grad = pieces.grad, None
    return grad


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
    """[tokens, rows of the block] in fp32; rounded as a layer's output is."""
    return F.linear(hidden, weight, None if bias is None else bias[rows].to(weight.dtype)).float()
