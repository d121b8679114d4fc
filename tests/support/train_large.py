"""A program: a Llama-style model of more than 700 M parameters, built under Init, trained 2 steps.

    python -m tests.support.train_large NVME_DIR      (or - to keep everything in memory)

Prints one JSON line: parameters, losses, sha256 over masters and moments, and the engine's own memory table.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

LLAMA = {
    "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 13, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 16000, "max_position_embeddings": 64,
}  # fmt: skip


def main(nvme: str) -> None:
    drive = {"device": "none"} if nvme == "-" else {"device": "nvme", "nvme_path": nvme}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "offload_param": drive, "offload_optimizer": drive, "stage3_max_live_parameters": 2e8,
        },
    }  # fmt: skip
    torch.manual_seed(0)
    with infinity.Init(config=config):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA))
    engine, *_ = infinity.initialize(model=model, config=config)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(2):
        tokens = torch.randint(0, LLAMA["vocab_size"], (1, 4), generator=generator)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    digest = hashlib.sha256()
    for param in model.parameters():
        state = infinity.state(param)
        for kind in ("master", "exp_avg", "exp_avg_sq"):
            digest.update(getattr(state, kind).numpy())
    numel = sum(param.numel() for param in model.parameters())
    peak = engine.memory().peak
    print(engine.plan.explain(), file=sys.stderr)
    print(engine.memory(), file=sys.stderr)
    engine.close()
    print(json.dumps({"numel": numel, "losses": losses, "sha256": digest.hexdigest(), "peak": peak}))


if __name__ == "__main__":
    main(sys.argv[1])
