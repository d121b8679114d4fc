"""What a key stands for that has no value: `infinity config explain` says it instead of a bare "none"."""

from __future__ import annotations

from infinity.config.schema import Config
from infinity.config.training import OneCycleConfig, WarmupDecayLRConfig, WarmupLRConfig

_MACHINE = "what the machine has"


def meanings(config: Config, compute: str) -> dict[str, str]:
    """Dotted path -> what the engine takes, for the keys of a settled configuration that were left out.

    compute: the type that parameters are computed in, in words.
    """
    several = (config.gradient_accumulation_steps or 1) > 1 or not config.managed_gradient_accumulation
    live, stage = config.zero_optimization.stage3_max_live_parameters, config.zero_optimization.stage
    profile = config.hardware_profile
    tiles = f"a weight of more than {live:,} elements is executed in tiles of {live // 4:,}"
    return {
        "steps_per_print": "no progress lines",
        "communication_data_type": compute,
        "log_level": "info",
        "dataloader_prefetch_factor": "2, where there are workers",
        "data_parallel_size": "not checked",
        "hardware_profile": "no profile",
        "scheduler": "a constant rate",
        "data_types.grad_accum_dtype": (
            "fp32, in which several micro-batches add up" if several else f"{compute}, as the one gradient arrives"
        ),
        "zero_optimization.offload_param": "parameters stay on the accelerator",
        "zero_optimization.offload_optimizer": "states stay on the accelerator",
        "zero_optimization.tile_parameters": tiles if stage == 3 else "no tiles, which need stage 3",
        "aio.block_size": f"that of {profile}, or 1 MiB" if profile else "1 MiB",
        "aio.intra_op_parallelism": "chosen from the machine",
        "aio.drive_weights": f"those of {profile}, or measured" if profile else "measured at the start",
        **{f"memory.{tier}.max_bytes": _MACHINE for tier in ("gpu", "cpu", "nvme")},
        "memory.activations.max_bytes": "measured on the model's shapes where they tell, else 64 MiB",
        "memory.activations.sequence_length": "128, or what the model takes if that is less",
        "activation_checkpointing.offload.nvme_path": "that of offload_optimizer or offload_param",
        **_schedule(config),
    }


def notes(config: Config) -> dict[str, str]:
    """Dotted path -> what else decides, for defaults that another key replaces."""
    found = {}
    if config.hardware_profile:
        found["aio.queue_depth"] = f"that of {config.hardware_profile} where it knows the drive"
    found["zero_optimization.offload_optimizer.buffer_count"] = "never fewer than five"
    return found


def _schedule(config: Config) -> dict[str, str]:
    rate = "the optimizer's rate"
    match config.scheduler:
        case WarmupLRConfig() | WarmupDecayLRConfig():
            return {"scheduler.params.warmup_max_lr": rate}
        case OneCycleConfig(params=params):
            return {
                "scheduler.params.cycle_second_step_size": f"{params.cycle_first_step_size}, as of the rising half",
                "scheduler.params.cycle_second_stair_count": f"{params.cycle_first_stair_count}, as of the rising half",
            }
        case _:
            return {}
