"""Claim: where everything fits, experts a few at a time take at most 1.03 times as long as a layer's experts gathered
together, by either of transformers' implementations.

    python benchmarks/experts.py [--tokens 1024] [--rounds 9] [--json FILE]

A Mixtral of 56 M parameters in bf16, everything in CPU memory: three engines in one process, whole steps by turns.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from support.machine import describe, median
from support.table import Table
from transformers import AutoConfig, AutoModelForCausalLM

import infinity

LIMIT = 1.03
# Name, transformers' implementation, elements of a unit of experts.
RUNS = (("eager", "eager", 0), ("grouped_mm", "grouped_mm", 0), ("a few at a time", "eager", 3 * 512 * 1024))


def engine_of(implementation: str, numel: int) -> Any:
    """An engine on a model of its own."""
    config = AutoConfig.for_model(
        "mixtral", vocab_size=2000, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
    model.set_experts_implementation(implementation)
    device = {"device": "cpu"}
    wanted = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "log_level": "error",
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3, "offload_param": device, "offload_optimizer": device, "tile_parameters": numel,
        },
    }  # fmt: skip
    engine = infinity.initialize(model=model, config=wanted)[0]
    assert any(layout.routed for layout in engine.plan.layouts) is bool(numel)
    return engine


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="file to record in")
    given = parser.parse_args()
    print(describe())
    engines = {name: engine_of(implementation, numel) for name, implementation, numel in RUNS}
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(given.rounds + 2):
        ids = torch.randint(3, 2000, (1, given.tokens))
        for name, engine in engines.items():
            began = time.perf_counter()
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.synchronize()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
    table = Table("seconds a step:.3f", "of it, a few at a time:.3f")
    rows, few = [], seconds["a few at a time"]
    for name, each in seconds.items():
        share = median([mine / other for mine, other in zip(few, each, strict=True)])
        table.row(name, median(each), share)
        if each is not few:
            rows.append(
                {"what": f"a step with experts a few at a time, of one with {name}", "figures": [round(share, 3)],
                 "limit": f"<= {LIMIT}"}
            )  # fmt: skip
    if given.json is not None:
        given.json.write_text(
            json.dumps({
                "topic": "Experts a few at a time", "claim": "Experts a few at a time cost nothing where all fit.",
                "command": "python benchmarks/experts.py --json benchmarks/results/experts.json",
                "machine": describe(), "date": f"{date.today()}",
                "how": f"Mixtral of 56 M parameters, {given.tokens} tokens, CPU memory; medians of {given.rounds}.",
                "rows": rows,
            }, indent=1) + "\n"
        )  # fmt: skip
    for engine in engines.values():
        engine.close()


if __name__ == "__main__":
    main()
