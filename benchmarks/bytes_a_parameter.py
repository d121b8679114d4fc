"""Claim: between two steps a process holds as many bytes a parameter as the estimate says, so that a small model sizes
a large one.

    python benchmarks/bytes_a_parameter.py [--folder DIR]

A Llama of 126 M parameters in bf16 on one rank, with its states on the device, in CPU memory or on NVMe; resident
memory after two steps above a baseline that was taken when a tiny model had been trained by the same configuration. The
last columns scale what was measured to the 7.6 billion parameters of Qwen2.5-7B.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import tempfile
from typing import Any

import torch
from support.machine import describe, resident_nbytes
from support.table import Table, claim
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from estimators.phases import at_rest
from infinity.memory.tiers.pinned import trim
from infinity.plan.filling import in_process

SMALL = {
    "vocab_size": 16_000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4,
}  # fmt: skip
LARGE_NUMEL = 7_615_616_512
LIMIT = 0.05


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    given = parser.parse_args()
    print(describe())
    table = Table(
        "memory, estimate:.2f", "measured:.2f", "drive:.2f", "7.6 B memory, GB:.1f", "drive, GB:.1f", name_width=22
    )
    worst = 0.0
    for name, device in (("all on the device", "none"), ("all in CPU memory", "cpu"), ("all on NVMe", "nvme")):
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, _process() as pool:
            planned, measured, drive, numel = pool.apply(_bytes, (device, folder))
        worst = max(worst, abs(measured / planned - 1))
        scale = LARGE_NUMEL / numel
        table.row(
            name, planned / numel, measured / numel, drive / numel, measured * scale / 1e9, drive * scale / 1e9
        )
    claim(f"bytes between two steps: largest error {worst:.1%} <= {LIMIT:.0%}", worst <= LIMIT)


def _process() -> Any:
    return multiprocessing.get_context("spawn").Pool(1)


def _bytes(device: str, folder: str) -> tuple[int, int, int, int]:
    """Bytes in memory by the plan and as measured, bytes on the drive, and the number of parameters."""
    torch.manual_seed(0)
    place = {"device": device, "pin_memory": False, **({"nvme_path": folder} if device == "nvme" else {})}
    zero = {
        "stage": 3, "offload_param": place, "offload_optimizer": place, "stage3_max_live_parameters": 40_000_000,
        "stage3_prefetch_bucket_size": 4_000_000, "sub_group_size": 1_000_000,
    }  # fmt: skip
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": zero}
    _train({**SMALL, "num_hidden_layers": 1, "vocab_size": 512}, config).close()
    baseline = _settled()
    engine = _train(SMALL, config)
    measured = _settled() - baseline
    plan = engine.plan
    with engine:
        return in_process(at_rest(plan), accelerator=False), measured, plan.nvme_nbytes, plan.numel


def _train(sizes: dict[str, Any], config: dict[str, Any]) -> Any:
    """An engine after two steps on 16 tokens."""
    model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16)
    engine = infinity.initialize(model=model, config=config)[0]
    ids = torch.randint(sizes["vocab_size"], (1, 16))
    for _ in range(2):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.synchronize()
    return engine


def _settled() -> int:
    gc.collect()
    trim()
    return resident_nbytes()


if __name__ == "__main__":
    main()
