"""`deepspeed.zero`: models that are built into their tiers, and parameters made whole."""

from __future__ import annotations

from torch import nn

from infinity.engine.initialize import GatheredParameters
from infinity.integrations.deepspeed.runtime.zero import offload_config, partition_parameters
from infinity.integrations.deepspeed.runtime.zero.partition_parameters import Init, ZeroParamStatus

__all__ = [
    "GatheredParameters", "Init", "ZeroParamStatus", "offload_config", "partition_parameters",
    "register_external_parameter", "unregister_external_parameter",
]  # fmt: skip


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module than its own uses is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing."""
