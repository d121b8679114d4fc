"""`deepspeed.runtime`: the places where programs import classes from."""

from infinity.integrations.deepspeed.runtime import (
    base_optimizer,
    dataloader,
    engine,
    lr_schedules,
    pipe,
    utils,
    zero,
)

__all__ = ["base_optimizer", "dataloader", "engine", "lr_schedules", "pipe", "utils", "zero"]
