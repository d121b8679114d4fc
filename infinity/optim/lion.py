"""Lion as a torch optimizer: for a program that makes its own. An engine steps it natively, on any tier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class LionOptimizer(torch.optim.Optimizer):
    """The sign of an interpolated momentum, with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675)."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take one step without an engine."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                average = state.setdefault("exp_avg", torch.zeros_like(param))
                direction = average.lerp(param.grad, 1 - first).sign_()
                param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction, alpha=group["lr"])
                average.lerp_(param.grad, 1 - second)
        return loss
