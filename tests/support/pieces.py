"""Pieces of Adam with awkward values, in any storage, aligned or not, and the comparison of their bits."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from infinity.ops import adam, reference
from infinity.ops.codes import encoded
from infinity.ops.rules import AdagradHyper, AdamHyper, CodedAdamHyper, Hyper, LionHyper, MomentumHyper, Piece, Rule

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
STORAGES = ("plain", "split", "master_half", "master_bfloat")
# Zeros, denormals, halfway cases of bf16 and fp16, values that round to infinity, and non-finite values.
EDGES = [0.0, -0.0, 1e-45, -1e-40, 6e-8, 2.9802322e-8, 1.00390625, -1.01171875, 1.00048828125, 65519.0, 65520.0,
         3.3895314e38, 3.3961775e38, float("inf"), float("-inf"), float("nan")]  # fmt: skip
HYPER = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw=True)
# Every rule, with every way in which it reads its constants.
HYPERS: dict[str, Hyper] = {
    "adamw": HYPER,
    "adam": AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, adamw=False),
    "lion": LionHyper(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.1),
    "adagrad": AdagradHyper(lr=1e-2, lr_decay=0.01, eps=1e-10, weight_decay=0.1),
    "momentum": MomentumHyper(lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=False),
    "plain": CodedAdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, coded=False),
    "coded": CodedAdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1),
    "nesterov": MomentumHyper(lr=1e-2, momentum=0.9, dampening=0.0, weight_decay=0.0, nesterov=True),
}


def same(left: Tensor, right: Tensor) -> bool:
    """Return whether two tensors of one dtype have the same bits; the payload of a NaN does not count."""
    integers = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[left.element_size()]
    equal = left.view(integers) == right.view(integers)
    if left.is_floating_point():
        equal |= left.isnan() & right.isnan()
    return bool(equal.all())


def values(numel: int, generator: torch.Generator, spread: float = 5.0) -> Tensor:
    """fp32 [numel] over many magnitudes, with every edge case somewhere."""
    made = torch.randn(numel, generator=generator) * torch.exp(spread * torch.randn(numel, generator=generator))
    places = torch.randperm(numel, generator=generator)[: len(EDGES)]
    made[places] = torch.tensor(EDGES)[: places.numel()]
    return made


def states(piece: Piece) -> list[Tensor]:
    """Return the tensors that a step changes."""
    tensors = (piece.param, piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master, *(piece.scales or ()))
    return [tensor for tensor in tensors if tensor is not None]


def make_piece(numel: int, storage: str, grad_dtype: torch.dtype, hyper: Hyper = HYPER, shift: int = 0) -> Piece:
    """Return a piece whose tensors start `shift` elements into their memory."""
    generator = torch.Generator().manual_seed(numel)
    weight, grad = values(numel, generator).nan_to_num(1.0), values(numel, generator, 3.0).to(grad_dtype)
    first, second = values(numel, generator).nan_to_num(0.5), values(numel, generator).nan_to_num(0.25).abs()
    # A sum of squares is not negative.
    moments = (first, second) if hyper.rule.two_states else (second if hyper.rule is Rule.ADAGRAD else first,)

    def placed(tensor: Tensor) -> Tensor:
        return torch.cat([tensor.new_zeros(shift), tensor])[shift:]

    scales = None
    if hyper.rule is Rule.CODED_ADAMW:
        # A block of zeros, as at first.
        first[:256] = second[:256] = 0.0
        # The second block is left out, or a first one that is short; no square of a gradient overflows.
        grad[256:] = grad[256:].nan_to_num(1.0, 1.0, 1.0).clamp(-6e4, 6e4)
        grad[300:301] = math.nan
        (first, above), (second, below) = encoded(first.clamp(-1e9, 1e9), 0), encoded(second.clamp(0, 1e9), 1)
        moments, scales = (first, second), (placed(above), placed(below))
    kept = {"hyper": hyper, "scales": scales}
    if storage == "plain":
        return Piece(placed(weight), placed(grad), *map(placed, moments), **kept)
    if storage == "split":
        param, remainder = map(placed, adam.split(weight))
        return Piece(param, placed(grad), *map(placed, moments), remainder=remainder, **kept)
    param = weight.half() if storage == "master_half" else reference.round_ties_away(weight)
    return Piece(placed(param), placed(grad), *map(placed, moments), master=placed(weight), **kept)


def on_device(piece: Piece, device: torch.device, shift: int = 0) -> Piece:
    """Return a copy on a device, `shift` elements into its memory."""

    def placed(tensor: Tensor | tuple[Tensor, ...] | None) -> object:
        if tensor is None:
            return None
        if isinstance(tensor, tuple):
            return tuple(map(placed, tensor))
        whole = torch.zeros(tensor.numel() + shift, dtype=tensor.dtype, device=device)
        whole[shift:].copy_(tensor)
        return whole[shift:]

    return dataclasses.replace(
        piece, **{field.name: placed(getattr(piece, field.name)) for field in dataclasses.fields(piece)[:-1]}
    )


def table_of(pieces: list[Piece], step: int, grad_scale: float, grad_bound: float = math.inf) -> tuple[bytes, int]:
    """Return the array of C structures for one call of the kernels, and its length."""
    tails = {}
    for piece in pieces:
        constants = piece.hyper.constants(step=step, grad_scale=grad_scale)
        constants = dataclasses.replace(constants, grad_bound=grad_bound)
        tails[id(piece.hyper)] = adam._TAIL.pack(piece.hyper.rule, *constants.floats())
    return adam._table(pieces, tails), len(pieces)
