"""Claim: estimates of activations are within 10 % of what a pass takes, with and without checkpointing.

    python benchmarks/activations.py [--dtype fp32|bf16] [--attention sdpa|eager] [--only llama] [--small]

A Llama with grouped queries and a GPT-2 at three shapes: short and long sequences, and a large vocabulary. Each row has
the peak by torch's own allocator, and the errors of the closed form (`estimators.activations`) and of measured shapes
(`infinity.measure_activations`). Each row is a process of its own.
"""

from __future__ import annotations

import argparse
from typing import Any

from support.launch import run_ranks
from support.machine import MIB, describe
from support.table import Table, claim

LIMIT = 0.10
# Batch, sequence, and what the shape changes of the model.
RUNS: dict[str, tuple[int, int, dict[str, int]]] = {
    "8 x 250": (8, 250, {}), "2 x 1100": (2, 1100, {}), "4 x 300, vocabulary": (4, 300, {"vocab_size": 32_000}),
}  # fmt: skip
MODELS: dict[str, dict[str, int]] = {
    "llama": {
        "vocab_size": 4100, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 6,
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    },
    "gpt2": {"vocab_size": 4100, "n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 2048},
}  # fmt: skip
SMALL = {"llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 2}}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--attention", choices=("sdpa", "eager"), default="sdpa")
    parser.add_argument("--only", choices=tuple(MODELS), help="one model instead of both")
    parser.add_argument("--small", action="store_true", help="two blocks, and the first shape only")
    given = parser.parse_args()
    print(describe())
    print(f"{given.dtype}, {given.attention} attention; MiB beside parameters and gradients")
    table = Table("peak:.1f", "closed form:.1f", "error:+.1%", "shapes:.1f", "error:+.1%", "s:.1f", name_width=38)
    worst = {"closed": 0.0, "shapes": 0.0}
    for model in (given.only,) if given.only else MODELS:
        for name, (batch, sequence, change) in [*RUNS.items()][: 1 if given.small else None]:
            for checkpointing in (False, True):
                shape = {**MODELS[model], **change, **(SMALL[model] if given.small else {})}
                options: dict[str, Any] = {
                    "model": model, "shape": shape, "batch": batch, "sequence": sequence, "dtype": given.dtype,
                    "checkpointing": checkpointing, "attention": given.attention,
                }  # fmt: skip
                (value,) = run_ranks("activation_peak", options)
                errors = {kind: value[kind] / value["peak"] - 1 for kind in worst}
                worst = {kind: max(worst[kind], abs(errors[kind])) for kind in worst}
                table.row(
                    f"{model}, {name}{', checkpointed' if checkpointing else ''}", value["peak"] / MIB,
                    value["closed"] / MIB, errors["closed"], value["shapes"] / MIB, errors["shapes"], value["seconds"],
                )  # fmt: skip
    for kind, error in worst.items():
        what = {"closed": "the closed form", "shapes": "measured shapes"}[kind]
        claim(f"largest error of {what} {error:.1%} <= {LIMIT:.0%}", error <= LIMIT)


if __name__ == "__main__":
    main()
