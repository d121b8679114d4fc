"""Contenders "infinity:memory", "infinity:cpu" and "infinity:nvme", each also with "-serial" (overlap off)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import infinity
from estimators.traffic import Link, traffic
from support import models
from support.offload import EngineTrainer, offload
from support.training import ADAM, CLIP


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """What the engine is configured with, at stage 3."""
    tier, _, serial = options["contender"].partition(":")[2].partition("-")
    zero = offload(tier, options)
    if tier in ("nvme", "states") and options.get("buffers"):
        zero["offload_optimizer"]["buffer_count"] = options["buffers"]
    return {
        "hardware_profile": options.get("profile"),
        "train_micro_batch_size_per_gpu": options["batch"], "gradient_clipping": options.get("clip", CLIP),
        "overlap": not serial, "log_level": "error", "speculative_step": options.get("speculative", "auto"),
        "bf16": {"enabled": options["dtype"] == "bf16"}, "check_grad_overflow": options.get("checked", True),
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": {"stage": 3, **zero},
    }  # fmt: skip


def build(options: dict[str, Any]) -> _Trainer:
    """An engine at stage 3. What is on NVMe is built there, unit by unit."""
    config = configuration(options)
    built_there = options["contender"].partition(":")[2].startswith("nvme")
    with infinity.Init(config=config) if built_there else nullcontext():
        model = models.build(options)
    engine, *_ = infinity.initialize(model=model, config=config)
    return _Trainer(engine)


class _Trainer(EngineTrainer):
    def settle(self) -> None:
        self._engine.synchronize()
        self._engine.store.settle()

    def facts(self) -> dict[str, Any]:
        planned = {tier.value: kinds for tier, kinds in self._engine.plan.bytes_by_tier().items()}
        table = {tier: {kind.value: nbytes for kind, nbytes in kinds.items()} for tier, kinds in planned.items()}
        memory = self._engine.memory()
        # The step reads what it writes: states that move, and every parameter once.
        stepped = 2 * traffic(self._engine.plan).total(Link.NVME_WRITE)
        norm = self._engine.get_global_grad_norm()
        self._engine.close()
        return {
            "planned": table, "ledger_peak": memory.peak, "numel": self._engine.plan.numel,
            "backward": self._backward_seconds, "step_nbytes": stepped, "norm": norm,
        }  # fmt: skip
