"""`deepspeed.runtime.zero.partition_parameters`: what clients reach into it for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from infinity.engine import model_init
from infinity.engine.launch import init_distributed
from infinity.integrations.deepspeed.accelerator import get_accelerator
from infinity.integrations.deepspeed.as_module import conventions
from infinity.zero.parameter import ZeroParamStatus

__all__ = ["Init", "ZeroParamStatus", "get_accelerator", "zero_wrapper_for_fp_tensor_constructor"]

_orig_torch_arange = torch.arange


class Init(model_init.Init):
    """`with deepspeed.zero.Init(config_dict_or_path=...):`, read with DeepSpeed's conventions.

    It opens the process group: transformers asks torch for its rank while it loads, on one rank too.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init_distributed()
        super().__init__(*args, conventions=conventions(), **kwargs)


def zero_wrapper_for_fp_tensor_constructor(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the constructor as it is: no constructor of a tensor changes its dtype inside `Init` here."""
    return fn
