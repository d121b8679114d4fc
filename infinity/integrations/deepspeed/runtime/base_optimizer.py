"""`deepspeed.runtime.base_optimizer`: the class of an engine's optimizer."""

from infinity.optim.optimizer_view import TieredOptimizer as DeepSpeedOptimizer

__all__ = ["DeepSpeedOptimizer"]
