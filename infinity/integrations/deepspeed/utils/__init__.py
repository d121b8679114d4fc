"""`deepspeed.utils`: states of parameters, log lines, modules that are gathered as one."""

from __future__ import annotations

from infinity.integrations.deepspeed.comm import is_initialized
from infinity.integrations.deepspeed.runtime.dataloader import RepeatingLoader
from infinity.integrations.deepspeed.utils import groups
from infinity.integrations.deepspeed.utils.init_on_device import OnDevice
from infinity.integrations.deepspeed.utils.logging import log_dist, logger
from infinity.integrations.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
)
from infinity.zero.leaf_modules import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "OnDevice", "RepeatingLoader", "get_z3_leaf_modules", "groups", "is_initialized", "log_dist", "logger",
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_grad",
    "safe_set_full_optimizer_state", "safe_set_local_fp32_param", "safe_set_local_grad",
    "safe_set_local_optimizer_state", "set_z3_leaf_modules", "unset_z3_leaf_modules", "z3_leaf_module",
]  # fmt: skip
