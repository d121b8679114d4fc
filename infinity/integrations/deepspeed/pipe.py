"""`deepspeed.pipe`: a model in layers, for pipelines."""

from __future__ import annotations

from infinity.parallel.layers import LayerSpec, TiedLayerSpec
from infinity.parallel.module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
