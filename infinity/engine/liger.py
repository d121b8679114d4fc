"""Liger-Kernel's fused layers in the transformers models that it knows: the section `kernels` of the configuration.

Liger-Kernel (the extra `liger`) holds Triton kernels for RMSNorm, layer norm, rotary embeddings, SwiGLU, GeGLU, and
cross-entropy that never has all logits. It replaces the `forward` of modules of the model, and, for as long as the
process lives, names in the modules of transformers that define the model: later models of that family use it too.
Modules and parameters stay as they are, and so do units, partitions and checkpoints.

[Note: when Liger-Kernel is applied] After the plan has been checked, because a plan that does not fit must leave the
model as it was, and because activations are measured on tensors without values, which Triton does not take; so the
plan reserves what the plain layers take. Before hooks stand, which look at each module's `forward`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from infinity.errors import ConfigError
from infinity.plan.layout import UnitLayout

# Its table of model types, and its function for one model, which transformers' Trainer calls too.
_TABLE = "MODEL_TYPE_TO_APPLY_LIGER_FN"
_APPLY = "_apply_liger_kernel_to_instance"


def apply_liger(
    wish: bool | Literal["auto"], model: nn.Module, device: torch.device, layouts: Iterable[UnitLayout], *,
    tensor: int = 1,
) -> list[str]:  # fmt: skip
    """Let Liger-Kernel replace layers of `model`; return lines for the log.

    Arguments:
        wish: kernels.liger, resolved.
        device: where the model is trained.
        layouts: the units of the plan. Weights in tiles exclude the loss without logits, which uses the head's as a
            whole.
        tensor: ranks along the tensor axis. Several have forwards of their own in the layers, which excludes all.

    Raises:
        ConfigError: `wish` is True and Liger-Kernel cannot be used, or Liger-Kernel fails.
    """
    if wish is False:
        return []
    found: list[Any] = []
    reason = _missing(device)
    if tensor > 1:
        reason = f"parallel.tensor is {tensor}, and it replaces whole layers only: set parallel.tensor to 1"
    if reason is None:
        found = list(_known(model))
        reason = _unfit(model, found)
    if reason is not None:
        if wish is True:
            raise ConfigError(f'kernels.liger is true, but {reason}, or set it to "auto" or false')
        return [f'kernels.liger is "auto" and has no effect: {reason}']
    tiled = any(layout.is_tile for layout in layouts)
    for part in found:
        _apply(part, tiled=tiled)
    kinds = ", ".join(sorted({f"{type(part).__name__} ({part.config.model_type})" for part in found}))
    return [f"Liger-Kernel {_version()} computes layers of {kinds}"]


def _missing(device: torch.device) -> str | None:
    """Return what the machine lacks and how to get it, or None."""
    if device.type != "cuda":
        return f"the model is trained on {device.type}, and Liger-Kernel needs a CUDA device: train on one"
    missing = [
        name for name, module in (("liger-kernel", "liger_kernel"), ("triton", "triton")) if not _is_there(module)
    ]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        return f"{' and '.join(missing)} {verb} not installed: run `pip install 'infinity-engine[liger]'`"
    return None


def _is_there(module: str) -> bool:
    return find_spec(module) is not None


def _known(model: nn.Module) -> Iterator[Any]:
    """Yield the outermost models of transformers in `model` that Liger-Kernel knows: behind wrappers and adapters."""
    transformers = sys.modules.get("transformers")
    if transformers is None:
        return
    table = getattr(importlib.import_module("liger_kernel.transformers.monkey_patch"), _TABLE)
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not isinstance(module, transformers.PreTrainedModel):
            continue
        if getattr(module.config, "model_type", None) in table:
            inside.update(map(id, module.modules()))
            yield module


def _unfit(model: nn.Module, found: list[Any]) -> str | None:
    """Return why Liger-Kernel cannot replace layers of the models that it knows, or None."""
    if not found:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        words = f"{type(model).__name__} ({kind})" if kind else type(model).__name__
        return f"Liger-Kernel {_version()} has no layers for {words}: train a model of transformers that it knows"
    for part in found:
        for name, module in part.named_modules():
            if "forward" not in vars(module):
                continue
            if str(getattr(module.forward, "__module__", "")).partition(".")[0] != "liger_kernel":
                return (
                    f"the forward of {name or type(part).__name__} has been replaced, as by infinity.tile_sequence, "
                    "and Liger-Kernel would replace it again: leave it as the class defines it"
                )
    return None


def _apply(model: Any, *, tiled: bool) -> None:
    """Replace the layers of one model."""
    # The loss replaces the whole forward, by that of a model with a head. Its other form would replace torch's
    # cross_entropy for the whole process.
    losses = {"fused_linear_cross_entropy": hasattr(model, "lm_head") and not tiled, "cross_entropy": False}
    try:
        getattr(importlib.import_module("liger_kernel.transformers"), _APPLY)(model=model, **losses)
    # It reads attributes of transformers' modules, which other versions name otherwise.
    except Exception as error:
        raise ConfigError(
            f"Liger-Kernel {_version()} cannot replace layers of {type(model).__name__} of transformers "
            f"{metadata.version('transformers')}: {error!r}. Set kernels.liger to false, or install versions that fit"
        ) from error


def _version() -> str:
    try:
        return metadata.version("liger-kernel")
    except metadata.PackageNotFoundError:
        return "(unknown version)"
