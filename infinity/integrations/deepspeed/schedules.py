"""`deepspeed.runtime.lr_schedules`: the schedules of the configuration, for a program that makes its own."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError
from infinity.optim.lr import LRScheduler, curve_of

# Those of DeepSpeed; a configuration may name further ones.
_CURVES = {
    "LR_RANGE_TEST": "LRRangeTest", "ONE_CYCLE": "OneCycle", "WARMUP_LR": "WarmupLR",
    "WARMUP_DECAY_LR": "WarmupDecayLR", "WARMUP_COSINE_LR": "WarmupCosineLR",
}  # fmt: skip
VALID_LR_SCHEDULES = [*_CURVES.values()]
# DeepSpeed's constants: LR_RANGE_TEST is a schedule, WARMUP_MIN_LR a key of one, WARMUP_LOG_RATE a value.
CONSTANTS = {
    **_CURVES, "WARMUP_LOG_RATE": "log", "WARMUP_LINEAR_RATE": "linear",
    **{key.upper(): key for name in VALID_LR_SCHEDULES for key in LRScheduler.curves[name].model_fields},
}


class _Schedule(LRScheduler):
    def __init__(self, optimizer: Any, *by_place: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        name = type(self).__name__
        if by_place:
            raise ConfigError(f"{name}(optimizer, ...): name its other arguments, such as {next(iter(params), 'lr')}=")
        super().__init__(curve_of(name, params), optimizer)
        self.last_batch_iteration = last_batch_iteration


class LRRangeTest(_Schedule):
    """See the configuration's `scheduler` section; the keys are the keyword arguments, as for the next four."""


class OneCycle(_Schedule):
    """One rise and fall of the rate."""


class WarmupLR(_Schedule):
    """A rise that ends at the highest rate."""


class WarmupDecayLR(_Schedule):
    """A rise, and a fall in a straight line."""


class WarmupCosineLR(_Schedule):
    """A rise, and a fall along half a cosine."""
