"""The hashes that a change of structure must leave alone: 20 steps of a Llama, three placements in two precisions.

    python -m tests.bit_hashes [--folder DIR]

Prints one line for each precision and placement: sha256 over losses, masters and moments. The placements of a precision
must agree; and the lines must be those of the commit before.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity

SIZES = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
STEPS = 20
PLACEMENTS = ("none", "cpu", "nvme")


def digest(precision: str, device: str, folder: str) -> str:
    """Train `STEPS` clipped steps of two micro-batches with everything on one tier."""
    home: dict[str, Any] = {"device": device, **({"nvme_path": folder} if device == "nvme" else {})}
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "log_level": "error", "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3, "offload_param": home, "offload_optimizer": home, "stage3_param_persistence_threshold": 0,
        },
        **({"bf16": {"enabled": True}} if precision == "bf16" else {}),
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, vocab_size=512, max_position_embeddings=64))
    engine, *_ = infinity.initialize(model=model, config=config)
    generator, found = torch.Generator().manual_seed(1), hashlib.sha256()
    with engine:
        for _ in range(2 * STEPS):
            tokens = torch.randint(0, 512, (2, 32), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens).loss
            engine.backward(loss)
            engine.step()
            found.update(loss.detach().float().numpy().tobytes())
        for param in model.parameters():
            state = infinity.state(param)
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                found.update(getattr(state, kind).numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    """Print the hashes; an assertion holds that placement does not show."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="a folder on the drive")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for precision in ("fp32", "bf16"):
        lines = []
        for device in PLACEMENTS:
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                lines.append(digest(precision, device, folder))
            print(f"{precision:<5}{device:<5}{lines[-1]}", flush=True)
        assert len(set(lines)) == 1, "the placement shows in the result"


if __name__ == "__main__":
    main()
