"""`deepspeed.checkpoint.utils`: tensors that are saved without the storage that they are views of."""

from __future__ import annotations

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return lists, tuples and dictionaries of tensors with each tensor copied to `device`; other values unchanged."""
    if torch.is_tensor(item):
        return item.detach().to(device, copy=True)
    if isinstance(item, (list, tuple)):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(each, device) for key, each in item.items()})
    return item
