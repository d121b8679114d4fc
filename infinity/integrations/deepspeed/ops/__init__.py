"""`deepspeed.ops`: optimizers whose step is the engine's native one."""

from infinity.integrations.deepspeed.ops import adagrad, adam, lion

__all__ = ["adagrad", "adam", "lion"]
