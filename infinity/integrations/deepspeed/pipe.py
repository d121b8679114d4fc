"""`deepspeed.pipe`: its names, so that a script can be imported; pipelines are not built yet."""

from __future__ import annotations

from typing import Any

from infinity.errors import ConfigError


class PipelineModule:
    """DeepSpeed's model for pipelines; ConfigError when one is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(
            f"{type(self).__name__}: pipeline parallelism is not built yet. Give deepspeed.initialize an ordinary "
            "nn.Module: stage 3 with offload trains what does not fit one device"
        )


class LayerSpec(PipelineModule):
    """DeepSpeed's layer of a pipeline; ConfigError when one is made."""


class TiedLayerSpec(LayerSpec):
    """DeepSpeed's layer of a pipeline that shares a weight; ConfigError when one is made."""
