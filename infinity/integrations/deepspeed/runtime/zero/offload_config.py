"""`deepspeed.runtime.zero.offload_config`: the words of `engine.offload_states`."""

from enum import Enum


class OffloadDeviceEnum(str, Enum):
    """Where states go."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Which states go."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"
