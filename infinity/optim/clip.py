"""Clipping by the global gradient norm, folded into the factor that the optimizer multiplies gradients with."""

from __future__ import annotations

import math


def clip_factor(norm: float, clip_norm: float) -> float:
    """Return the factor that brings gradients of global norm `norm` to at most `clip_norm` (0: no clipping).

    The formula is that of torch.nn.utils.clip_grad_norm_: clip_norm / (norm + 1e-6), at most 1. A norm that is not
    finite clips nothing.
    """
    if clip_norm <= 0.0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, clip_norm / (norm + 1e-6))
