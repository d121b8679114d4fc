"""The table of DeepSpeed's dotted names: what infinity has of each module, and why it has nothing of the others.

`MODULES` has the names of each module below `deepspeed` ("" is the package itself): an object of infinity's, or a
`Refusal`, whose name can be imported and whose use is an error with the reason. `NO_MODULES` has modules of which every
name is refused, with all that lies below them. docs/coming_from_deepspeed.md is made from both.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

from infinity.base import VERSION as INFINITY_VERSION
from infinity.engine.engine import Engine
from infinity.engine.initialize import GatheredParameters
from infinity.engine.launch import add_config_arguments
from infinity.engine.optimizer import TieredOptimizer
from infinity.errors import ConfigError
from infinity.integrations import zero_to_fp32
from infinity.integrations.deepspeed import (
    accelerator,
    comm,
    configs,
    entry,
    groups,
    launcher,
    monitor,
    optimizers,
    schedules,
    sparse_attention,
    tensor_fragment,
    timers,
    topology,
    ulysses,
    utils,
    zero,
)
from infinity.integrations.deepspeed.refusals import Refusal, reason_of
from infinity.log import logger
from infinity.parallel.layers import LayerSpec, PipelineModule, TiedLayerSpec
from infinity.zero import parameter
from infinity.zero.parameter import ZeroParamStatus

# The release whose names these are: clients compare it.
VERSION = "0.19.8"

Names = dict[str, Any]


def _of(place: Any, *names: str) -> Names:
    """Return these names of a module."""
    return {name: getattr(place, name) for name in names}


def _no(why: str, *names: str) -> Names:
    """Return these names refused."""
    return dict.fromkeys(names, Refusal(why))


def _defined(place: Any) -> Names:
    """Return the names that a module defines."""
    return {name: value for name, value in vars(place).items() if getattr(value, "__module__", "") == place.__name__}


class _OfLayers(type):
    """The type of a class whose instances are engines of one kind of model."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Engine) and isinstance(instance.module, PipelineModule)


class PipelineEngine(Engine, metaclass=_OfLayers):
    """For `isinstance`: an engine whose model is a `PipelineModule`. There is one class of engines here."""


_INTERNAL = (
    "it is a part of DeepSpeed's own engine, and infinity's works otherwise. Use the engine that initialize() returns, "
    "its optimizer, and infinity.state(parameter)"
)
_OPTIMIZER = (
    "the optimizer of an engine is one class here, DeepSpeedOptimizer, at every stage. Use the one that initialize() "
    "returns"
)
_NO_INFERENCE = (
    "there is no inference engine here. An engine without optimizer runs and generates with weights on any tier: "
    "deepspeed.initialize(model=model, config=...)"
)
_SEQUENCE = (
    "set sequence_parallel_size in the configuration and iterate over engine.sequence_batches(loader); attention of a "
    "program's own calls infinity.sequence_attention"
)
_TILED = "call infinity.tile_sequence(model, ...): docs/tiling.md"
_NO_LINEAR = "layers with adapters are peft's: peft.get_peft_model(model, LoraConfig(...)), then initialize()"
_NO_TILES = "a weight that is too large to gather is executed in tiles: set zero_optimization.tile_parameters"
_EVERY_LOADS = f"{reason_of('checkpoint.load_universal')}. Leave the conversion out, and call load_checkpoint()"
_MONITORS = "the monitors are the sections tensorboard, csv_monitor and wandb: see DeepSpeedConfig(...).monitor_config"
_NO_DRAWS = "the engine seeds what divided layers draw, and recomputation restores random numbers. Leave the call out"
_NO_BERT = (
    "models are not rewritten: set the section sparse_attention, which reaches attention of transformers' models and "
    "takes any length"
)
_OWN_BLOCKS = "products over blocks are infinity's own: call SparseSelfAttention, or infinity.sparse_attention"
_OWN_KERNELS = "the optimizer's kernels are infinity's own, behind DeepSpeedCPUAdam and FusedAdam of ops.adam"

_OPTIMIZERS = _of(optimizers, "DeepSpeedCPUAdam", "FusedAdam")
_PIPE = {"LayerSpec": LayerSpec, "PipelineModule": PipelineModule, "TiedLayerSpec": TiedLayerSpec}
_LEAVES = _of(
    parameter, "get_z3_leaf_modules", "set_z3_leaf_modules", "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix", "unset_z3_leaf_modules", "z3_leaf_module",
)  # fmt: skip
_FRAGMENTS = _defined(tensor_fragment)
_LAYOUTS = _defined(sparse_attention)
_LOGGING = {"logger": logger, **_of(utils, "log_dist", "print_json_dist", "set_log_level_from_string")}
_PARTITIONS = {
    **_of(zero, "Init", "is_zero_param", "register_external_parameter", "unregister_external_parameter"),
    "GatheredParameters": GatheredParameters, "ZeroParamStatus": ZeroParamStatus,
}  # fmt: skip
_ZERO_CONFIGS = {
    **_of(configs, "DeepSpeedZeroConfig", "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"),
    "ZeroStageEnum": zero.ZeroStageEnum, "ZERO_OPTIMIZATION": "zero_optimization",
}  # fmt: skip
_RECOMPUTATION = {
    **_of(utils, "checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"),
    **_no(_NO_DRAWS, "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed", "model_parallel_reconfigure_tp_seed"),
}  # fmt: skip

MODULES: dict[str, Names] = {
    "": {
        "__version__": VERSION, "__infinity__": INFINITY_VERSION, "version": VERSION, "__git_hash__": None,
        "__git_branch__": None, "__version_major__": 0, "__version_minor__": 19, "__version_patch__": 8,
        "DeepSpeedEngine": Engine, "PipelineEngine": PipelineEngine, "PipelineModule": PipelineModule,
        "DeepSpeedOptimizer": TieredOptimizer, "ZeROOptimizer": TieredOptimizer, "DeepSpeedConfigError": ConfigError,
        "add_config_arguments": add_config_arguments, "DeepSpeedConfig": configs.DeepSpeedConfig,
        "get_accelerator": accelerator.get_accelerator, "logger": logger, "init_distributed": comm.init_distributed,
        **_of(entry, "init_inference", "initialize", "tp_model_init"), **_of(utils, "OnDevice", "log_dist"),
        **_no(_NO_INFERENCE, "DeepSpeedInferenceConfig", "InferenceEngine", "default_inference_config",
              "replace_transformer_layer", "revert_transformer_layer"),
        **_no(optimizers.NO_KERNEL, "DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"),
        **_no(reason_of("hybrid_engine"), "DeepSpeedHybridEngine"),
        **_no("schedules are in the configuration's section scheduler", "add_tuning_arguments"),
        **_no(_OPTIMIZER, "set_optimizer_flags"),
    },
    "accelerator": {
        **_of(accelerator, "get_accelerator", "is_current_accelerator_supported"),
        "DeepSpeedAccelerator": accelerator.Accelerator,
        **_no("an engine computes on the device that torch finds: docs/devices.md", "set_accelerator",
              "CPU_Accelerator", "CUDA_Accelerator"),
    },
    "checkpoint": {
        "UNIVERSAL_CHECKPOINT_INFO": "universal_checkpoint_info",
        **_no(_EVERY_LOADS, "DeepSpeedCheckpoint", "ZeROCheckpoint", "get_model_3d_descriptor", "model_3d_desc"),
    },
    "checkpoint.utils": _of(utils, "clone_tensors_for_torch_save"),
    "comm": _defined(comm),
    "env_report": _no("run `infinity doctor`", "cli_main", "main"),
    "git_version_info": {
        "version": VERSION, "git_hash": None, "git_branch": None,
        "installed_ops": optimizers.COMPATIBLE_OPS, "compatible_ops": optimizers.COMPATIBLE_OPS,
        "torch_info": {
            "version": ".".join(map(str, utils.TorchVersion.of(torch.__version__))),
            "cuda_version": torch.version.cuda or "0.0", "hip_version": torch.version.hip or "0.0",
            "nccl_version": "0.0", "bf16_support": True,
        },
    },
    "launcher": {},
    "launcher.runner": {
        **_of(launcher, "DEEPSPEED_ENVIRONMENT_NAME", "DLTS_HOSTFILE", "fetch_hostfile", "main",
              "parse_inclusion_exclusion", "parse_resource_filter"),
        **_no("`infinity run` reads machines and devices itself", "parse_args"),
        **_no("ssh passes no variables of this machine's: set them on each machine, or start each by itself with "
              "`infinity run --no_ssh`", "EXPORT_ENVS"),
    },
    "monitor": {},
    "monitor.csv_monitor": _of(monitor, "csvMonitor"),
    "monitor.monitor": _defined(monitor),
    "monitor.tensorboard": _of(monitor, "TensorBoardMonitor"),
    "monitor.wandb": _of(monitor, "WandbMonitor"),
    "ops": {"__compatible_ops__": optimizers.COMPATIBLE_OPS},
    "ops.adam": _OPTIMIZERS,
    "ops.adam.cpu_adam": _of(optimizers, "DeepSpeedCPUAdam"),
    "ops.adam.fused_adam": _of(optimizers, "FusedAdam"),
    "ops.adagrad": _of(optimizers, "DeepSpeedCPUAdagrad"),
    "ops.lion": _of(optimizers, "DeepSpeedCPULion", "FusedLion"),
    "ops.lamb": _no("Lamb is not elementwise. Set AdamW, or pass any elementwise optimizer", "FusedLamb"),
    "ops.op_builder": {**optimizers.BUILDERS, "OpBuilder": optimizers.OpBuilder},
    "ops.op_builder.all_ops": {"ALL_OPS": {builder.NAME: builder() for builder in optimizers.BUILDERS.values()}},
    "ops.sparse_attention": {**_LAYOUTS, **_no(_NO_BERT, "BertSparseSelfAttention", "SparseAttentionUtils")},
    "ops.sparse_attention.sparsity_config": _LAYOUTS,
    "ops.sparse_attention.sparse_self_attention": {
        name: _LAYOUTS[name] for name in ("SparseSelfAttention", "SparsityConfig")
    },
    "ops.sparse_attention.bert_sparse_self_attention": _no(_NO_BERT, "BertSparseSelfAttention"),
    "ops.sparse_attention.sparse_attention_utils": _no(_NO_BERT, "SparseAttentionUtils"),
    "ops.aio": {"AsyncIOBuilder": optimizers.BUILDERS["AsyncIOBuilder"]},
    "pipe": _PIPE,
    "runtime": {"DeepSpeedOptimizer": TieredOptimizer, "ZeROOptimizer": TieredOptimizer},
    "runtime.activation_checkpointing": {},
    "runtime.activation_checkpointing.checkpointing": _RECOMPUTATION,
    "runtime.base_optimizer": {"DeepSpeedOptimizer": TieredOptimizer, "ZeROOptimizer": TieredOptimizer},
    "runtime.config": {"DeepSpeedConfig": configs.DeepSpeedConfig, "DeepSpeedConfigError": ConfigError},
    "runtime.dataloader": {
        "RepeatingLoader": utils.RepeatingLoader,
        **_no("initialize(training_data=...) returns the loader", "DeepSpeedDataLoader"),
    },
    "runtime.engine": {"DeepSpeedEngine": Engine, **_no(_INTERNAL, "_checkpoint_parallel_metadata")},
    "runtime.lr_schedules": {
        **schedules.CONSTANTS,
        **_of(schedules, *schedules.VALID_LR_SCHEDULES, "VALID_LR_SCHEDULES"),
    },
    "runtime.pipe": {**_PIPE, "ProcessTopology": topology.ProcessTopology},
    "runtime.pipe.engine": {"DeepSpeedEngine": Engine, "PipelineEngine": PipelineEngine},
    "runtime.pipe.module": _PIPE,
    "runtime.pipe.topology": _of(
        topology, "PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"
    ),
    "runtime.sequence_parallel.parallel_state_sp": {
        name: getattr(ulysses.mpu, name)
        for name in ("get_sequence_parallel_group", "get_sequence_parallel_rank", "get_sequence_parallel_world_size",
                     "initialize_sequence_parallel")
    },
    "runtime.sequence_parallel.ulysses_sp": {
        **_of(ulysses, "UlyssesSPAttentionHF", "UlyssesSPDataLoaderAdapter"),
        **_no(_TILED, "SequenceTiledCompute", "TiledFusedLogitsLoss", "TiledMLP", "sequence_tiled_compute"),
        **_no(_SEQUENCE, "UlyssesSPAttention"),
    },
    "runtime.precision_config": {"DeepSpeedFP16Config": configs.Fp16, "DeepSpeedBF16Config": configs.Bf16},
    "runtime.utils": {
        **_of(utils, "call_to_str", "ensure_directory_exists", "move_to_device", "partition_balanced",
              "partition_uniform", "see_memory_usage", "set_random_seed"),
        **_no("set gradient_clipping, and read engine.get_global_grad_norm() after step()", "clip_grad_norm_",
              "get_global_norm", "get_grad_norm", "get_weight_norm", "CheckOverflow"),
        **_no("PipelineModule(partition_method=...) cuts a model in layers", "PartitionedTensor", "prefix_sum_inc"),
        **_no(_INTERNAL, "count_used_parameters_in_backward"),
    },
    "runtime.zero": {
        **_PARTITIONS,
        **_no(_NO_TILES, "TiledLinear", "TiledLinearReturnBias"),
        **_no(reason_of("zero_optimization.mics_shard_size"), "MiCS_Init", "MiCS_Optimizer"),
    },
    "runtime.zero.config": _ZERO_CONFIGS,
    "runtime.zero.linear": _of(
        zero, "LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"
    ),
    "runtime.zero.offload_config": {
        **_of(zero, "OffloadDeviceEnum", "OffloadStateTypeEnum"),
        **_of(configs, "DeepSpeedZeroOffloadOptimizerConfig", "DeepSpeedZeroOffloadParamConfig"),
    },
    "runtime.zero.partition_parameters": {
        **_PARTITIONS, "get_accelerator": accelerator.get_accelerator,
        "zero_wrapper_for_fp_tensor_constructor": zero.zero_wrapper_for_fp_tensor_constructor,
        **{f"_orig_torch_{name}": getattr(torch, name)
           for name in ("arange", "empty", "eye", "full", "ones", "tensor", "zeros")},
        **_no(reason_of("zero_optimization.zero_quantized_weights"), "CUDAQuantizer"),
    },
    "runtime.zero.stage3": {
        **_of(zero, "estimate_zero3_model_states_mem_needs", "estimate_zero3_model_states_mem_needs_all_cold",
              "estimate_zero3_model_states_mem_needs_all_live"),
        **_no(_OPTIMIZER, "DeepSpeedZeroOptimizer_Stage3"),
    },
    "runtime.zero.stage_1_and_2": {
        **_of(zero, "estimate_zero2_model_states_mem_needs", "estimate_zero2_model_states_mem_needs_all_cold",
              "estimate_zero2_model_states_mem_needs_all_live"),
        **_no(_OPTIMIZER, "DeepSpeedZeroOptimizer"),
    },
    "runtime.zero.tiling": _no(_NO_TILES, "TiledLinear", "TiledLinearReturnBias"),
    "runtime.zero.utils": _of(zero, "is_zero_param"),
    "utils": {
        **_of(utils, "OnDevice", "RepeatingLoader", "instrument_w_nvtx"), **_LOGGING, **_LEAVES, **_FRAGMENTS,
        "is_initialized": comm.is_initialized, "init_distributed": comm.init_distributed,
    },
    "utils.groups": {
        **_defined(groups),
        **_no(reason_of("expert_parallel"), "_create_expert_and_data_parallel", "_get_expert_parallel_ranks",
              "_get_expert_parallel_group", "_get_expert_parallel_rank", "_get_expert_parallel_world_size"),
    },
    "utils.init_on_device": _of(utils, "OnDevice"),
    "utils.logging": _LOGGING,
    "utils.nvtx": _of(utils, "instrument_w_nvtx"),
    "utils.tensor_fragment": _FRAGMENTS,
    "utils.timer": _of(timers, "SynchronizedWallClockTimer", "ThroughputTimer"),
    "utils.torch": _of(utils, "required_torch_version"),
    "utils.z3_leaf_module": _LEAVES,
    "utils.zero_to_fp32": _of(
        zero_to_fp32, "convert_zero_checkpoint_to_fp32_state_dict", "convert_zero_checkpoint_to_state_dict",
        "get_fp32_state_dict_from_zero_checkpoint", "get_model_state_file", "get_optim_files",
        "load_state_dict_from_zero_checkpoint", "main",
    ),
}  # fmt: skip

# Other names of the same modules.
SAME = {
    "accelerator.abstract_accelerator": "accelerator", "accelerator.cpu_accelerator": "accelerator",
    "accelerator.cuda_accelerator": "accelerator", "accelerator.real_accelerator": "accelerator",
    "checkpointing": "runtime.activation_checkpointing.checkpointing", "comm.comm": "comm", "comm.torch": "comm",
    "dist": "comm", "ops.op_builder.builder": "ops.op_builder", "utils.distributed": "comm", "zero": "runtime.zero",
}  # fmt: skip

NO_MODULES = {
    name: Refusal(why)
    for name, why in {
        "autotuning": reason_of("autotuning"),
        "checkpoint.constants": _INTERNAL,
        "checkpoint.ds_to_universal": _EVERY_LOADS,
        "checkpoint.universal_checkpoint": _EVERY_LOADS,
        "compile": reason_of("compile"),
        "compression": reason_of("compression_training"),
        "elasticity": reason_of("elasticity"),
        "inference": _NO_INFERENCE,
        "linear": _NO_LINEAR,
        "model_implementations": _NO_INFERENCE,
        "module_inject": _NO_INFERENCE,
        "moe": reason_of("expert_parallel"),
        "monitor.comet": _MONITORS,
        "monitor.config": _MONITORS,
        "nebula": reason_of("nebula"),
        "nvme": "run `infinity bench --drive FOLDER`, which measures the drive and writes a profile",
        "ops.sparse_attention.matmul": _OWN_BLOCKS,
        "ops.sparse_attention.softmax": _OWN_BLOCKS,
        "ops.transformer": optimizers.NO_KERNEL,
        "ops.deepspeed4science": optimizers.NO_KERNEL,
        "profiling": reason_of("flops_profiler"),
        "runtime.bf16_optimizer": _OPTIMIZER,
        "runtime.checkpoint_engine": reason_of("checkpoint.writer"),
        "runtime.comm": _INTERNAL,
        "runtime.compiler": reason_of("compile"),
        "runtime.config_utils": _INTERNAL,
        "runtime.constants": _INTERNAL,
        "runtime.data_pipeline": reason_of("data_efficiency"),
        "runtime.domino": _INTERNAL,
        "runtime.eigenvalue": reason_of("eigenvalue"),
        "runtime.fp16": _OPTIMIZER,
        "runtime.hybrid_engine": reason_of("hybrid_engine"),
        "runtime.pipe.p2p": _INTERNAL,
        "runtime.pipe.schedule": _INTERNAL,
        "runtime.progressive_layer_drop": reason_of("progressive_layer_drop"),
        "runtime.quantize": reason_of("quantize_training"),
        "runtime.sparse_tensor": reason_of("sparse_gradients"),
        "runtime.superoffload": reason_of("zero_optimization.offload_optimizer.super_offload"),
        "runtime.swap_tensor": _INTERNAL,
        "runtime.tensor_parallel": "initialize() divides models itself: set tensor_parallel.autotp_size in its file",
        "runtime.torch_autocast": _INTERNAL,
        "runtime.weight_quantizer": reason_of("weight_quantization"),
        "runtime.zenflow": reason_of("zero_optimization.zenflow"),
        "runtime.zero.leaf_module_config": "set zero_optimization.leaf_module, or call utils.set_z3_leaf_modules",
        "runtime.zero.mics": reason_of("zero_optimization.mics_shard_size"),
        "runtime.zero.parameter_offload": _INTERNAL,
        "runtime.zero.partitioned_param_coordinator": _INTERNAL,
        "sequence": _SEQUENCE,
        "utils.comms_logging": reason_of("comms_logger"),
        "utils.numa": "the engine binds each rank to its share of the cores",
    }.items()
}

# What has the names of a module that are not in the table.
ELSEWHERE = {"comm": torch.distributed}


def canonical(path: str) -> str:
    """Return the row of the tables that a dotted name stands for."""
    head, rest = path, ""
    while head and head not in SAME:
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return f"{SAME[head]}{rest}" if head else path
