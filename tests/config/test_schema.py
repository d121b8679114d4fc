"""The schema against the facts about DeepSpeed, and the documents against the schema."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic.fields import FieldInfo

from infinity.config import DEEPSPEED, load_config
from infinity.config.schema import Config
from infinity.config.section import Absent, Also, Refused, Section, dotted, mark, reply_of, sections_of
from infinity.errors import ConfigError

ROOT = Path(__file__).parents[2]

# Read from DeepSpeed 0.19.8. Absent is None.
DEFAULTS: dict[str, dict[str, Any]] = {
    "": {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")),
        **dict.fromkeys(("steps_per_print", "communication_data_type", "vocabulary_size", "log_level")),
        "managed_gradient_accumulation": True,
        "gradient_clipping": 1.0,
        "gradient_clipping_value": 0.0,
        **dict.fromkeys(("dump_state", "disable_python_gc", "disable_allgather"), False),
        **dict.fromkeys(("sparse_gradients", "graph_harvesting"), False),
        **dict.fromkeys(("wall_clock_breakdown", "memory_breakdown", "prescale_gradients"), False),
        "dataloader_num_workers": 0,
        "dataloader_prefetch_factor": None,
        **dict.fromkeys(("dataloader_persistent_workers", "dataloader_pin_memory"), False),
        **dict.fromkeys(("dataloader_drop_last", "use_data_before_expert_parallelism"), False),
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "seq_parallel_communication_data_type": "fp32",
        "zero_allow_untested_optimizer": False,
        "zero_force_ds_cpu_optimizer": True,
        "sequence_parallel_size": 1,
        "data_parallel_size": None,
        **dict.fromkeys(("flops_profiler", "comms_logger", "comet")),
        **dict.fromkeys(("elasticity", "curriculum_learning", "data_efficiency", "progressive_layer_drop")),
        **dict.fromkeys(("eigenvalue", "quantize_training", "compression_training")),
        **dict.fromkeys(("weight_quantization", "hybrid_engine", "expert_parallel", "compile")),
        **dict.fromkeys(("nebula", "datastates_ckpt", "autotuning", "timers", "amp")),
        "overlap": True,
        "speculative_step": None,
        "check_grad_overflow": True,
        "max_skipped_steps": 50,
        "watchdog_seconds": 600.0,
        "cross_memory_attach": True,
        "hardware_profile": None,
    },
    "zero_optimization": {
        "stage": 0,
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 500_000_000,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": 500_000_000,
        "overlap_comm": None,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "zenflow": None,
        "sub_group_size": 1_000_000_000,
        **dict.fromkeys(("cpu_offload_param", "cpu_offload_use_pin_memory", "cpu_offload")),
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_model_persistence_threshold": sys.maxsize,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
        "tile_parameters": None,
        "stage3_gather_16bit_weights_on_model_save": False,
        "stage3_module_granularity_threshold": 0,
        "stage3_use_all_reduce_for_fetch_params": False,
        "stage3_allgather_sequential": False,
        "ignore_unused_parameters": True,
        "legacy_stage1": False,
        "round_robin_gradients": False,
        "zero_hpz_partition_size": 1,
        "zero_quantized_weights": False,
        "zero_quantized_nontrainable_weights": False,
        "zero_quantized_gradients": False,
        "zeropp_loco_param": None,
        "mics_shard_size": -1,
        "mics_hierarchical_params_gather": False,
        "compute_grad_norm": True,
        "parameter_alignment": False,
        "memory_efficient_linear": True,
        "pipeline_loading_checkpoint": False,
        "override_module_apply": True,
        "log_trace_cache_warnings": False,
        "enable_sanity_checks": False,
        "save_muon_momentum_buffer_in_memory": False,
    },
    "zero_optimization.offload_param": {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 5,
        "buffer_size": 100_000_000,
        "max_in_cpu": 1_000_000_000,
        "pin_memory": True,
    },
    "zero_optimization.offload_gradients": {"device": "auto", "nvme_path": None, "ratio": 1.0},
    "zero_optimization.offload_optimizer": {
        "device": "none",
        "nvme_path": None,
        "buffer_count": 4,
        "pin_memory": True,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
        "super_offload": False,
        "cpuadam_cores_perc": 0.8,
    },
    # Sizes of blocks and the number of I/O threads are ours to choose when the file does not.
    "aio": {
        "block_size": None,
        "queue_depth": 8,
        "intra_op_parallelism": None,
        "checksum": "sampled",
        "drive_weights": (),
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    },
    "activation_checkpointing": {
        "every": 0,
        "keep_ops": (),
        "partition_activations": False,
        "contiguous_memory_optimization": False,
        "cpu_checkpointing": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "activation_checkpointing.offload": {"device": "none", "nvme_path": None, "buffer_count": 4, "pin_memory": True},
    "fp16": {
        "enabled": False,
        "auto_cast": False,
        "loss_scale": 0.0,
        "initial_scale_power": 16,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "consecutive_hysteresis": False,
        "min_loss_scale": 1.0,
        "fp16_master_weights_and_grads": False,
    },
    "bf16": {
        "enabled": False,
        "immediate_grad_update": False,
        "check_grad_overflow": True,
        "bf16_master_weights_and_grads": False,
        "bf16_optimizer_states": False,
    },
    "torch_autocast": {"enabled": False, "dtype": "bf16", "lower_precision_safe_modules": None},
    "data_types": dict.fromkeys(("grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules")),
    "parallel": {
        "pipeline": 1, "schedule": "1f1b", "virtual_stages": 1, "stages": (), "tensor": 1, "sequence": False,
        "plan": None, "reduce": "micro_batch",
    },
    # Those of `enabled`, `dtype` and the backend are ours: the section alone divides nothing.
    "tensor_parallel": {
        "enabled": True,
        "autotp_size": 0,
        **dict.fromkeys(("tp_overlap_comm", "vocab_parallel_lm_head"), False),
        **dict.fromkeys(("dtype", "vocab_parallel_ce_backend", "injection_policy_tuple", "partition_config")),
        "preset_model": None,
        **dict.fromkeys(("keep_module_on_host", "replace_with_kernel_inject"), False),
    },
    "tensor_parallel.tp": {"tp_size": 1, "tp_grain_size": 1},
    "pipeline": {
        "stages": None,
        "partition": "best",
        "seed_layers": False,
        "activation_checkpoint_interval": 0,
        "pipe_partitioned": True,
        "grad_partitioned": True,
        "use_reentrant": True,
    },
    "optimizer": {"legacy_fusion": False},
    "optimizer.params MuonParams": {
        "lr": 1e-3, "muon_lr": None, "adam_lr": None, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
        "ns_steps": 5, "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_dtype": "bf16", "split": None,
        "adjust_lr_fn": None, "betas": (0.9, 0.999), "adam_eps": 1e-8, "ns_method": "standard", "per_head_muon": False,
    },
    "optimizer.params AdamW8bitParams": {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "min_8bit_size": 4096, "optim_bits": 8,
        "amsgrad": False, "max_unorm": 0.0,
    },
    "optimizer.params LionParams": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "optimizer.params AdagradParams": {
        "lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10,
    },
    "optimizer.params SgdParams": {
        "lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
    },
    "optimizer.params RmspropParams": {
        "lr": 1e-2, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
    },
    "optimizer.params AdamaxParams": {"lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
    "optimizer.params NadamParams": {
        "lr": 2e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "momentum_decay": 4e-3,
        "decoupled_weight_decay": False,
    },
    "optimizer.params AdamParams": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "bias_correction": True,
        "torch_adam": False,
        "adam_w_mode": True,
        "fp32_optimizer_states": True,
        "max_grad_norm": None,
    },
    "scheduler.params LRRangeTestParams": {
        "last_batch_iteration": -1,
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
    },
    "scheduler.params OneCycleParams": {
        "last_batch_iteration": -1,
        "cycle_min_lr": None,
        "cycle_max_lr": None,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
    },
    "scheduler.params WarmupLRParams": {
        "last_batch_iteration": -1,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": None,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "scheduler.params WarmupDecayLRParams": {
        "last_batch_iteration": -1,
        "total_num_steps": None,
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 1e-3,
        "warmup_num_steps": 1000,
        "warmup_type": "log",
    },
    "scheduler.params WarmupCosineLRParams": {
        "last_batch_iteration": -1,
        "total_num_steps": None,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 1e-4,
        "warmup_type": "log",
    },
    "checkpoint": {
        "tag_validation": "Warn",
        "keep_last": 0,
        "keep_every": 0,
        "load_universal": False,
        "use_node_local_storage": False,
        "checkpoint_serialization": True,
        "writer": None,
        "asynchronous": False,
        "bandwidth_share": 1.0,
        "path": None,
        "every_step": "off",
        "on_signal": (),
    },
    "sparse_attention": {
        "mode": "fixed", "block": 16, "different_layout_per_head": False, "num_local_blocks": 4,
        "num_global_blocks": 1, "attention": "bidirectional", "horizontal_global_attention": False,
        "num_different_global_patterns": 1, "num_random_blocks": 0, "local_window_blocks": (4,),
        "global_block_indices": (0,), "global_block_end_indices": None, "num_sliding_window_blocks": 3, "layers": "all",
    },
    "checkpoint.parallel_write": {"pipeline_stage": False},
    "zero_optimization.leaf_module": {"names": (), "name_suffixes": ()},
    "memory.activations": {"max_bytes": None, "sequence_length": None},
    "memory.cpu": {"max_bytes": None},
    "memory.gpu": {"max_bytes": None},
    "memory.nvme": {"max_bytes": None},
    "timeline": {"path": None, "step": 4},
    "kernels": {"liger": False},
    "tensorboard": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "csv_monitor": {"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"},
    "wandb": {"enabled": False, "group": None, "team": None, "project": "deepspeed"},
}


def _keys(section: type[Section] = Config, path: str = "") -> Iterator[tuple[str, type[Section], str, FieldInfo]]:
    """Section path, section class, key and field of every plain key."""
    for name, field in section.model_fields.items():
        for inner in sections_of(field):
            yield from _keys(inner, dotted(path, name))
        if not sections_of(field):
            yield path, section, name, field


ALL = list(_keys())


def test_every_key_has_deepspeeds_default() -> None:
    found: dict[str, dict[str, Any]] = {}
    for path, section, name, field in ALL:
        place = f"{path} {section.__name__}" if path in ("scheduler.params", "optimizer.params") else path
        if not field.is_required() and name != "classes":
            found.setdefault(place, {})[name] = field.default
    assert found == DEFAULTS


def test_every_key_has_one_answer_and_a_meaning() -> None:
    for path, _, name, field in ALL:
        reply_of(field)
        assert field.description, dotted(path, name)


def test_the_longer_name_has_its_short_spelling() -> None:
    for path, _, name, field in ALL:
        if name.startswith("stage3_") and path == "zero_optimization":
            also = mark(field, Also)
            assert also is not None
            assert name.removeprefix("stage3_") in also.names


REFUSED = [(path, name, field) for path, _, name, field in ALL if isinstance(reply_of(field), Refused)]

# Sections that DeepSpeed does not have, and hyper-parameters of optimizers that only torch or bitsandbytes has.
OURS = ("memory", "kernels", "timeline", "parallel")
TORCHS = ("AdagradParams", "SgdParams", "RmspropParams", "AdamaxParams", "NadamParams", "MuonParams", "AdamW8bitParams")

# A value that switches the feature on, where it is not the opposite of the default.
SWITCHED_ON: dict[str, Any] = {
    "optimizer.params.max_unorm": 1.0,
    "zero_optimization.zero_hpz_partition_size": 8,
    "zero_optimization.mics_shard_size": 4,
    "zero_optimization.zeropp_loco_param": {"err_beta": 0.8},
    "zero_optimization.zenflow": {"topk_ratio": 0.1},
    "optimizer.params.max_grad_norm": 1.0,
    "optimizer.params.ns_method": "gram",
    "data_types.buffer_dtype": "fp32",
    "scheduler.params.last_batch_iteration": 5,
    "pipeline.stages": 2,
    "compile": {"deepcompile": True},
    "compression_training": {"weight_quantization": {}},
}


def _nested(path: str, value: Any) -> dict[str, Any]:
    for name in reversed(path.split(".")):
        value = {name: value}
    return dict(value)


def _choose_type(raw: dict[str, Any], path: str, name: str) -> None:
    of = {"ns_method": "Muon", "per_head_muon": "Muon", "amsgrad": "AdamW8bit", "max_unorm": "AdamW8bit"}
    for section, kind in (("optimizer", of.get(name, "AdamW")), ("scheduler", "WarmupLR")):
        if path == f"{section}.params":
            raw[section]["type"] = kind


@pytest.mark.parametrize(("path", "name", "field"), REFUSED, ids=[dotted(path, name) for path, name, _ in REFUSED])
def test_what_is_refused_says_why_and_what_to_do(path: str, name: str, field: FieldInfo) -> None:
    place = dotted(path, name)
    reply = reply_of(field)
    assert isinstance(reply, Refused)
    on = SWITCHED_ON.get(place, {"enabled": True} if mark(field, Absent) else not field.default)
    raw = _nested(place, on)
    _choose_type(raw, path, name)
    with pytest.raises(ConfigError) as caught:
        load_config(raw)
    message = str(caught.value)
    assert f"{place}: " in message
    assert reply.why in message
    assert reply.instead in message
    assert reply.instead.split()[0] in ("Remove", "Set", "Leave", "Enable", "Cast", "Call"), "a next step is an order"
    if reply.ignored:
        config = load_config(raw, conventions=DEEPSPEED)
        assert list(config.provenance.foreign) == [place]
        plain = _nested(place, field.default) if path == "optimizer.params" else {}
        _choose_type(plain, path, name)
        assert config == load_config(plain, conventions=DEEPSPEED) or path.endswith("offload_optimizer")
    else:
        with pytest.raises(ConfigError) as caught:
            load_config(raw, conventions=DEEPSPEED)
        assert reply.instead in str(caught.value)
    for harmless in (field.default, *reply.accepted):
        raw = _nested(place, harmless)
        _choose_type(raw, path, name)
        load_config(raw)


def _script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_the_page_says_what_becomes_of_every_key_of_deepspeeds() -> None:
    script = _script("make_coming_from_deepspeed")
    page = (ROOT / "docs" / "coming_from_deepspeed.md").read_text(encoding="utf-8")
    assert page == script.render(), "run: python docs/make_coming_from_deepspeed.py"
    paths = [path for path, _ in script.listed_keys()]
    assert len(paths) == len(set(paths)) >= 340
    for path, removed in script.listed_keys():
        assert script.disposition(path).startswith(
            ("**works**", "**works differently**: ", "**said and ignored**: ", "**refused**: ")
        ), path
        section, _, name = path.rpartition(".")
        heading = "Removed from DeepSpeed" if removed else f"`{section}`" if section else "Top level"
        table = page.split(f"\n### {heading}\n")[1].split("\n### ")[0]
        assert f"`{path if removed else name}`" in table, path
    # What the schema does not have: only the size that a bare `"zero_optimization": true` reads beside it.
    assert [path for path in paths if script._GONE in script.disposition(path)] == ["allgather_size"]


def test_the_list_of_deepspeeds_keys_has_every_key_that_is_not_ours() -> None:
    listed = {path for path, _ in _script("make_coming_from_deepspeed").listed_keys()}
    for path, section, name, field in ALL:
        ours = (field.description or "").startswith(("Ours.", "Ours,")) or path.split(".")[0] in OURS
        place = dotted(path, name)
        sub_keys = any(other.startswith(f"{place}.") for other in listed)
        if not ours and section.__name__ not in TORCHS:
            assert place in listed or sub_keys, place


def test_the_reference_is_what_the_schema_says() -> None:
    script = _script("make_configuration")
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == script.render(), "run: python docs/make_configuration.py"
    assert all(f"`{name}`" in page for _, _, name, _ in ALL)
