"""A program: a model that is built under Init, or loaded from safetensors, made ready to train its norms on a frozen
base, and hashed, a parameter at a time.

    python -m tests.support.load_large make FOLDER      writes the folder, in bounded memory
    python -m tests.support.load_large init|load FOLDER NVME_DIR [RANKS]

Prints one JSON line: parameters and their bytes, sha256 over the masters, and the most that any rank's process had of
its own (anonymous) memory, before and above that.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
from tests.support.spawn import run_ranks

LLAMA = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 26, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 8000, "max_position_embeddings": 64,
}  # fmt: skip


def make(folder: Path) -> None:
    """config.json and one shard a layer, with values from a generator."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = LlamaConfig(**LLAMA)
    shape.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in AutoModelForCausalLM.from_config(shape).state_dict().items()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "rest", []).append(name)
    generator = torch.Generator().manual_seed(0)
    for shard, names in shards.items():
        tensors = {name: torch.randn(shapes[name], generator=generator) for name in names}
        safetensors.torch.save_file(tensors, folder / f"model-{shard}.safetensors")
    index = {"weight_map": {name: f"model-{shard}.safetensors" for shard, names in shards.items() for name in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def settings(drive: str) -> dict[str, Any]:
    home = {"device": "nvme", "nvme_path": drive}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_max_live_parameters": 4e7,
            "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip


def build(rank: int, world_size: int, how: str, folder: str, drive: str) -> dict[str, Any]:
    base = anonymous_nbytes()
    began = time.perf_counter()
    if how == "load":
        model = infinity.load_hf(folder, settings(drive))
    else:
        torch.manual_seed(0)
        with infinity.Init(config=settings(drive)):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    for name, param in model.named_parameters():
        # Gradients of all parameters would take as much memory as the parameters.
        param.requires_grad_("norm" in name)
    engine, *_ = infinity.initialize(model=model, config=settings(drive))
    seconds = time.perf_counter() - began
    digest = hashlib.sha256()
    with engine:
        for param in model.parameters():
            digest.update(infinity.state(param).master.numpy())
        planned = {tier: sum(kinds.values()) for tier, kinds in engine.memory().peak.items()}
    numel = sum(param.numel() for param in model.parameters())
    return {
        "numel": numel, "nbytes": 4 * numel, "sha256": digest.hexdigest(), "seconds": seconds, "base": base,
        "peak": peak_nbytes() - base, "planned": planned,
    }  # fmt: skip


def anonymous_nbytes() -> int:
    info = psutil.Process().memory_info()
    return int(info.rss - info.shared)


def peak_nbytes() -> int:
    """Return the peak resident size of this process in bytes, without the memory that it shares now (libraries)."""
    status = Path("/proc/self/status").read_text()
    high = int(status.split("VmHWM:")[1].split()[0]) * 1024
    return high - int(psutil.Process().memory_info().shared)


def main(arguments: list[str]) -> None:
    how, folder, *rest = arguments
    if how == "make":
        make(Path(folder))
        return
    drive, ranks = rest[0], int(rest[1]) if len(rest) > 1 else 1
    results = [build(0, 1, how, folder, drive)] if ranks == 1 else run_ranks(build, ranks, how, folder, drive)
    assert len({result["sha256"] for result in results}) == 1
    print(json.dumps(max(results, key=lambda result: result["peak"])))


if __name__ == "__main__":
    main(sys.argv[1:])
