"""One rank trains a Llama for a step, exports it and saves it: memory and time of the exports."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from infinity.memory.tiers.pinned import trim
from support.machine import reset_peak, resident_nbytes

WIDTH, VOCABULARY = 2048, 32000


def run(options: dict[str, Any]) -> dict[str, Any]:
    """See the module's text; bytes and seconds."""
    folder = Path(options["folder"])
    # About 51 M parameters a layer, and an embedding and a head of 66 M each.
    width = WIDTH if options["numel"] > 3e8 else 128
    vocabulary = VOCABULARY if width == WIDTH else 1000
    layers = max(round((options["numel"] - 2 * width * vocabulary) / (12.25 * width * width)), 1)
    place = {"device": options["tier"], "pin_memory": False}
    if options["tier"] == "nvme":
        place["nvme_path"] = str(folder / "drive")
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "parallel": options["parallel"],
        "zero_optimization": {"stage": 3, "offload_param": place, "offload_optimizer": place,
                              "stage3_max_live_parameters": 2 * width * vocabulary},
    }  # fmt: skip
    torch.manual_seed(0)
    with infinity.Init(config=config):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=int(2.75 * width), num_hidden_layers=layers,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=128, use_cache=False,
        ))  # fmt: skip
    engine = infinity.initialize(model=model, config=config)[0]
    found: dict[str, Any] = {"numel": sum(layout.numel for layout in engine.plan.layouts)}
    with engine:
        ids = torch.randint(vocabulary, (1, 8))
        engine.train_batch([{"input_ids": ids, "labels": ids}])
        engine.synchronize()
        for dtype in ("bf16", "fp32"):
            gc.collect()
            trim()
            reset_peak()
            before, began = resident_nbytes(), time.perf_counter()
            engine.export(folder / dtype, dtype=dtype)
            found[dtype] = {"seconds": time.perf_counter() - began, "extra": resident_nbytes(peak=True) - before}
        engine.save_checkpoint(folder / "saved")
    return found
