"""What one optimizer step works on: pieces of flat tensors, their hyper-parameters, and the constants of a step."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of one step. `weight_decay` is decoupled (AdamW) where `adamw`, else added to the gradient."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    adamw: bool
    bias_correction: bool = True


@dataclass(slots=True)
class Piece:
    """Flat contiguous tensors of one device and numel (0 is allowed) that share hyper-parameters; stepped in place.

    remainder: int16, with a bf16 `param`. master: fp32, with an fp16 or bf16 `param`. Neither: `param` is fp32.
    """

    param: Tensor  # [numel] fp32, bf16 or fp16
    grad: Tensor  # [numel] fp32, bf16 or fp16, whatever param is
    exp_avg: Tensor  # [numel] fp32
    exp_avg_sq: Tensor  # [numel] fp32
    remainder: Tensor | None = None  # [numel] int16
    master: Tensor | None = None  # [numel] fp32
    hyper: AdamHyper = field(kw_only=True)


@dataclass(frozen=True, slots=True)
class AdamConstants:
    """What one step multiplies by: computed in fp64, each rounded once to fp32. Order and names as in types.h."""

    grad_scale: float
    weight_decay: float
    decay: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inv_sqrt_bias_correction2: float
    eps: float
    minus_step_size: float

    FLOATS: ClassVar[tuple[str, ...]] = (
        "grad_scale",
        "weight_decay",
        "decay",
        "one_minus_beta1",
        "beta2",
        "one_minus_beta2",
        "inv_sqrt_bias_correction2",
        "eps",
        "minus_step_size",
    )

    @classmethod
    def of(cls, hyper: AdamHyper, *, step: int, grad_scale: float) -> AdamConstants:
        """Constants of optimizer step `step`, counted from 1."""
        correction1 = 1.0 - hyper.beta1**step if hyper.bias_correction else 1.0
        correction2 = 1.0 - hyper.beta2**step if hyper.bias_correction else 1.0
        return cls(
            grad_scale=_fp32(grad_scale),
            weight_decay=_fp32(hyper.weight_decay),
            decay=_fp32(1.0 - hyper.lr * hyper.weight_decay),
            one_minus_beta1=_fp32(1.0 - hyper.beta1),
            beta2=_fp32(hyper.beta2),
            one_minus_beta2=_fp32(1.0 - hyper.beta2),
            inv_sqrt_bias_correction2=_fp32(1.0 / math.sqrt(correction2)),
            eps=_fp32(hyper.eps),
            minus_step_size=_fp32(-(hyper.lr / correction1)),
        )

    def floats(self) -> tuple[float, ...]:
        """The values in the order of FLOATS."""
        return tuple(getattr(self, name) for name in self.FLOATS)


def _fp32(value: float) -> float:
    return ctypes.c_float(value).value
