"""`deepspeed.runtime.utils`: what clients use of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch


def set_random_seed(seed: int) -> None:
    """Seed the generators of Python, numpy and torch, on every device."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[Any], bool] = torch.is_tensor
) -> Any:
    """Return lists, tuples and dictionaries with what `criterion_func` accepts moved to a device."""
    if criterion_func(item):
        return item.to(device)
    if isinstance(item, (list, tuple)):
        return type(item)(move_to_device(each, device, criterion_func) for each in item)
    if isinstance(item, dict):
        return type(item)({key: move_to_device(each, device, criterion_func) for key, each in item.items()})
    return item
