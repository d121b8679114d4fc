"""Honoured keys that have no effect in combination with the other keys of the same configuration."""

from __future__ import annotations

from infinity.config.schema import Config
from infinity.config.tiers import drive_names


def idle(config: Config) -> dict[str, str]:
    """Return dotted path -> reason for each key that the user wrote and that has no effect in a resolved `config`."""
    zero = config.zero_optimization
    states, checkpoints = zero.offload_optimizer, config.activation_checkpointing.offload
    on_drive = zero.drives(states) or zero.drives(zero.offload_param) or checkpoints.device in drive_names()
    found = {}
    if zero.tile_parameters and zero.stage != 3:
        found["zero_optimization.tile_parameters"] = f"it needs stage 3, and the stage is {zero.stage}"
    if states is not None and states.device == "none" and states.ratio != 1:
        found["zero_optimization.offload_optimizer.ratio"] = 'all states stay on the accelerator: device is "none"'
    if zero.cpu_offload_use_pin_memory is not None:
        found["zero_optimization.cpu_offload_use_pin_memory"] = "nothing is offloaded"
    if config.aio.drive_weights and not on_drive:
        found["aio.drive_weights"] = "nothing is on NVMe"
    return {path: why for path, why in found.items() if path in config.provenance.given}
