"""Task: one rank's resident memory in each phase of training, and the plan's prediction of it.

The baseline is taken when a model of one layer has been trained by the same configuration in the same process, so that
libraries, threads, queues and connections are there: what that took is the fixed overhead, reported beside it. Peaks
are the kernel's own (VmHWM), reset at the beginning of each phase.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import infinity
from estimators.phases import bytes_by_phase
from infinity.memory.tiers.pinned import trim
from infinity.plan.filling import in_process
from infinity.zero.deferred_init import WINDOW_NBYTES
from support.machine import reset_peak, resident_nbytes

# Two of them are transformers' own classes; about 60 M parameters each, and the same shapes in tiny.
SHAPES = {
    "llama": {
        "vocab_size": 16_000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6,
        "num_attention_heads": 12, "num_key_value_heads": 4,
    },
    "gpt2": {"vocab_size": 30_000, "n_embd": 768, "n_layer": 6, "n_head": 12, "n_positions": 256},
    "mlp": {"width": 2048, "inner": 4096, "layers": 4},
}  # fmt: skip
# What comes before the baseline: the same layers, which torch prepares itself for by their shapes, but one of them.
SINGLE = {
    "llama": {"vocab_size": 512, "num_hidden_layers": 1},
    "gpt2": {"vocab_size": 512, "n_layer": 1},
    "mlp": {"layers": 1},
}
CPU = {"device": "cpu", "pin_memory": False}
BOUNDS = {
    "sub_group_size": 4_000_000, "stage3_prefetch_bucket_size": 8_000_000, "stage3_max_live_parameters": 40_000_000,
    "stage3_max_reuse_distance": 8_000_000,
}  # fmt: skip
# What differs from stage 3 in fp32 with everything in memory. "nvme" and "cpu" stand for the sections of an offload.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "memory": {},
    "cpu": {"param": "cpu", "optimizer": "cpu", "bf16": True},
    "nvme": {"param": "nvme", "optimizer": "nvme", "bf16": True},
    "states": {"param": "cpu", "optimizer": "nvme", "accumulation": 2},
    "params": {"param": "nvme", "optimizer": "cpu", "bf16": True, "accumulation": 2},
    "stage 2": {"stage": 2, "optimizer": "nvme"},
    "stage 1": {"stage": 1, "optimizer": "cpu", "accumulation": 2},
}
PHASES = ("initialise", "forward", "backward", "step", "save")


class Mlp(nn.Module):
    """Residual blocks of two wide layers each."""

    def __init__(self, width: int, inner: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width)) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`model`, `configuration`, `positions`, `steps`, `folder`. Peaks are above the baseline, in bytes, by phase."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    config = configuration(options)
    imported = resident_nbytes()
    single = {**options, "shape": {**SHAPES[options["model"]], **SINGLE[options["model"]]}, "steps": 4}
    _train(single, config)
    full = {**options, "shape": SHAPES[options["model"]]}
    with torch.device("meta"):
        shapes = _model(full).to(torch.bfloat16 if config["bf16"]["enabled"] else torch.float32)
    activations = infinity.measure_activations(shapes, _batch(full, 0))
    gc.collect()
    trim()
    baseline = resident_nbytes()
    value = _train(full, config, baseline, activations.nbytes)
    return {**value, "fixed": baseline - imported, "activations": activations.nbytes}


def configuration(options: dict[str, Any]) -> dict[str, Any]:
    """The engine's configuration of a case."""
    chosen = CONFIGURATIONS[options["configuration"]]
    sections = {"cpu": CPU, "nvme": {"device": "nvme", "nvme_path": options["folder"], "pin_memory": False}}
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": chosen.get("accumulation", 1),
        "gradient_clipping": 1.0, "log_level": "error", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "bf16": {"enabled": chosen.get("bf16", False)},
        "zero_optimization": {
            "stage": chosen.get("stage", 3), **BOUNDS,
            **{f"offload_{kind}": sections[chosen[kind]] for kind in ("param", "optimizer") if kind in chosen},
        },
    }  # fmt: skip


def _train(options: dict[str, Any], config: dict[str, Any], baseline: int = 0, activations: int = 0) -> dict[str, Any]:
    measured: dict[str, list[int]] = {phase: [] for phase in PHASES}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        trim()
        reset_peak()
        yield
        measured[name].append(resident_nbytes(peak=True) - baseline)

    built_there = CONFIGURATIONS[options["configuration"]].get("param") == "nvme"
    with phase("initialise"):
        with infinity.Init(config=config) if built_there else nullcontext():
            model = _model(options)
        engine, *_ = infinity.initialize(model=model, config=config)
    used = sum(file.stat().st_blocks * 512 for file in Path(options["folder"]).glob(f"*rank{os.environ['RANK']}*"))
    with engine:
        for step in range(options["steps"]):
            for micro in range(engine.gradient_accumulation_steps()):
                inputs = _batch(options, step * 10 + micro)
                with phase("forward"):
                    output = engine(**inputs)
                    loss = output if isinstance(output, Tensor) else output.loss
                    del output
                with phase("backward"):
                    engine.backward(loss)
                del loss
                with phase("step"):
                    engine.step()
        checkpoint = Path(options["folder"]) / "checkpoint"
        with phase("save"):
            engine.save_checkpoint(checkpoint)
        if engine.global_rank == 0:
            shutil.rmtree(checkpoint)
        tables = bytes_by_phase(
            engine.plan, activations, model_nbytes_max=WINDOW_NBYTES if built_there else None
        )
        predicted = {phase.value: in_process(table, accelerator=False) for phase, table in tables.items()}
        planned = {tier.value: sum(kinds.values()) for tier, kinds in engine.plan.bytes_by_tier().items()}
        return {
            "measured": measured, "predicted": predicted, "used": used,
            "planned_nvme": engine.plan.nvme_nbytes, "planned": planned["gpu"] + planned["cpu"],
            "numel": engine.plan.numel,
        }  # fmt: skip


def _model(options: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    if options["model"] == "mlp":
        return Mlp(**options["shape"])
    transformers = importlib.import_module("transformers")
    name = {"llama": "Llama", "gpt2": "GPT2"}[options["model"]]
    head = {"llama": "ForCausalLM", "gpt2": "LMHeadModel"}[options["model"]]
    config = getattr(transformers, f"{name}Config")(**options["shape"], use_cache=False)
    return getattr(transformers, f"{name}{head}")(config).train()


def _batch(options: dict[str, Any], index: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1_000 * int(os.environ["RANK"]) + index)
    if options["model"] == "mlp":
        dtype = torch.bfloat16 if CONFIGURATIONS[options["configuration"]].get("bf16") else torch.float32
        return {"x": torch.randn(options["positions"], options["shape"]["width"], generator=generator).to(dtype)}
    ids = torch.randint(options["shape"]["vocab_size"], (1, options["positions"]), generator=generator)
    return {"input_ids": ids, "labels": ids}
