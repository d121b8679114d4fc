"""`deepspeed.runtime`: the places where programs import classes from."""

from infinity.integrations.deepspeed.runtime import base_optimizer, engine, lr_schedules, utils, zero

__all__ = ["base_optimizer", "engine", "lr_schedules", "utils", "zero"]
