"""Clipping by the global gradient norm, folded into the factor that the optimizer multiplies gradients with."""

from __future__ import annotations

import math


def clip_factor(norm: float, clip_norm: float) -> float:
    """What gradients of global norm `norm` are multiplied by so that it is at most `clip_norm`; 0 means no clipping.

    The formula is torch.nn.utils.clip_grad_norm_'s: clip_norm / (norm + 1e-6), at most 1.
    """
    if clip_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
