"""Floating-point operations of a training step, from the module tree and the hyper-parameters.

Multiplying a token with a matrix takes two operations an element. Backward takes twice as many as forward, or as many
if the matrix is frozen. Causal attention covers half of the sequence on average. Norms and activation functions are
left out: a profile's rate of a block includes their time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from infinity.plan.spec import ModuleNode
from infinity.plan.stages import StageCut
from infinity.simulator.pipeline_step import StageOperations

# The class of layers whose weight gradients a split backward computes later.
_LINEAR = "Linear"


def active_numel(
    nodes: Iterable[ModuleNode], values: Mapping[str, Any], *, trained: bool = False
) -> int:
    """Return the elements of the matrices that one token is multiplied with; in a mixture of experts, only those of the
    experts that the token is routed to.

    nodes: the modules that it passes. trained: count trained matrices only.
    """
    chosen = values.get("num_experts_per_tok")
    total = 0
    for node in nodes:
        if node.class_name.endswith("Embedding"):
            # Rows are looked up. If the output layer shares the table, the output layer counts.
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
    tiled_loss: bool = False, tiled_mlps: bool = False,
) -> float:  # fmt: skip
    """Return the operations of one rank's step over `tokens` tokens in sequences of `sequence`.

    checkpointing: backward recomputes the forward of every `every`-th layer. tiled_loss: it recomputes the logits
    too. tiled_mlps: and the MLPs, beside all recomputation.
    """
    nodes = [*tree.walk()]
    forward = 2 * active_numel(nodes, values) + 2 * sequence * _attention_width(values)
    passes = 2 + (1 / every if checkpointing else 0)
    # Backward's second half is the gradients of weights, and attention's own.
    weights = 2 * active_numel(nodes, values, trained=True) + 2 * sequence * _attention_width(values)
    again = (_head(values) if tiled_loss else 0) + (_mlps(values) if tiled_mlps else 0)
    return float(tokens * (forward * passes + weights + again))


def stage_operations(
    tree: ModuleNode, values: Mapping[str, Any], cut: StageCut, *, tokens: int, sequence: int, checkpointing: bool,
    every: int = 1, tiled_loss: bool = False, tiled_mlps: bool = False,
) -> tuple[StageOperations, ...]:  # fmt: skip
    """Return the same for each stage of a pipeline, by kind of action. Only linear layers compute the gradients of
    their weights apart from those of their inputs.
    """
    nodes: list[list[ModuleNode]] = [[] for _ in cut.counts]
    for node in tree.walk():
        if node.params:
            for stage in cut.stages_at(node.path):
                nodes[stage].append(node)
    found = []
    for stage, own in enumerate(nodes):
        attention = 2 * sequence * _attention_width(values) * cut.counts[stage] / len(cut.blocks)
        forward = 2 * active_numel(own, values) + attention
        weights = 2 * active_numel(own, values, trained=True)
        deferred = 2 * active_numel([node for node in own if node.class_name == _LINEAR], values, trained=True)
        again = forward / every if checkpointing else 0.0
        again += _head(values) if stage == cut.last and tiled_loss else 0
        again += _mlps(values) * cut.counts[stage] / len(cut.blocks) if tiled_mlps else 0
        found.append(
            StageOperations(
                forward=tokens * forward, backward_weight=float(tokens * deferred),
                backward_input=tokens * (forward + again + attention + weights - deferred),
            )
        )  # fmt: skip
    return tuple(found)


def _head(values: Mapping[str, Any]) -> int:
    """Return the operations of the logits of one token."""
    return int(2 * values.get("vocab_size", 0) * values.get("hidden_size", values.get("n_embd", 0)))


def _mlps(values: Mapping[str, Any]) -> int:
    """Return the operations of one token's forward through the MLPs of all layers, with their gates."""
    width = values.get("hidden_size", 0) * values.get("intermediate_size", 0)
    return int(6 * width * values.get("num_hidden_layers", 0))


def _attention_width(values: Mapping[str, Any]) -> int:
    """Return the width of the queries, summed over layers; attention multiplies queries and values by the sequence."""
    heads = values.get("num_attention_heads", values.get("n_head"))
    hidden = values.get("hidden_size", values.get("n_embd"))
    layers = values.get("num_hidden_layers", values.get("n_layer"))
    if not heads or not hidden or not layers:
        return 0
    if values.get("kv_lora_rank"):
        # Queries are wider than values here: each product counts half.
        wide = values.get("qk_rope_head_dim", 64) + values.get("qk_nope_head_dim", 128) + values.get("v_head_dim", 128)
        return int(layers * heads * wide // 2)
    return int(layers * heads * (values.get("head_dim") or hidden // heads))
