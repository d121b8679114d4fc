"""`deepspeed.runtime.pipe.engine`: what programs ask to find out whether an engine trains a model in layers."""

from __future__ import annotations

from infinity.engine.engine import Engine as DeepSpeedEngine
from infinity.parallel.module import PipelineModule

__all__ = ["DeepSpeedEngine", "PipelineEngine"]


class _OfLayers(type):
    """The type of a class whose instances are engines of one kind of model."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, DeepSpeedEngine) and isinstance(instance.module, PipelineModule)


class PipelineEngine(DeepSpeedEngine, metaclass=_OfLayers):
    """For `isinstance`: an engine whose model is a `PipelineModule`. There is one class of engines here."""
