"""`deepspeed.ops.adam`: torch's Adam and AdamW under DeepSpeed's names and defaults."""

from __future__ import annotations

from typing import Any

import torch

from infinity.errors import ConfigError

__all__ = ["DeepSpeedCPUAdam", "FusedAdam"]


class DeepSpeedCPUAdam(torch.optim.Adam):
    """Adam, or AdamW if `adamw_mode`; an engine steps it natively where its states live.

    It keeps the dictionaries of the groups that it is given, so a scheduler that was made for another optimizer over
    the same groups stays alive.
    """

    def __init__(
        self, model_params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0,
        amsgrad: bool = False, adamw_mode: bool = True, fp32_optimizer_states: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, bias_correction=bias_correction, fp32_optimizer_states=fp32_optimizer_states)
        super().__init__(
            model_params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )  # fmt: skip


class FusedAdam(torch.optim.Adam):
    """Adam, or AdamW if `adam_w_mode`: which device steps is the configuration's decision, not the class's."""

    def __init__(
        self, params: Any, lr: float = 1e-3, bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, adam_w_mode: bool = True,
        weight_decay: float = 0.0, amsgrad: bool = False, set_grad_none: bool = True,
    ) -> None:  # fmt: skip
        _check(type(self).__name__, bias_correction=bias_correction)
        super().__init__(
            params, lr=lr, betas=(betas[0], betas[1]), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )  # fmt: skip


def _check(name: str, *, bias_correction: bool, fp32_optimizer_states: bool = True) -> None:
    if not bias_correction:
        raise ConfigError(
            f"{name}(bias_correction=False): set optimizer.params.bias_correction in the configuration instead, and "
            "make no optimizer in the program"
        )
    if not fp32_optimizer_states:
        raise ConfigError(f"{name}(fp32_optimizer_states=False): moments are fp32 here; leave it out")
