"""Task: training steps of a stack whose blocks are computed again, with their inputs on a tier or on the device."""

from __future__ import annotations

import hashlib
import time
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from infinity.memory.tiers.pinned import trim
from support.machine import io_nbytes, reset_peak, resident_nbytes


class _Block(nn.Module):
    """A residual feed-forward layer with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class _Stack(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(width, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x).float().square().mean()


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Options: home ("gpu", "cpu", "nvme"), width, blocks, rows, steps, dtype, stage, folder."""
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options["dtype"]]
    torch.manual_seed(0)
    model = _Stack(options["width"], options["blocks"])
    inputs: list[weakref.ref[Any]] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    engine, *_ = infinity.initialize(model=model, config=_configuration(options))
    with engine:
        found: dict[str, Any] = {"seconds": [], "peaks": [], "norms": [], "alive": 0, "moved": []}
        for step in range(1 + options["steps"]):
            torch.manual_seed(step)
            x = torch.randn(options["rows"], options["width"]).to(dtype)
            inputs.clear()
            trim()
            reset_peak()
            moved, began = io_nbytes(), time.perf_counter()
            loss = engine(x)
            alive = [ref() for ref in inputs]
            found["alive"] = sum(storage.nbytes() for storage in alive if storage is not None)
            del alive
            engine.backward(loss)
            seconds = time.perf_counter() - began
            engine.step()
            # The first step grows the space.
            if step:
                found["seconds"].append(seconds)
                found["peaks"].append(resident_nbytes(peak=True))
                found["moved"].append(sum(io_nbytes()) - sum(moved))
            found["norms"].append(engine.get_global_grad_norm())
        digest = hashlib.sha256()
        for param in model.parameters():
            digest.update(infinity.state(param).master.numpy().tobytes())
        peak = {tier: kinds.get("activation", 0) for tier, kinds in engine.memory().peak.items()}
        return {**found, "digest": digest.hexdigest(), "ledger": peak}


def _configuration(options: dict[str, Any]) -> dict[str, Any]:
    section: dict[str, Any] = {"every": 1}
    if options["home"] != "gpu":
        section["offload"] = {"device": options["home"], "nvme_path": options["folder"]}
    return {
        "train_micro_batch_size_per_gpu": 1, "log_level": "error", "bf16": {"enabled": options["dtype"] == "bf16"},
        "zero_optimization": {"stage": options["stage"], "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "activation_checkpointing": section,
    }  # fmt: skip
