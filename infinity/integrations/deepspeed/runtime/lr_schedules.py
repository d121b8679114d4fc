"""`deepspeed.runtime.lr_schedules`: the schedules of the configuration, for a program that makes its own."""

from __future__ import annotations

from typing import Any

from infinity.optim.lr import LRScheduler, curve_of

LR_RANGE_TEST = "LRRangeTest"
ONE_CYCLE = "OneCycle"
WARMUP_LR = "WarmupLR"
WARMUP_DECAY_LR = "WarmupDecayLR"
WARMUP_COSINE_LR = "WarmupCosineLR"
VALID_LR_SCHEDULES = [LR_RANGE_TEST, ONE_CYCLE, WARMUP_LR, WARMUP_DECAY_LR, WARMUP_COSINE_LR]


class _Schedule(LRScheduler):
    def __init__(self, optimizer: Any, last_batch_iteration: int = -1, **params: Any) -> None:
        super().__init__(curve_of(type(self).__name__, params), optimizer)
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
