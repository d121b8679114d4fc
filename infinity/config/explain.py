"""What `infinity config explain` adds to values: the meaning of absent keys, in place of a bare "none", and which
honoured keys have no effect beside the other keys of the same configuration.
"""

from __future__ import annotations

from infinity.base.tiers import drive_names
from infinity.config.schema import Config
from infinity.config.sparse_attention import KEYS
from infinity.config.training import OneCycleConfig, WarmupDecayLRConfig, WarmupLRConfig

_MACHINE = "what the machine has"


def meanings(config: Config, compute: str) -> dict[str, str]:
    """Return dotted path -> what the engine uses instead, for keys without a value in a resolved configuration.

    compute: the compute type of the parameters, in words.
    """
    several = (config.gradient_accumulation_steps or 1) > 1 or not config.managed_gradient_accumulation
    live, stage = config.zero_optimization.stage3_max_live_parameters, config.zero_optimization.stage
    profile = config.hardware_profile
    tiles = f"a weight of more than {live:,} elements is executed in tiles of {live // 4:,}"
    return {
        "steps_per_print": "no progress lines",
        "communication_data_type": compute,
        "log_level": "info",
        "dataloader_prefetch_factor": "2, if there are workers",
        "data_parallel_size": "not checked",
        "hardware_profile": "no profile",
        "parallel.plan": "the model's own plan",
        "parallel.stages": "blocks are balanced" if config.parallel.pipeline > 1 else "no stages",
        "pipeline.stages": "parallel.pipeline",
        "scheduler": "a constant rate",
        "data_types.grad_accum_dtype": (
            "fp32, in which several micro-batches add up" if several else f"{compute}, as the one gradient arrives"
        ),
        "data_types.param_dtype": "not checked",
        "zero_optimization.offload_param": "parameters stay on the accelerator",
        "zero_optimization.offload_optimizer": "states stay on the accelerator",
        "zero_optimization.offload_gradients": "gradients lie beside states on the accelerator, else in CPU memory, or "
        "on the drive where that has no room",
        "zero_optimization.tile_parameters": tiles if stage == 3 else "no tiles, which need stage 3",
        "aio.block_size": f"from {profile}, or 1 MiB" if profile else "1 MiB",
        "aio.intra_op_parallelism": "chosen from the machine",
        "aio.drive_weights": f"from {profile}, or measured" if profile else "measured at the start",
        **{f"memory.{tier}.max_bytes": _MACHINE for tier in ("gpu", "cpu", "nvme")},
        "speculative_step": "beside an accelerator whose drive has the room",
        "memory.activations.max_bytes": "measured on the first batch",
        "memory.activations.sequence_length": "nothing is measured before the first batch",
        "activation_checkpointing.offload.nvme_path": "the path of offload_optimizer or offload_param",
        **_schedule(config),
    }


def notes(config: Config) -> dict[str, str]:
    """Return dotted path -> a remark, for defaults that another key or a lower bound overrides."""
    found = {}
    if config.hardware_profile:
        found["aio.queue_depth"] = f"from {config.hardware_profile} if it lists the drive"
    found["zero_optimization.offload_optimizer.buffer_count"] = "never fewer than five where anything is read ahead"
    return found


def _schedule(config: Config) -> dict[str, str]:
    rate = "the optimizer's rate"
    match config.scheduler:
        case WarmupLRConfig() | WarmupDecayLRConfig():
            return {"scheduler.params.warmup_max_lr": rate}
        case OneCycleConfig(params=params):
            return {
                "scheduler.params.cycle_second_step_size": f"{params.cycle_first_step_size}, as in the rising half",
                "scheduler.params.cycle_second_stair_count": f"{params.cycle_first_stair_count}, as in the rising half",
            }
        case _:
            return {}


def idle(config: Config) -> dict[str, str]:
    """Return dotted path -> reason for each key that the user wrote and that has no effect in a resolved `config`."""
    zero = config.zero_optimization
    states, checkpoints = zero.offload_optimizer, config.activation_checkpointing.offload
    on_drive = any(map(zero.drives, zero.offloads)) or checkpoints.device in drive_names()
    found = {}
    if zero.tile_parameters and zero.stage != 3:
        found["zero_optimization.tile_parameters"] = f"it needs stage 3, and the stage is {zero.stage}"
    if states is not None and states.device == "none" and states.ratio != 1:
        found["zero_optimization.offload_optimizer.ratio"] = 'all states stay on the accelerator: device is "none"'
    if zero.cpu_offload_use_pin_memory is not None:
        found["zero_optimization.cpu_offload_use_pin_memory"] = "nothing is offloaded"
    if config.aio.drive_weights and not on_drive:
        found["aio.drive_weights"] = "nothing is on NVMe"
    if (sparse := config.sparse_attention) is not None:
        of_others = {key for keys in KEYS.values() for key in keys} - set(KEYS[sparse.mode])
        why = f'the layout "{sparse.mode}" does not read it'
        found |= dict.fromkeys((f"sparse_attention.{key}" for key in sorted(of_others)), why)
    return {path: why for path, why in found.items() if path in config.provenance.given}
