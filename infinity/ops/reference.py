"""The Python fallbacks, in torch: the same bits as the native code (`infinity.ops.adam`), slowly. Fallback and oracle.

A fused multiply-add rounds once; torch has none. Here the product of two fp32 values is exact in fp64, the sum with a
third is rounded to odd (TwoSum gives the error, the last bit takes it up), and what is rounded to odd in fp64 rounds
to fp32 as the exact value would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from infinity.ops.piece import Piece
from infinity.ops.rules import Rule, StepConstants

# Bounds the temporaries: an fp64 or two and some masks per element of a chunk.
_CHUNK_NUMEL = 1 << 18
_BLOCK_NUMEL = 4096
_SUM_LANES = 16


def adam_step(piece: Piece, constants: StepConstants) -> int:
    """Step a checked piece in place: `csrc/adam/arithmetic.inl`, step_lanes, in torch.

    Elements whose scaled gradient is not finite keep every bit of their state; returns how many those are.
    """
    nonfinite_count = 0
    for at in _chunks(piece.param.numel()):
        weight = _load_weight(piece, at)
        grad = piece.grad.view(-1)[at].float() * constants.grad_scale
        finite = grad.isfinite()
        grad = grad.clamp(-constants.grad_bound, constants.grad_bound)
        (left_out,) = (~finite).nonzero(as_tuple=True)
        kept = [state[at][left_out] for state in _states(piece)]
        if piece.hyper.rule in (Rule.ADAMW, Rule.LION):
            weight = weight * constants.decay
        else:
            grad = fma(constants.weight_decay, weight, grad)
        _store_weight(piece, at, _stepped(piece, at, weight, grad, constants))
        for state, old in zip(_states(piece), kept, strict=True):
            state[at][left_out] = old
        nonfinite_count += left_out.numel()
    return nonfinite_count


def _stepped(piece: Piece, at: slice, weight: Tensor, grad: Tensor, constants: StepConstants) -> Tensor:
    """The weight after the step; moves the states."""
    if not piece.hyper.rule.two_states:
        return fma(constants.minus_step_size, _update(piece, at, grad, constants), weight)
    assert piece.exp_avg_sq is not None
    state, squares = piece.exp_avg.view(-1)[at], piece.exp_avg_sq.view(-1)[at]
    from_grad = math.copysign(1.0, constants.one_minus_beta1) < 0
    state.copy_(fma(constants.one_minus_beta1, grad - state, grad if from_grad else state))
    squares.copy_(fma(grad * constants.one_minus_beta2, grad, squares * constants.beta2))
    # As a tensor: by a number, an accelerator multiplies with its reciprocal.
    denominator = _root(squares) / squares.new_tensor(constants.sqrt_bias_correction2) + constants.eps
    return weight + (state * constants.minus_step_size) / denominator


def _update(piece: Piece, at: slice, grad: Tensor, constants: StepConstants) -> Tensor:
    """What the step size is multiplied with, of the rules with one state; moves it."""
    rule, state = piece.hyper.rule, piece.exp_avg.view(-1)[at]
    if rule is Rule.LION:
        update = fma(constants.one_minus_beta1, grad - state, state).sign()
        state.copy_(fma(constants.one_minus_beta2, grad - state, state))
        return update
    if rule is Rule.ADAGRAD:
        state.copy_(fma(grad, grad, state))
        return grad / (_root(state) + constants.eps)
    state.copy_(fma(constants.beta2, state, grad * constants.one_minus_beta1))
    return fma(constants.sqrt_bias_correction2, state, grad * constants.decay)


def _root(squares: Tensor) -> Tensor:
    # Through fp64: torch's fp32 root may be one bit off. An fp32 root is never as close to a rounding boundary as an
    # fp64 root can err.
    return squares.double().sqrt().float()


def grad_stats(tensor: Tensor) -> tuple[float, int]:
    """(sum of squares of the finite elements in fp64, count of the others): kernel.inl, sum_block, in torch."""
    total, nonfinite = 0.0, 0
    for at in _chunks(tensor.numel()):
        values = tensor.view(-1)[at].double()
        finite = values.isfinite()
        nonfinite += int(finite.numel() - finite.sum())
        values = torch.where(finite, values, 0.0)
        values = torch.nn.functional.pad(values, (0, -values.numel() % _BLOCK_NUMEL))
        squares = values.view(-1, _BLOCK_NUMEL // _SUM_LANES, _SUM_LANES).square_()
        lanes = torch.zeros(squares.shape[0], _SUM_LANES, dtype=torch.float64, device=squares.device)
        for row in range(squares.shape[1]):
            lanes += squares[:, row]
        while lanes.shape[1] > 1:
            lanes = lanes[:, : lanes.shape[1] // 2] + lanes[:, lanes.shape[1] // 2 :]
        for block in lanes.flatten().tolist():
            total += block
    return total, nonfinite


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 -> (bf16 nearest with ties away from zero, int16 remainder), shapes kept."""
    return round_ties_away(values), values.view(torch.int32).to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    """(bf16, int16) of `split` -> fp32, shapes kept."""
    return ((param.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


def round_ties_away(values: Tensor) -> Tensor:
    """fp32 -> bf16, nearest with ties away from zero: half a unit is added to the bits, the lower 16 are cut off."""
    return ((values.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def fma(a: Tensor | float, b: Tensor | float, c: Tensor) -> Tensor:
    """a * b + c rounded once to fp32. Floats must be fp32 values."""
    first, second = (torch.as_tensor(factor, dtype=torch.float64, device=c.device) for factor in (a, b))
    product, addend = first * second, c.double()
    total = product + addend
    # TwoSum: total + error is the exact sum.
    back = total - product
    error = (product - (total - back)) + (addend - back)
    bits = total.view(torch.int64)
    toward = torch.where((error > 0) == (total > 0), 1, -1)
    inexact_even = (error != 0) & error.isfinite() & (bits & 1 == 0)
    return torch.where(inexact_even, bits + toward, bits).view(torch.float64).float()


def _states(piece: Piece) -> list[Tensor]:
    """All that a step writes, flat."""
    tensors = (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master)
    return [tensor.view(-1) for tensor in tensors if tensor is not None]


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
    # A multiple of a block, so that grad_stats sees whole blocks.
    for begin in range(0, numel, _CHUNK_NUMEL):
        yield slice(begin, min(begin + _CHUNK_NUMEL, numel))
