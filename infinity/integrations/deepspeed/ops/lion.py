"""`deepspeed.ops.lion`."""

from infinity.optim.lion import LionOptimizer

__all__ = ["DeepSpeedCPULion", "FusedLion"]


class DeepSpeedCPULion(LionOptimizer):
    """Lion; the engine steps it where its states live."""


class FusedLion(LionOptimizer):
    """The same: which device steps is the configuration's decision, not the class's."""
