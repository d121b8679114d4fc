"""What infinity and DeepSpeed share: keys of stage 3 by tier, with the same values, and the training loop's verbs."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

from support import models

# Elements of an optimizer sub-group, and bounds of what is gathered, for a model of 100 M parameters that is offloaded
# to save memory. Without offload both engines run with their defaults, which gather once for forward and backward.
BOUNDS = {
    "sub_group_size": 16_000_000, "stage3_prefetch_bucket_size": 16_000_000, "stage3_max_live_parameters": 100_000_000,
    "stage3_max_reuse_distance": 32_000_000,
}  # fmt: skip


def offload(tier: str, options: dict[str, Any]) -> dict[str, Any]:
    """Parameters and optimizer states on "memory" (no offload), "cpu", "nvme", or "states" (only those on NVMe)."""
    nvme = {"device": "nvme", "nvme_path": options["folder"], "pin_memory": True}
    cpu = {"device": "cpu", "pin_memory": True}
    params, states = {"memory": (None, None), "cpu": (cpu, cpu), "nvme": (nvme, nvme), "states": (cpu, nvme)}[tier]
    section: dict[str, Any] = {**({} if tier == "memory" else BOUNDS), **(options.get("zero") or {})}
    if params is not None:
        section["offload_param"] = dict(params)
    if states is not None:
        section["offload_optimizer"] = dict(states)
    return section


class EngineTrainer:
    """The loop that infinity's and DeepSpeed's engines share; see `support.training.Trainer`."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        # Of each step.
        self._backward_seconds: list[float] = []

    def forward_backward(self, inputs: dict[str, Tensor]) -> float:
        loss = models.loss_of(self._engine(**inputs))
        begin = time.perf_counter()
        self._engine.backward(loss)
        self._backward_seconds.append(time.perf_counter() - begin)
        return loss.item()

    def step(self) -> None:
        self._engine.step()
