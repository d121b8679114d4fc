"""Task: train a model whose one wide linear layer is most of it, by plain torch or by an engine, and say what it took.

Masters after the last step are written to, or compared with those in, a file of the folder. Resident memory is the
kernel's (VmHWM) in forward and backward, above a baseline that is taken when a narrow model has been trained by the
same configuration in the same process.
"""

from __future__ import annotations

import gc
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from estimators.phases import Phase, bytes_by_phase
from infinity.memory.tiers.pinned import trim
from infinity.plan.filling import in_process
from support.machine import reset_peak, resident_nbytes

ADAM = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-4, "weight_decay": 0.05}


class Wide(nn.Module):
    """A small layer, and one with as many outputs as a vocabulary has words."""

    def __init__(self, width: int, rows: int) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.wide = nn.Linear(width, rows)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.wide(F.gelu(self.enter(x))).float(), y)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`how` ("torch", "whole" or "tiled"), `dtype`, `tier`, `width`, `rows`, `tokens`, `steps`, `world`, `folder`.

    In fp32 masters are compared with plain torch's; in bf16 those of "whole" are, too, and those of "tiled" with them.
    """
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    if options["how"] == "torch":
        return _by_torch(options)
    config = _configuration(options)
    _train({**options, "rows": 512, "steps": 3}, config, 0)
    gc.collect()
    trim()
    baseline = resident_nbytes()
    return _train(options, config, baseline)


def live_numel(options: dict[str, Any]) -> int:
    """The gather budget in elements: a quarter of the wide layer."""
    return options["width"] * options["rows"] // 4


def _configuration(options: dict[str, Any]) -> dict[str, Any]:
    home = {"device": options["tier"], "nvme_path": options["folder"], "pin_memory": False}
    tiles = {"tile_parameters": 0} if options["how"] == "whole" else {}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "log_level": "error",
        "bf16": {"enabled": options["dtype"] == "bf16"},
        "optimizer": {"type": "AdamW", "params": {**ADAM, "betas": list(ADAM["betas"])}},
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "sub_group_size": 2_000_000,
            "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": live_numel(options),
            "stage3_prefetch_bucket_size": live_numel(options) // 4, **tiles,
        },
    }  # fmt: skip


def _model(options: dict[str, Any]) -> Wide:
    torch.manual_seed(0)
    return Wide(options["width"], options["rows"])


def _batch(options: dict[str, Any], rank: int, step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(options["tokens"], options["width"], generator=generator)
    y = torch.randint(options["rows"], (options["tokens"],), generator=generator)
    return {"x": x.to(torch.bfloat16) if options["dtype"] == "bf16" else x, "y": y}


def _by_torch(options: dict[str, Any]) -> dict[str, Any]:
    model = _model(options)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    for step in range(options["steps"]):
        for rank in range(options["world"]):
            (model(**_batch(options, rank, step)) / options["world"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save(model.state_dict(), _file(options, "torch"))
    return {}


def _train(options: dict[str, Any], config: dict[str, Any], baseline: int) -> dict[str, Any]:
    model = _model(options)
    with torch.device("meta"):
        shapes = Wide(options["width"], options["rows"])
    batch = _batch(options, 0, 0)
    activations = infinity.measure_activations(shapes.to(batch["x"].dtype), batch).nbytes if baseline else 0
    engine, *_ = infinity.initialize(model=model, config=config)
    trim()
    with engine:
        peaks = {Phase.FORWARD: 0, Phase.BACKWARD: 0}
        for step in range(options["steps"]):
            reset_peak()
            loss = engine(**_batch(options, engine.global_rank, step))
            peaks[Phase.FORWARD] = max(peaks[Phase.FORWARD], resident_nbytes(peak=True) - baseline)
            reset_peak()
            engine.backward(loss)
            peaks[Phase.BACKWARD] = max(peaks[Phase.BACKWARD], resident_nbytes(peak=True) - baseline)
            del loss
            engine.step()
        engine.synchronize()
        tables = bytes_by_phase(engine.plan, activations)
        width = 2 if options["dtype"] == "bf16" else 4
        apart, norm = _apart(model, options) if baseline else (0.0, 0.0)
        return {
            "apart": apart, "norm": norm, "gathered": engine.memory().peak["gpu"]["full"],
            "tiles": sum(layout.is_tile for layout in engine.plan.layouts), "budget": width * live_numel(options),
            "resident": max(peaks.values()),
            "planned": max(in_process(tables[phase], accelerator=False) for phase in peaks),
        }  # fmt: skip


def _apart(model: Wide, options: dict[str, Any]) -> tuple[float, float]:
    """The greatest difference of a master weight from the reference, and the norm of all differences."""
    masters = {name: infinity.state(param).master for name, param in model.named_parameters()}
    twice = options["dtype"] == "bf16"
    if twice and options["how"] == "whole" and int(os.environ["RANK"]) == 0:
        torch.save(masters, _file(options, "whole"))
    reference = torch.load(_file(options, "whole" if twice and options["how"] == "tiled" else "torch"), mmap=True)
    apart = [masters[name] - reference[name] for name in masters]
    return max(float(each.abs().max()) for each in apart), math.hypot(*(float(each.norm()) for each in apart))


def _file(options: dict[str, Any], how: str) -> Path:
    return Path(options["folder"]) / f"{how}-{options['world']}.pt"
