"""`deepspeed.ops.adagrad`."""

from __future__ import annotations

from typing import Any

import torch


class DeepSpeedCPUAdagrad(torch.optim.Adagrad):
    """torch's Adagrad; the engine steps it where its states live."""

    def __init__(
        self, model_params: Any, lr: float = 1e-2, eps: float = 1e-10, weight_decay: float = 0.0, amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
        # torch makes its sums here; an engine makes them in its tiers.
        self.state.clear()
