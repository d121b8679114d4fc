"""Precision of a pass: the dtype that forward computes in, and the scaled loss that backward begins with."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from infinity.config.training import TorchAutocast
from infinity.errors import StateError
from infinity.memory.partition import DTYPES


def autocast(section: TorchAutocast, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context that `torch_autocast` asks for, without torch's cache: it would keep a 16-bit copy of every
    weight until the end of forward.
    """
    if not section.enabled:
        # The program may have opened an autocast itself.
        return nullcontext()
    return torch.autocast(device.type, DTYPES[section.dtype], cache_enabled=False)


def half(values: Any) -> Any:
    """Return `values`, a tensor or lists, tuples and dictionaries of them, with floating-point tensors cast to fp16."""
    if isinstance(values, Tensor):
        return values.half() if values.is_floating_point() else values
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*map(half, values))
    if isinstance(values, (list, tuple)):
        return type(values)(map(half, values))
    if isinstance(values, dict):
        return {key: half(value) for key, value in values.items()}
    return values


def widen_batch_norms(model: nn.Module) -> None:
    """Let batch norms take their weights in the dtype of their running statistics, which torch demands of them.

    Buffers keep their dtype, and statistics that move by a tenth of a difference need more than 16 bits. Values in and
    out stay narrow.
    """
    for module in model.modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and "forward" not in vars(module):
            module.__dict__["forward"] = partial(_widened, module)


def _widened(module: Any, *args: Any, **kwargs: Any) -> Any:
    params, dtype = module._parameters, module.running_mean.dtype
    module._parameters = {name: None if each is None else each.to(dtype) for name, each in params.items()}
    try:
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters = params


def scaled(loss: Tensor, factor: float) -> Tensor:
    """Return the loss times a factor, in fp32 unless that is 1. StateError for anything but one element that requires a
    gradient.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise StateError(
            f"engine.backward needs a loss of one element that requires a gradient, got {_not_a_loss(loss)}"
        )
    return loss if factor == 1.0 else loss.float() * factor


def _not_a_loss(given: Any) -> str:
    """Describe what the program passes instead of a loss, without its values, and say what to pass."""
    kind = type(given).__name__
    if isinstance(given, Tensor):
        shape = f"a tensor of shape {tuple(given.shape)}"
        if given.numel() != 1:
            return f"{shape}: reduce it, as with .mean()"
        return f"{shape} without a gradient: compute it with gradients on, and do not detach it"
    if isinstance(given, (int, float)):
        return f"{kind}: pass the tensor itself, not its .item()"
    if isinstance(given, Mapping) and "loss" in given and not hasattr(given, "loss"):
        return f'{kind}: pass its ["loss"]'
    if hasattr(given, "loss"):
        none = given.loss is None
        return f"{kind}: " + ("its .loss is None, so call the model with labels" if none else "pass .loss")
    if isinstance(given, (tuple, list)):
        return f"{kind} of {len(given)}: pass the loss alone"
    return f"{kind}: pass the loss"
