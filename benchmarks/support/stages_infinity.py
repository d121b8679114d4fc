"""Contenders "infinity:stage1" and "infinity:stage3": transformers' model, cut by the engine, everything in memory.

Gradients are summed over data ranks once a step, as the peers do it.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

import infinity
from support import models
from support.stages import STAGES
from support.training import ADAM, CLIP


def build(options: dict[str, Any]) -> _Trainer:
    """See the module's text."""
    variant = options["contender"].partition(":")[2]
    count = options["layers"] // STAGES
    config = {
        "train_micro_batch_size_per_gpu": options["sequences"], "gradient_clipping": CLIP, "log_level": "error",
        "gradient_accumulation_steps": options["micro_batches"], "bf16": {"enabled": options["dtype"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": {"stage": int(variant.removeprefix("stage"))},
        "parallel": {"pipeline": STAGES, "stages": [count, options["layers"] - count], "reduce": "step"},
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=models.build(options), config=config)
    return _Trainer(engine, options["micro_batches"])


class _Trainer:
    def __init__(self, engine: Any, micro_batches: int) -> None:
        self._engine = engine
        self._micro_batches = micro_batches
        self.row = int(os.environ["RANK"]) % (int(os.environ["WORLD_SIZE"]) // STAGES)

    def step(self, ids: Tensor) -> float:
        batches = [{"input_ids": part, "labels": part} for part in ids.chunk(self._micro_batches)]
        return float(self._engine.train_batch(batches))

    def facts(self) -> dict[str, Any]:
        self._engine.close()
        return {"version": infinity.__version__}
