"""Contender "deepspeed:stage1": the PipelineModule of the package that is installed, over gloo, stage 1, in memory.

Stages 2 and 3 it refuses under a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.pipe import PipelineModule
from torch import Tensor

from support import stages_llama
from support.stages import STAGES
from support.training import ADAM, CLIP


def build(options: dict[str, Any]) -> _Trainer:
    """See the module's text."""
    deepspeed.init_distributed("gloo")
    if options["dtype"] == "fp32":
        # Where the processor has no fp16 it takes bf16 in the place of fp32 (0.19.8).
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = PipelineModule(
        stages_llama.layers(options), num_stages=STAGES, loss_fn=stages_llama.loss, partition_method="type:Block"
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": options["sequences"], "gradient_clipping": CLIP,
        "gradient_accumulation_steps": options["micro_batches"], "bf16": {"enabled": options["dtype"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": {"stage": 1}, "steps_per_print": 1_000_000,
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return _Trainer(engine, options["micro_batches"])


class _Trainer:
    def __init__(self, engine: Any, micro_batches: int) -> None:
        self._engine = engine
        self._micro_batches = micro_batches
        self.row = engine.grid.get_data_parallel_rank()

    def step(self, ids: Tensor) -> float:
        batches: Iterator[tuple[Tensor, Tensor]] = ((part, part) for part in ids.chunk(self._micro_batches))
        return float(self._engine.train_batch(batches))

    def facts(self) -> dict[str, Any]:
        return {"version": deepspeed.__version__}
