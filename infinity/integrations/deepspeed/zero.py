"""`deepspeed.zero`: models that are built into their tiers, whole parameters, and the memory that a model takes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import Enum, IntEnum
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from estimators.estimate import estimate
from infinity.engine import model_init
from infinity.engine.launch import init_distributed
from infinity.integrations.deepspeed.entry import conventions

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


def is_zero_param(parameter: Any) -> bool:
    """Return whether a tensor is a parameter that stage 3 has partitioned, or is about to."""
    return "_infinity_access" in getattr(parameter, "__dict__", {}) and hasattr(parameter, "ds_id")


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing: a parameter that another module than its own uses is gathered when it is used."""


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Do nothing."""


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


class ZeroStageEnum(IntEnum):
    """The stages."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


# DeepSpeed patches the linear function to save memory; here torch's own serves, on gathered weights and in tiles.


class LinearModuleForZeroStage3(nn.Linear):
    """torch's linear layer."""


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch's linear function of the three."""
    return functional.linear(input, weight, bias)


class LinearFunctionForZeroStage3:
    """`apply` is torch's linear function."""

    apply = staticmethod(zero3_linear_wrap)


# What a plan of this engine takes, under the names of DeepSpeed's estimates.

_GB = 2.0**30


class _Sized(nn.Module):
    """A parameter of so many elements, without values."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(numel, device="meta"))


def _of_sizes(total: int, largest: int) -> nn.Module:
    """Return a model of so many parameters in layers of at most so many, without values."""
    largest = max(1, min(largest, total))
    return nn.Sequential(*(_Sized(min(largest, total - start)) for start in range(0, max(total, 1), largest)))


def _needs(
    model: nn.Module, stage: int, per_node: int, nodes: int, *, optimizer: bool, params: bool
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes on a node's CPUs and on each accelerator of one placement, without activations."""
    zero: dict[str, Any] = {"stage": stage}
    if optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    if params:
        zero["offload_param"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"},
        "zero_optimization": zero,
    }  # fmt: skip
    plan = estimate(model, config, ranks=per_node * nodes, ranks_per_node=per_node).plan
    held = {memory: sum(kinds.values()) for memory, kinds in plan.bytes_by_memory().items()}
    return held.get("cpu", 0) * per_node, held.get("gpu", 0)


def _rows(model: nn.Module, stage: int, per_node: int, nodes: int) -> Iterator[str]:
    for optimizer, params in product((True, False), (True, False) if stage == 3 else (False,)):
        if params and not optimizer:
            continue
        cpu, gpu = _needs(model, stage, per_node, nodes, optimizer=optimizer, params=params)
        words = f"offload_optimizer={'cpu' if optimizer else 'none'}"
        words += f", offload_param={'cpu' if params else 'none'}" if stage == 3 else ""
        yield f"  {cpu / _GB:8.2f}GB | {gpu / _GB:6.2f}GB | {words}\n"


def _say(model: nn.Module, stage: int, per_node: int, nodes: int) -> None:
    total = sum(param.numel() for param in model.parameters())
    sys.stdout.write(
        f"Memory of params, optim states and gradients by infinity's plan for {nodes} node(s), {per_node} GPU(s) a "
        f"node, {total / 1e6:.0f}M params in bf16, stage {stage}, without activations:\n"
        "  per CPU    |  per GPU | options\n"
    )
    sys.stdout.writelines(_rows(model, stage, per_node, nodes))


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model takes at stage 3, by placement, as infinity plans it. `infinity estimate` says more.

    additional_buffer_factor: not needed, because the plan has the buffers.
    """
    _say(model, 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:  # fmt: skip
    """Print the same for a model of these sizes."""
    _say(_of_sizes(int(total_params), int(largest_layer_params)), 3, num_gpus_per_node, num_nodes)


def estimate_zero3_model_states_mem_needs(
    total_params: int, largest_layer_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1,
    cpu_offload: bool = True, cpu_offload_params: bool = True, zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:  # fmt: skip
    """Return the bytes on a node's CPUs, on each accelerator, and of the largest layer in bf16."""
    model = _of_sizes(int(total_params), int(largest_layer_params))
    cpu, gpu = _needs(
        model, 3, num_gpus_per_node, num_nodes, optimizer=cpu_offload, params=cpu_offload and cpu_offload_params
    )
    return cpu, gpu, 2 * int(largest_layer_params)


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print what a model takes at stage 2, by placement, as infinity plans it."""
    _say(model, 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print the same for a model of this size."""
    _say(_of_sizes(int(total_params), int(total_params) // 32), 2, num_gpus_per_node, num_nodes)


def estimate_zero2_model_states_mem_needs(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:  # fmt: skip
    """Return the bytes on a node's CPUs and on each accelerator."""
    model = _of_sizes(int(total_params), int(total_params) // 32)
    return _needs(model, 2, num_gpus_per_node, num_nodes, optimizer=cpu_offload, params=False)
