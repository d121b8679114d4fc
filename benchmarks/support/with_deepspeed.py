"""Contenders "deepspeed:memory", "deepspeed:cpu" and "deepspeed:nvme": stage 3 of the package that is installed.

The options are the ones that its documentation recommends for speed, with buffers no larger than the model needs:
pinned memory, reads and writes pipelined, large asynchronous requests at depth.
"""

from __future__ import annotations

from typing import Any

import deepspeed

from support import models
from support.machine import accelerator
from support.offload import EngineTrainer, offload
from support.training import ADAM, CLIP


def build(options: dict[str, Any]) -> _Trainer:
    """See the module's text."""
    tier = options["contender"].partition(":")[2]
    deepspeed.init_distributed("nccl" if accelerator() else "gloo")
    if accelerator() is None and options["dtype"] == "fp32":
        # Where the processor has no fp16 it takes bf16 in the place of fp32, and its forward fails (0.19.8).
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    model = models.build(options)
    # A staging buffer must hold the largest parameter, and the largest sub-group, which may be that one and a bit more.
    largest = max(param.numel() for param in model.parameters())
    zero = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 16_000_000}
    zero |= offload(tier, options)
    if tier in ("nvme", "states"):
        # Weight, gradient and two moments of the sub-groups that are read, stepped and written at once.
        pipelined = {"buffer_count": 12, "pipeline_read": True, "pipeline_write": True}
        zero["offload_optimizer"] |= {**pipelined, "fast_init": True}
    if tier == "nvme":
        # A sub-group is closed by the parameter that exceeds its size, which these models of equal blocks do.
        beyond = largest if options["model"] == "blocks" else 0
        buffer_numel = max(largest * 51 // 50, zero["sub_group_size"] + beyond)
        zero["offload_param"] |= {"buffer_count": 5, "buffer_size": buffer_numel, "max_in_cpu": 0}
    bf16 = {"enabled": options["dtype"] == "bf16", "check_grad_overflow": options.get("checked", True)}
    config = {
        "train_micro_batch_size_per_gpu": options["batch"], "gradient_clipping": options.get("clip", CLIP),
        "bf16": bf16, "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "aio": {
            "block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False,
            "overlap_events": True,
        },
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    return _Trainer(engine)


class _Trainer(EngineTrainer):
    def settle(self) -> None:
        """It waits for its transfers itself."""

    def facts(self) -> dict[str, Any]:
        return {"version": deepspeed.__version__}
