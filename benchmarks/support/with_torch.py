"""Contenders of torch itself, all with fused AdamW and clipping.

torch:plain, torch:ddp      fp32; with bf16 a bf16 model and fp32 master weights and moments, the work that a
                            mixed-precision engine does
torch:held                  as plain, but gradients are kept allocated between steps: its peak, of forward and backward
                            alone, is weights, states, gradients and activations, none of them shared in time. The C
                            library's heap is kept as the engine keeps it, and so holds as much that is free
torch:pure                  bf16 weights and moments: less work, and a worse optimizer
torch:fsdp2                 fully sharded; with bf16 fp32 partitions, gathered and reduced in bf16
torch:fsdp2-offload         the same, partitions in CPU memory
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from infinity.memory.tiers.pinned import mappings_of_their_own, trim
from support import models
from support.machine import accelerator, reset_peak, resident_nbytes
from support.training import ADAM, CLIP


def build(options: dict[str, Any]) -> _Trainer:
    """See the module's text."""
    with mappings_of_their_own() if options["contender"] == "torch:held" else nullcontext():
        return _built(options)


def _built(options: dict[str, Any]) -> _Trainer:
    variant = options["contender"].partition(":")[2]
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo" if accelerator() is None else None)
    model = models.build(options).to(accelerator() or "cpu")
    half = options["dtype"] == "bf16"
    if variant.startswith("fsdp2"):
        policy = CPUOffloadPolicy(pin_memory=False) if variant.endswith("offload") else OffloadPolicy()
        _shard(model, MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16) if half else MixedPrecisionPolicy(), policy)
        return _Trainer(model, options, masters=None)
    masters = None
    if half:
        if variant != "pure":
            masters = [param.detach().clone().requires_grad_() for param in model.parameters()]
        model = model.bfloat16()
    if variant == "ddp":
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return _Trainer(wrapped, options, masters)
    return _Trainer(model, options, masters)


def _shard(model: nn.Module, precision: MixedPrecisionPolicy, policy: OffloadPolicy) -> None:
    mesh = init_device_mesh("cpu" if accelerator() is None else "cuda", (dist.get_world_size(),))
    layers = model.layers if hasattr(model, "layers") else model.model.layers
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=precision, offload_policy=policy)


class _Trainer:
    def __init__(self, model: nn.Module, options: dict[str, Any], masters: list[Tensor] | None) -> None:
        self._model = model
        self._params = list(model.parameters())
        self._masters = masters
        self._clip = options.get("clip", CLIP)
        self._held, self._peak = options["contender"] == "torch:held", 0
        self._optimizer = torch.optim.AdamW(masters or self._params, fused=True, **ADAM)

    def forward_backward(self, inputs: dict[str, Tensor]) -> float:
        if self._held:
            # What its step has needed is not one of them.
            trim()
            reset_peak()
        loss = models.loss_of(self._model(**inputs))
        loss.backward()
        if self._held:
            self._peak = max(self._peak, resident_nbytes(peak=True))
        return loss.item()

    def step(self) -> None:
        if self._clip:
            nn.utils.clip_grad_norm_(self._params, self._clip)
        if self._masters is None:
            self._optimizer.step()
        else:
            self._step_masters(self._masters)
        self._optimizer.zero_grad(set_to_none=not self._held)

    def _step_masters(self, masters: list[Tensor]) -> None:
        for master, param in zip(masters, self._params, strict=True):
            assert param.grad is not None
            master.grad = param.grad.float()
            if not self._held:
                param.grad = None
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for master, param in zip(masters, self._params, strict=True):
                param.copy_(master)

    def settle(self) -> None:
        """Nothing is ever in flight."""

    def facts(self) -> dict[str, Any]:
        def nbytes(tensors: list[Tensor]) -> int:
            return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        states = [value for state in self._optimizer.state.values() for value in state.values()]
        held = 2 * nbytes(self._params) + nbytes(self._masters or []) + nbytes(states)
        largest = max(nbytes([param]) for param in self._params)
        facts = {"held": held, "largest": largest, "numel": sum(param.numel() for param in self._params)}
        return {**facts, "peak": self._peak} if self._held else facts
