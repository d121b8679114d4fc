"""Precision of a pass: what forward computes in, and what backward begins with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from infinity.config.training import TorchAutocast
from infinity.errors import StateError
from infinity.memory.partition import DTYPES


def autocast(section: TorchAutocast, device: torch.device) -> AbstractContextManager[Any]:
    """What `torch_autocast` asks for. torch's cache would keep a 16-bit copy of every weight to the end of forward."""
    if not section.enabled:
        # The program may have an autocast of its own.
        return nullcontext()
    return torch.autocast(device.type, DTYPES[section.dtype], cache_enabled=False)


def scaled(loss: Tensor, factor: float) -> Tensor:
    """The loss times a factor, in fp32 unless that is 1. StateError for anything but one element with a gradient."""
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = (
            f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
            if isinstance(loss, Tensor)
            else repr(loss)
        )
        raise StateError(f"engine.backward needs a loss of one element that requires a gradient, got {got}")
    return loss if factor == 1.0 else loss.float() * factor
