"""Train a small Llama on long sequences, on one rank or with ranks that share each sequence.

    python examples/long_sequences.py                                    16,384 tokens of a window of 1,024
    python examples/long_sequences.py --tokens 4096 --window 0           4,096 tokens of full attention
    infinity run --nproc 2 examples/long_sequences.py --ranks 2          two ranks share each sequence

Attention goes over blocks, MLPs and the loss are in tiles, and the inputs of recomputed blocks lie on the drive beside
parameters and states. The text is the documentation that comes with every Python, as bytes; the loss is in nats per
byte, and a model that knows nothing has ln 256 = 5.55.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import tempfile
import time

import torch
from transformers import MistralConfig, MistralForCausalLM

import infinity


def main(argv: list[str] | None = None) -> list[float]:
    """Train and print; return the losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="tokens of a sequence")
    parser.add_argument("--window", type=int, default=1024, help="keys that a token sees; 0: all before it")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that share each sequence")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--nvme-path", default=tempfile.gettempdir(), help="a folder on the drive")
    given = parser.parse_args(argv)
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(
            vocab_size=256, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=2,
            num_key_value_heads=2, max_position_embeddings=given.tokens, sliding_window=given.window or None,
        )
    )  # fmt: skip
    infinity.tile_sequence(model, tile_tokens=4096)
    drive = {"device": "nvme", "nvme_path": given.nvme_path}
    config = {
        "train_micro_batch_size_per_gpu": 1, "sequence_parallel_size": given.ranks,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 3, "offload_param": drive, "offload_optimizer": drive},
        "activation_checkpointing": {"every": 1, "offload": drive},
        "sparse_attention": {"mode": "dense", "block": 128},
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=model, config=config)
    text = "".join(pydoc_data.topics.topics.values()).encode()
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    batches = ({"input_ids": ids[None, step * 4096 :][:, : given.tokens]} for step in range(given.steps))
    losses = []
    with engine:
        for part in engine.sequence_batches({**batch, "labels": batch["input_ids"]} for batch in batches):
            begin = time.perf_counter()
            loss = engine(**part, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
            if engine.global_rank == 0:
                print(f"step {engine.global_steps}: loss {losses[-1]:.3f}, {time.perf_counter() - begin:.1f} s")
    return losses


if __name__ == "__main__":
    main()
