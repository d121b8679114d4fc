"""`deepspeed.runtime.pipe`: the places of pipelines' names."""

from infinity.integrations.deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from infinity.integrations.deepspeed.runtime.pipe import engine, module, topology
from infinity.integrations.deepspeed.runtime.pipe.topology import ProcessTopology

__all__ = ["LayerSpec", "PipelineModule", "ProcessTopology", "TiedLayerSpec", "engine", "module", "topology"]
