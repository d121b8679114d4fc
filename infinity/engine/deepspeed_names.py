"""What DeepSpeed's engine has beside the verbs: values of the configuration, rates, batch sizes, and what is refused.

`DeepSpeedNames` has what does something; `CONFIGURED` and `REFUSED` are tables that the engine looks a name up in that
neither it nor its module has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from infinity.config.resolve import ResolvedConfig
from infinity.config.section import Absent, mark
from infinity.engine.micro_batches import Accumulation
from infinity.engine.optimizer import TieredOptimizer
from infinity.errors import ConfigError


def _key(path: str) -> Callable[[ResolvedConfig], Any]:
    """Return what reads the value at a dotted path, None where its section is absent."""

    def read(config: ResolvedConfig) -> Any:
        found: Any = config.sections
        for name in path.split("."):
            if mark(type(found).model_fields[name], Absent):
                return False
            found = getattr(found, name)
            if found is None:
                return None
        return found

    return read


def _device(section: str) -> Callable[[ResolvedConfig], bool]:
    """Return what tells whether a section of zero_optimization moves anything from the device."""

    def read(config: ResolvedConfig) -> bool:
        found = getattr(config.zero, section)
        return found is not None and found.device != "none"

    return read


_ZERO = "zero_optimization."
# DeepSpeed's name -> its value by the resolved configuration. On an engine each is a method without arguments.
CONFIGURED: Mapping[str, Callable[[ResolvedConfig], Any]] = {
    **{name: _key(name) for name in (
        "communication_data_type", "dump_state", "gradient_clipping", "gradient_predivide_factor", "graph_harvesting",
        "memory_breakdown", "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
    )},
    **{name: _key(_ZERO + key) for name, key in {
        "zero_allgather_bucket_size": "allgather_bucket_size", "zero_allgather_partitions": "allgather_partitions",
        "zero_contiguous_gradients": "contiguous_gradients", "zero_elastic_checkpoint": "elastic_checkpoint",
        "zero_hpz_partition_size": "zero_hpz_partition_size", "zero_ignore_unused_parameters":
        "ignore_unused_parameters", "zero_legacy_stage1": "legacy_stage1",
        "zero_load_from_fp32_weights": "load_from_fp32_weights",
        "zero_max_live_parameters": "stage3_max_live_parameters",
        "zero_max_reuse_distance": "stage3_max_reuse_distance",
        "zero_model_persistence_threshold": "stage3_model_persistence_threshold",
        "zero_module_granularity_threshold": "stage3_module_granularity_threshold",
        "zero_multi_rank_bucket_allreduce": "use_multi_rank_bucket_allreduce",
        "zero_offload_optimizer": "offload_optimizer", "zero_offload_param": "offload_param",
        "zero_overlap_comm": "overlap_comm",
        "zero_param_persistence_threshold": "stage3_param_persistence_threshold",
        "zero_prefetch_bucket_size": "stage3_prefetch_bucket_size",
        "zero_quantized_gradients": "zero_quantized_gradients", "zero_quantized_weights": "zero_quantized_weights",
        "zero_quantized_nontrainable_weights": "zero_quantized_nontrainable_weights",
        "zero_reduce_bucket_size": "reduce_bucket_size", "zero_reduce_scatter": "reduce_scatter",
        "zero_round_robin_gradients": "round_robin_gradients", "zero_sub_group_size": "sub_group_size",
        "mics_shard_size": "mics_shard_size",
        "zero_gather_16bit_weights_on_model_save": "stage3_gather_16bit_weights_on_model_save",
    }.items()},
    **{name: _key(key) for name, key in {
        "aio_config": "aio", "amp_enabled": "amp", "autotuning_enabled": "autotuning",
        "bf16_master_weights_and_gradients": "bf16.bf16_master_weights_and_grads",
        "bf16_optimizer_states": "bf16.bf16_optimizer_states", "bfloat16_enabled": "bf16.enabled",
        "checkpoint_tag_validation_enabled": "checkpoint.tag_validation", "curriculum_enabled_legacy":
        "curriculum_learning", "data_efficiency_enabled": "data_efficiency", "data_sampling_enabled":
        "data_efficiency", "curriculum_learning_enabled": "data_efficiency", "random_ltd_enabled": "data_efficiency",
        "eigenvalue_enabled": "eigenvalue", "elasticity_enabled": "elasticity",
        "flops_profiler_enabled": "flops_profiler", "fp16_auto_cast": "fp16.auto_cast", "fp16_enabled": "fp16.enabled",
        "fp16_master_weights_and_gradients": "fp16.fp16_master_weights_and_grads",
        "load_universal_checkpoint": "checkpoint.load_universal",
        "pld_enabled": "progressive_layer_drop", "quantize_training": "quantize_training",
        "sparse_gradients_enabled": "sparse_gradients", "torch_autocast_enabled": "torch_autocast.enabled",
        "torch_autocast_dtype": "torch_autocast.dtype",
        "use_node_local_storage": "checkpoint.use_node_local_storage",
        "optimizer_name": "optimizer.type", "scheduler_name": "scheduler.type",
    }.items()},
    # A configuration's; an engine's is the present one.
    "loss_scale": _key("fp16.loss_scale"),
    "dynamic_loss_scale": lambda config: config.scales_loss and config.sections.fp16.loss_scale == 0,
    "initial_dynamic_scale": lambda config: 2.0**config.sections.fp16.initial_scale_power,
    "dynamic_loss_scale_args": lambda config: {
        "init_scale": 2.0**config.sections.fp16.initial_scale_power,
        "scale_window": config.sections.fp16.loss_scale_window,
        "delayed_shift": config.sections.fp16.hysteresis, "min_scale": config.sections.fp16.min_loss_scale,
        "consecutive_hysteresis": config.sections.fp16.consecutive_hysteresis,
    },
    "optimizer_params": lambda config: config.sections.optimizer and config.sections.optimizer.params.model_dump(),
    "scheduler_params": lambda config: config.sections.scheduler and config.sections.scheduler.params.model_dump(),
    "postscale_gradients": lambda config: not config.sections.prescale_gradients,
    "super_offload": lambda config: False,
    "zenflow": lambda config: False,
    "zero_cpu_offload": _device("offload_optimizer"),
    "zero_has_nvme_offload": lambda config: config.nvme_path is not None,
    "zero_nvme_offload_optimizer": lambda config: config.optimizer_tier not in ("gpu", "cpu"),
    "zero_enabled": lambda config: config.stage > 0,
    "zero_optimization": lambda config: config.stage > 0,
    "zero_optimization_partition_gradients": lambda config: config.stage >= 2,
    "zero_optimization_partition_weights": lambda config: config.stage == 3,
    "zero_optimization_stage": lambda config: config.stage,
    "zero_partial_offload": lambda config: config.optimizer_share,
    "zero_use_cpu_optimizer": _device("offload_optimizer"),
}  # fmt: skip

_BATCHES = "pass engine.train_batch an iterator, or `map(function, iterator)`"
_SEE_PIPELINE = "outputs and tables of a pipeline stay inside; see engine.plan and engine.timeline()"
_DATA = "infinity never changes the model or its data: do this in the program"
_GROUPS = "see engine.data_rank, engine.data_size, engine.is_first_stage(), and deepspeed.utils.groups"
_NO_EXPERTS = "the parallel axes are data, sequence, tensor and pipeline: there is no expert axis"
_CALLS = "the engine calls it itself: call backward(loss) and step()"
# DeepSpeed's name -> why the engine does not have it, and what to do instead.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("set_dataloader", "set_dataiterator", "set_batch_fn", "reset_activation_shape"), _BATCHES),
    **dict.fromkeys(("grid", "mpu", "num_stages", "stage_id"), _GROUPS),
    **dict.fromkeys(("set_has_attention_mask", "schedule", "pipe_buffers", "fwd_outputs", "total_loss"), _SEE_PIPELINE),
    **dict.fromkeys(
        ("curriculum_params_legacy", "curriculum_learning_config", "data_efficiency_config", "data_sampling_config",
         "data_post_process_func", "eigenvalue", "get_pld_theta", "pld_gamma", "pld_params", "pld_theta",
         "progressive_layer_drop", "quantizer", "random_ltd_config", "random_ltd_scheduler",
         "set_custom_curriculum_learning_schedule", "set_data_post_process_func", "update_moq"), _DATA
    ),
    **dict.fromkeys(("has_moe_layers", "num_experts", "expert_data_parallel_group", "expert_parallel_group",
                     "moe_layers"), _NO_EXPERTS),
    **dict.fromkeys(("allreduce_gradients", "buffered_allreduce_fallback", "clip_fp32_gradients",
                     "allreduce_bucket", "allreduce_no_retain", "scale", "_take_model_step", "_backward_epilogue"),
                    _CALLS),
    "sparse_tensor_module_names": "gradients are sent dense, with the same result",
    "csr_tensor_module_names": "gradients are sent dense, with the same result",
    "flops_profiler": "torch.profiler counts operations; see engine.step_times() and engine.timeline()",
    "timers": "see engine.step_times() and engine.timeline()",
    "tput_timer": "the progress line has tokens a second: set steps_per_print; see engine.step_times()",
    "monitor": "enable tensorboard, csv_monitor or wandb in the configuration",
    "summary_writer": "enable tensorboard, csv_monitor or wandb in the configuration",
    "get_summary_writer": "enable tensorboard, csv_monitor or wandb in the configuration",
    "checkpoint_engine": "there is one writer: see the section checkpoint",
    "elasticity": "batch sizes do not change with the number of ranks",
    "generate_batch": "call engine.generate(), which is the module's",
    "deepspeed_io": "initialize(training_data=...) returns the loader",
    "get_sequence_parallel_group": "see engine.groups.sequence, and engine.sequence_batches",
    "load_module_state_dict": "load_checkpoint(folder, load_module_only=True) reads files; inside "
                              "infinity.modify(model) call load_state_dict",
    "save_fp16_model": "it is called save_16bit_model",
    "_get_zero_param_shapes": "the checkpoint's manifest has the shapes",
    "_get_optimizer_ckpt_name": "the files of a checkpoint are named by infinity: docs/checkpoint_format.md",
    "_config": "engine.config is the resolved configuration",
}  # fmt: skip


class LossScale(float):
    """The present loss scale: a number, and DeepSpeed's method of that name."""

    def __call__(self) -> float:
        """Return the number."""
        return float(self)


class DeepSpeedNames:
    """DeepSpeed's getters and setters of an engine."""

    optimizer: TieredOptimizer | None
    _accumulation: Accumulation

    if TYPE_CHECKING:

        @property
        def config(self) -> ResolvedConfig: ...

        @property
        def data_size(self) -> int: ...

        def _whole_tensors(self, *, frozen: bool) -> dict[str, Any]: ...

    def train_batch_size(self) -> int:
        """Return the samples of a step over all ranks."""
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.data_size

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples of a micro-batch."""
        return self.config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches of a step."""
        return self._accumulation.steps

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change the number of micro-batches of a step, so that it has so many samples over all ranks. Every rank.

        Between two steps, not with a pipeline. Gradients go on to add up in the type that the configuration's number
        of micro-batches has chosen. ConfigError where the micro-batches do not divide it.
        """
        part = self.train_micro_batch_size_per_gpu() * self.data_size
        if train_batch_size < part or train_batch_size % part:
            raise ConfigError(
                f"set_train_batch_size({train_batch_size}): a micro-batch of all ranks has {part} samples, and a step "
                "a whole number of them"
            )
        if self.config.pipeline > 1:
            raise ConfigError(
                "set_train_batch_size: the order of a pipeline is made for gradient_accumulation_steps "
                f"{self.config.accumulation}: set train_batch_size in the configuration"
            )
        self._accumulation.set_steps(train_batch_size // part)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Raise ConfigError: memory is planned for the configuration's."""
        raise ConfigError(
            f"set_train_micro_batch_size({micro_batch_size}): memory is planned for a micro-batch of "
            f"{self.config.micro_batch}: set train_micro_batch_size_per_gpu in the configuration"
        )

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return the samples of a step, those of a micro-batch, and the micro-batches of a step."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each parameter group that has one; none without an optimizer."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group["lr"] for group in groups if "lr" in group]

    def set_lr(self, lr: float | Sequence[float]) -> None:
        """Set the learning rate of every parameter group, or of each. Every rank; a scheduler sets it again."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        rates = list(lr) if isinstance(lr, Sequence) else [lr] * len(groups)
        if len(rates) != len(groups):
            raise ConfigError(f"set_lr: {len(rates)} rates for {len(groups)} parameter groups: pass one, or one each")
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def get_mom(self) -> list[Any]:
        """Return the momentum of each parameter group, or its betas; none without an optimizer."""
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("momentum", group.get("betas")) for group in groups]

    def get_type(self) -> list[Any]:
        """Return the `type` of each parameter group, None where it has none."""
        return [group.get("type") for group in self.optimizer.param_groups] if self.optimizer is not None else []

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return `state_dict()`: full tensors on rank 0, {} on other ranks. Collective.

        exclude_frozen_parameters: leave out parameters that are not trained.
        """
        return self._whole_tensors(frozen=not exclude_frozen_parameters)

    def empty_partition_cache(self) -> None:
        """Do nothing: gathered weights are released when their last use in a step is over."""
