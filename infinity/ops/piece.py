"""The unit of work of an optimizer step: flat tensors with their hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from infinity.ops.rules import Hyper


@dataclass(slots=True)
class Piece:
    """Contiguous tensors of one device and number of elements (0 is allowed) that are stepped in place.

    A bf16 `param` has a `remainder` or a `master`, an fp16 `param` has a `master`, an fp32 `param` has neither. A rule
    with one state keeps it in `exp_avg` and has no `exp_avg_sq`.
    """

    param: Tensor  # [numel] fp32, bf16 or fp16
    grad: Tensor  # [numel] fp32, bf16 or fp16, independent of param
    exp_avg: Tensor  # [numel] fp32
    exp_avg_sq: Tensor | None = None  # [numel] fp32
    remainder: Tensor | None = None  # [numel] int16
    master: Tensor | None = None  # [numel] fp32
    hyper: Hyper = field(kw_only=True)
