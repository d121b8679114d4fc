"""`deepspeed.runtime.engine`: the class of an engine."""

from infinity.engine.engine import Engine as DeepSpeedEngine

__all__ = ["DeepSpeedEngine"]
