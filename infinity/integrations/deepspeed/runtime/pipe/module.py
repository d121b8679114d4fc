"""`deepspeed.runtime.pipe.module`: a model in layers."""

from infinity.integrations.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
