"""What one optimizer step works on: pieces of flat tensors with their hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from infinity.ops.rules import Hyper


@dataclass(slots=True)
class Piece:
    """Flat contiguous tensors of one device and numel (0 is allowed) that share hyper-parameters; stepped in place.

    remainder: int16, with a bf16 `param`. master: fp32, with an fp16 or bf16 `param`. Neither: `param` is fp32.
    A rule of one state has it in `exp_avg`, and no `exp_avg_sq`.
    """

    param: Tensor  # [numel] fp32, bf16 or fp16
    grad: Tensor  # [numel] fp32, bf16 or fp16, whatever param is
    exp_avg: Tensor  # [numel] fp32
    exp_avg_sq: Tensor | None = None  # [numel] fp32
    remainder: Tensor | None = None  # [numel] int16
    master: Tensor | None = None  # [numel] fp32
    hyper: Hyper = field(kw_only=True)
