"""Floating-point operations of a training step, from the tree and the hyper-parameters.

A product of a token with a matrix takes two operations an element, backward twice as many as forward, or as many where
the matrix is frozen; a causal attention looks at half of the sequence on the average. Norms and activation functions
are left out: the rate that a profile gives for a block contains their time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infinity.plan.spec import ModuleNode


def active_numel(tree: ModuleNode, values: Mapping[str, Any], *, trained: bool = False) -> int:
    """Elements of the matrices that one token is multiplied with: of a mixture, the experts that it is sent to.

    trained: only of those that are trained.
    """
    chosen = values.get("num_experts_per_tok")
    total = 0
    for node in tree.walk():
        if node.class_name.endswith("Embedding"):
            # Rows are looked up. Where the output layer shares them, that one counts.
            continue
        for spec in node.params.values():
            if trained and not spec.trainable:
                continue
            if len(spec.shape) == 2:
                total += spec.numel
            elif len(spec.shape) == 3:
                total += spec.numel * min(chosen or spec.shape[0], spec.shape[0]) // spec.shape[0]
    return total


def step_flops(
    tree: ModuleNode, values: Mapping[str, Any], *, tokens: int, sequence: int, checkpointing: bool, every: int = 1,
    tiled_loss: bool = False,
) -> float:  # fmt: skip
    """Operations of one rank's step over `tokens` tokens in sequences of `sequence`.

    checkpointing: every `every`-th layer's forward is computed once more in backward. tiled_loss: so are the logits.
    """
    forward = 2 * active_numel(tree, values) + 2 * sequence * _attention_width(values)
    passes = 2 + (1 / every if checkpointing else 0)
    # Backward's second half is the gradients of weights, and attention's own.
    weights = 2 * active_numel(tree, values, trained=True) + 2 * sequence * _attention_width(values)
    head = 2 * values.get("vocab_size", 0) * values.get("hidden_size", values.get("n_embd", 0))
    return float(tokens * (forward * passes + weights + (head if tiled_loss else 0)))


def _attention_width(values: Mapping[str, Any]) -> int:
    """Elements of queries (and of mixed values) over all layers: products of both with the sequence are attention."""
    heads = values.get("num_attention_heads", values.get("n_head"))
    hidden = values.get("hidden_size", values.get("n_embd"))
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    if not heads or not hidden or not layers:
        return 0
    if values.get("kv_lora_rank"):
        # Queries are wider than values here: half of each product.
        wide = values.get("qk_rope_head_dim", 64) + values.get("qk_nope_head_dim", 128) + values.get("v_head_dim", 128)
        return int(layers * heads * wide // 2)
    return int(layers * heads * (values.get("head_dim") or hidden // heads))
