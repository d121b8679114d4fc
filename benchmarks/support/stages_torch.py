"""Contenders of torch's pipelining (1F1B), each stage sharded by FSDP2 over the data axis, with fused AdamW.

torch:fsdp2     each block is gathered for each forward and each backward, which is FSDP2's default
torch:gathered  a block stays gathered from its first forward to the last backward of a step (reshard_after_forward
                off), which takes more memory and fewer gathers

Gradients are summed over data ranks once a step in both. With bf16 partitions are fp32, gathered and reduced in bf16.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor

from support import stages_llama
from support.stages import STAGES
from support.training import ADAM, CLIP


def build(options: dict[str, Any]) -> _Trainer:
    """See the module's text."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, dist.get_world_size() // STAGES), mesh_dim_names=("pp", "dp"))
    index, layers = mesh["pp"].get_local_rank(), stages_llama.layers(options)
    middle = 1 + options["layers"] // STAGES
    module = nn.Sequential(*(layers[middle:] if index else layers[:middle]))
    half = options["dtype"] == "bf16"
    # Else FSDP2 gives the next stage, and the loss, what it has computed in.
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if half else MixedPrecisionPolicy()
    sharded: dict[str, Any] = {"mesh": mesh["dp"], "mp_policy": policy}
    sharded["reshard_after_forward"] = options["contender"] != "torch:gathered"
    for layer in module:
        if isinstance(layer, stages_llama.Block):
            fully_shard(layer, **sharded)
    fully_shard(module, **sharded)
    stage = PipelineStage(module, index, STAGES, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, options["micro_batches"], loss_fn=stages_llama.loss)
    return _Trainer(module, schedule, mesh)


class _Trainer:
    def __init__(self, module: nn.Module, schedule: Schedule1F1B, mesh: Any) -> None:
        self._params = list(module.parameters())
        self._schedule = schedule
        self._mesh = mesh
        self._first = mesh["pp"].get_local_rank() == 0
        self._optimizer = torch.optim.AdamW(self._params, fused=True, **ADAM)
        self.row = mesh["dp"].get_local_rank()

    def step(self, ids: Tensor) -> float:
        losses: list[Tensor] = []
        if self._first:
            self._schedule.step(ids)
        else:
            self._schedule.step(target=ids, losses=losses)
        self._clip()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._first:
            return math.nan
        loss = torch.stack([each.detach() for each in losses]).mean()
        dist.all_reduce(loss, group=self._mesh.get_group("dp"))
        return float(loss) / self._mesh["dp"].size()

    def _clip(self) -> None:
        grads = [param.grad for param in self._params if param.grad is not None]
        norm = nn.utils.get_total_norm(grads)
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        squares = whole.square()
        dist.all_reduce(squares, group=self._mesh.get_group("pp"))
        nn.utils.clip_grads_with_norm_(self._params, CLIP, squares.sqrt())

    def facts(self) -> dict[str, Any]:
        return {"version": torch.__version__}
