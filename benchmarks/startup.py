"""Claim: a model is on NVMe, ready for its first forward, in about the time that its bytes need.

    python benchmarks/startup.py [--folder DIR] [--rounds N] [--only load,init] [--json FILE]

A Llama of 850 M parameters, bf16, one rank, everything on NVMe. `load_hf` and `initialize` against `from_pretrained` in
bf16 (the same cache: the files were just read) and the raw write of 4 bytes a parameter into a fresh file; `Init` and
`initialize` against plain construction in fp32 and the same write. Each in a process of its own, by turns; medians.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.machine import MIB, describe, median
from support.table import Table, claim

LIMIT, EXTRA_SECONDS = 1.5, 2.0
LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 15, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 20000, "max_position_embeddings": 64,
}  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="load,init")
    parser.add_argument("--layers", type=int, default=LLAMA["num_hidden_layers"])
    parser.add_argument("--json", help="file that the figures are written to")
    given = parser.parse_args()
    print(describe())
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        numel = _apart(_make, f"{folder}/model", given.layers)
        jobs: dict[str, Callable[..., Any]] = {"write": _write}
        if "load" in given.only:
            jobs.update({"from_pretrained": _from_pretrained, "load_hf + initialize": _load})
        if "init" in given.only:
            jobs.update({"plain construction": _construct, "Init + initialize": _init})
        seconds: dict[str, list[float]] = {name: [] for name in jobs}
        # Of the first and the second step.
        steps: dict[str, list[list[float]]] = {name: [] for name in jobs}
        for _ in range(given.rounds):
            for name, job in jobs.items():
                took = _apart(job, folder, numel, given.layers)
                seconds[name].append(took[0])
                steps[name].append(took[1:])
    medians = {name: median(values) for name, values in seconds.items()}
    limits = {}
    if "load" in given.only:
        limits["load_hf + initialize"] = LIMIT * max(medians["write"], medians["from_pretrained"]) + EXTRA_SECONDS
    if "init" in given.only:
        limits["Init + initialize"] = LIMIT * (medians["plain construction"] + medians["write"]) + EXTRA_SECONDS
    table = Table("s:.2f", "limit s:.2f", "first step s:.2f", "second step s:.2f", name_width=24)
    for name, value in medians.items():
        each = [median(column) for column in zip(*steps[name], strict=True)] or [None, None]
        table.row(name, value, limits.get(name), *each)
    for name, limit in limits.items():
        claim(f"{name}: {medians[name]:.2f} s, at most {limit:.2f}", medians[name] <= limit)
    if given.json:
        found = {"machine": describe(), "numel": numel, "seconds": seconds, "steps": steps, "limits": limits}
        Path(given.json).write_text(json.dumps(found, indent=1) + "\n")


def _apart(job: Callable[..., Any], *arguments: Any) -> Any:
    """A job in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(job, arguments)


def _config(layers: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**LLAMA, "num_hidden_layers": layers})


def _ours(folder: str) -> dict[str, Any]:
    drive = {"device": "nvme", "nvme_path": f"{folder}/swap"}
    return {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "warning",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
    }  # fmt: skip


def _make(folder: str, layers: int) -> int:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(_config(layers), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(param.numel() for param in model.parameters())


def _write(folder: str, numel: int, layers: int) -> list[float]:
    """4 bytes a parameter into a fresh file, in the blocks and depth that fio's best has."""
    from infinity.memory.resizable_buffer import page_aligned
    from infinity.ops.aio import File, Queue

    buffer = page_aligned(64 * MIB)
    buffer.fill_(7)
    path = Path(folder, "raw.bin")
    nbytes = 4 * numel // (64 * MIB) * (64 * MIB)
    file, queue = File.create(path, nbytes), Queue(depth=32)
    try:
        began = time.perf_counter()
        requests = [queue.write(file, at, buffer) for at in range(0, nbytes, 64 * MIB)]
        for request in requests:
            request.wait()
        return [time.perf_counter() - began]
    finally:
        queue.close()
        file.close()
        path.unlink()


def _from_pretrained(folder: str, numel: int, layers: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    began = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.bfloat16)
    return [time.perf_counter() - began]


def _construct(folder: str, numel: int, layers: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = _config(layers)
    began = time.perf_counter()
    AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return [time.perf_counter() - began]


def _load(folder: str, numel: int, layers: int) -> list[float]:
    import infinity

    began = time.perf_counter()
    return _ready(infinity.load_hf(f"{folder}/model", _ours(folder)), folder, began)


def _init(folder: str, numel: int, layers: int) -> list[float]:
    from transformers import AutoModelForCausalLM

    import infinity

    torch.manual_seed(0)
    config = _config(layers)
    began = time.perf_counter()
    with infinity.Init(config=_ours(folder)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return _ready(model, folder, began)


def _ready(model: Any, folder: str, began: float) -> list[float]:
    """Seconds until the first forward can start, and of the first and second steps."""
    import infinity

    engine, *_ = infinity.initialize(model=model, config=_ours(folder))
    seconds = [time.perf_counter() - began]
    ids = torch.arange(16).view(1, 16)
    with engine:
        for _ in range(2):
            start = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.synchronize()
            seconds.append(time.perf_counter() - start)
    shutil.rmtree(f"{folder}/swap", ignore_errors=True)
    return seconds


if __name__ == "__main__":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    main()
