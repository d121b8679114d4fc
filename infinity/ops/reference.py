"""Reference implementations in torch, bit-identical to the native code of `infinity.ops.adam` but slower.

They are the Python fallback and the oracle of the tests. Each rule's own arithmetic is in `infinity.ops.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from infinity.base.tiers import BLOCK_NUMEL
from infinity.ops.codes import decoded, encoded
from infinity.ops.rules import Piece, StepConstants, fma

# Bounds the temporary memory: about two fp64 values and some masks for each element of a chunk.
_CHUNK_NUMEL = 1 << 18
_BLOCK_NUMEL = 4096
_SUM_LANES = 16


def adam_step(piece: Piece, constants: StepConstants) -> Tensor:
    """Step a checked piece in place, as step_lanes of csrc/adam/arithmetic.inl does; the host does not wait.

    Elements whose scaled gradient is not finite keep every bit of their state, and with moments in 8 bits all of their
    block do; return the number of such gradients (int64 [], on the piece's device).
    """
    nonfinite_count = torch.zeros((), dtype=torch.int64, device=piece.param.device)
    for at in _chunks(piece.param.numel()):
        weight = _load_weight(piece, at)
        grad = piece.grad.view(-1)[at].float() * constants.grad_scale
        finite = grad.isfinite()
        grad = grad.clamp(-constants.grad_bound, constants.grad_bound)
        tensors = (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master)
        written = [tensor.view(-1)[at] for tensor in tensors if tensor is not None]
        kept = [tensor.clone() for tensor in written]
        nonfinite_count += (~finite).sum()
        if piece.hyper.rule.decoupled:
            weight = weight * constants.decay
        else:
            grad = fma(constants.weight_decay, weight, grad)
        states = [tensor.view(-1)[at] for tensor in (piece.exp_avg, piece.exp_avg_sq) if tensor is not None]
        if piece.scales is None:
            _store_weight(piece, at, piece.hyper.stepped(weight, grad, states, constants))
        else:
            whole = ~torch.nn.functional.pad(~finite, (0, -finite.numel() % BLOCK_NUMEL)).view(-1, BLOCK_NUMEL).any(1)
            finite = whole.repeat_interleave(BLOCK_NUMEL)[: finite.numel()]
            blocks = slice(at.start // BLOCK_NUMEL, at.start // BLOCK_NUMEL + whole.numel())
            scales = [scale.view(-1)[blocks] for scale in piece.scales]
            moments = [decoded(*each, which) for which, each in enumerate(zip(states, scales, strict=True))]
            _store_weight(piece, at, piece.hyper.stepped(weight, grad, moments, constants))
            for which, moment in enumerate(moments):
                codes, made = encoded(moment, which)
                states[which].copy_(codes)
                scales[which].copy_(torch.where(whole, made, scales[which]))
        for tensor, old in zip(written, kept, strict=True):
            torch.where(finite, tensor, old, out=tensor)
    return nonfinite_count


def grad_stats(tensor: Tensor) -> tuple[float, int]:
    """Return (sum of squares of the finite elements in fp64, number of the others), as kernel.inl does."""
    return read_grad_stats([tensor])[0]


def read_grad_stats(tensors: Sequence[Tensor]) -> list[tuple[float, int]]:
    """Return `grad_stats` of each tensor; they are on one device, for which the host waits once."""
    blocks = [block_sums(tensor) for tensor in tensors]
    numbers = iter(torch.cat(blocks).tolist())
    found = []
    for each in blocks:
        nonfinite, total = int(next(numbers)), 0.0
        for block in islice(numbers, each.numel() - 1):
            total += block
        found.append((total, nonfinite))
    return found


def block_sums(tensor: Tensor) -> Tensor:
    """Return the number of non-finite elements, then each block's sum of squares of the others: fp64 [1 + blocks].

    It lies on the tensor's device, and the host does not wait for it.
    """
    nonfinite = torch.zeros((), dtype=torch.int64, device=tensor.device)
    parts = [nonfinite.view(1)]
    for at in _chunks(tensor.numel()):
        values = tensor.view(-1)[at].double()
        finite = values.isfinite()
        nonfinite += (~finite).sum()
        values = torch.where(finite, values, 0.0)
        values = torch.nn.functional.pad(values, (0, -values.numel() % _BLOCK_NUMEL))
        squares = values.view(-1, _BLOCK_NUMEL // _SUM_LANES, _SUM_LANES).square_()
        lanes = torch.zeros(squares.shape[0], _SUM_LANES, dtype=torch.float64, device=squares.device)
        for row in range(squares.shape[1]):
            lanes += squares[:, row]
        while lanes.shape[1] > 1:
            lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
        parts.append(lanes.flatten())
    # A count is exact in fp64.
    return torch.cat([part.double() for part in parts])


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 values into (bf16, rounded to nearest with ties away from zero; int16 remainder), shapes kept. Of a
    NaN the remainder is 0.
    """
    return round_ties_away(values), _one_nan(values).view(torch.int32).to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """Return the fp32 values of which `split` made (bf16, int16), shapes kept."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def round_ties_away(values: Tensor) -> Tensor:
    """Round fp32 to bf16, to nearest with ties away from zero: add half a unit to the bits and cut off the lower 16."""
    return ((_one_nan(values).view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def _one_nan(values: Tensor) -> Tensor:
    """Make any NaN the usual one: a GPU's is 0x7FFFFFFF, of which rounding by bits would make -0."""
    return torch.where(values.isnan(), math.nan, values)


def _load_weight(piece: Piece, at: slice) -> Tensor:
    if piece.remainder is not None:
        return join(piece.param.view(-1)[at], piece.remainder.view(-1)[at])
    return (piece.param if piece.master is None else piece.master).view(-1)[at]


def _store_weight(piece: Piece, at: slice, weight: Tensor) -> None:
    param = piece.param.view(-1)[at]
    if piece.remainder is not None:
        rounded, remainder = split(weight)
        param.copy_(rounded)
        piece.remainder.view(-1)[at].copy_(remainder)
        return
    if piece.master is not None:
        piece.master.view(-1)[at].copy_(weight)
    param.copy_(round_ties_away(weight) if param.dtype == torch.bfloat16 else weight)


def _chunks(numel: int) -> Iterator[slice]:
    # A chunk is a multiple of a block, so that grad_stats sees whole blocks.
    for begin in range(0, numel, _CHUNK_NUMEL):
        yield slice(begin, min(begin + _CHUNK_NUMEL, numel))
