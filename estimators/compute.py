"""Floating-point operations of a training step, from the module tree and the hyper-parameters.

Multiplying a token with a matrix takes two operations an element. Backward takes twice as many as forward, or as many
if the matrix is frozen. Causal attention covers half of the sequence on average. Norms and activation functions are
left out: a profile's rate of a block includes their time.

The tensor axis of a model that is not built: its plan by architecture, what a rank computes, what ranks send.

The styles are those that the models of transformers bring; a test holds the two side by side.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import cycle
from typing import Any

from estimators.step_time import StageOperations
from infinity.config.sparse_attention import SparseAttention
from infinity.plan.block_layouts import block_layout
from infinity.plan.sequence_axis import key_heads
from infinity.plan.spec import ModuleNode
from infinity.plan.stages import StageCut
from infinity.plan.tensor_axis import HEADS, Role, TensorAxis, plan_tensor_axis, written_styles

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
    tree: ModuleNode, values: Mapping[str, Any], *, tokens: int, keys: float, checkpointing: bool, every: int = 1,
    tiled_loss: bool = False, tiled_mlps: bool = False,
) -> float:  # fmt: skip
    """Return the operations of one rank's step over `tokens` tokens, each of which meets `keys` (see `seen_keys`).

    checkpointing: backward recomputes the forward of every `every`-th layer. tiled_loss: it recomputes the logits
    too. tiled_mlps: and the MLPs, beside all recomputation.
    """
    nodes = [*tree.walk()]
    attention = 4 * keys * _attention_width(values)
    forward = 2 * active_numel(nodes, values) + attention
    passes = 2 + (1 / every if checkpointing else 0)
    # Backward's second half is the gradients of weights, and attention's own.
    weights = 2 * active_numel(nodes, values, trained=True) + attention
    again = (_head(values) if tiled_loss else 0) + (_mlps(values) if tiled_mlps else 0)
    return float(tokens * (forward * passes + weights + again))


def stage_operations(
    tree: ModuleNode, values: Mapping[str, Any], cut: StageCut, *, tokens: int, keys: float, checkpointing: bool,
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
    whole = 4 * keys * _attention_width(values)
    found = []
    for stage, own in enumerate(nodes):
        attention = whole * cut.counts[stage] / len(cut.blocks)
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


def seen_keys(values: Mapping[str, Any], sequence: int, sparse: SparseAttention | None = None) -> float:
    """Return how many keys a query is multiplied with, averaged over tokens and layers: half of the sequence under a
    causal mask. With the section, whole blocks of its layout and of a model's own window, in the layers that have them.
    """
    layers = values.get("num_hidden_layers") or values.get("n_layer") or 0
    if sparse is None or not layers:
        return sequence / 2
    heads = values.get("num_attention_heads") or values.get("n_head") or 1
    blocks = -(-sequence // sparse.block)
    whole = SparseAttention(mode="dense", block=sparse.block)
    types = values.get("layer_types") or ["sliding_attention"] * layers
    window = values.get("sliding_window") if values.get("use_sliding_window", True) else None
    kinds = Counter(
        (sparse.layers == "all" or layer in sparse.layers, window if kind == "sliding_attention" else None)
        # A config.json that was given more layers than it has kinds goes on with them in turn.
        for layer, kind in zip(range(layers), cycle(types), strict=False)
    )
    # Which blocks a run draws changes their number by little.
    return sum(
        count * block_layout(sparse if sparse_layer else whole, heads, blocks, seed=0).keys_of_causal(width)
        for (sparse_layer, width), count in kinds.items()
    ) / layers  # fmt: skip


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


def attention_columns(values: Mapping[str, Any], parts: int) -> int:
    """Return the width of the queries, keys, values and outputs that `parts` ranks of a sequence exchange, summed over
    layers; 0 for an unknown architecture.
    """
    heads = values.get("num_attention_heads", values.get("n_head"))
    hidden, layers = values.get("hidden_size", values.get("n_embd")), values.get("num_hidden_layers", 0)
    if not heads or not hidden:
        return 0
    layers = layers or values.get("n_layer", 0)
    if values.get("kv_lora_rank"):
        keys = values.get("qk_rope_head_dim", 64) + values.get("qk_nope_head_dim", 128)
        return int(layers * heads * 2 * (keys + values.get("v_head_dim", 128)))
    own = key_heads(values.get("num_key_value_heads") or heads, parts)
    return int(layers * 2 * (heads + own) * (values.get("head_dim") or hidden // heads))


_WORDS = {"lm_head": "colwise_gather_output", "model.embed_tokens": "embedding_rowwise"}
_HEADS_CUT = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
    "model.layers.*.self_attn.o_proj": "rowwise"
}
_NORMED = {f"model.layers.*.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}


def _gated(path: str) -> dict[str, str]:
    styles = {"gate": "colwise", "up": "colwise", "down": "rowwise"}
    return {f"model.layers.*.{path}.{name}_proj": style for name, style in styles.items()}


_DENSE = _gated("mlp")
_EXPERTS = {
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise", "model.layers.*.mlp.experts.down_proj": "rowwise",
    "model.layers.*.mlp.experts": "moe_tp_experts",
}  # fmt: skip
_FUSED = {
    f"model.layers.*.{path}": style
    for path, style in {
        "self_attn.qkv_proj": "colwise_gather_output", "self_attn.o_proj": "rowwise_split_input",
        "mlp.gate_up_proj": "colwise_gather_output", "mlp.down_proj": "rowwise_split_input",
    }.items()
}  # fmt: skip
_LLAMA = {**_WORDS, **_HEADS_CUT, **_DENSE}
STYLES: dict[str, dict[str, str]] = {
    "llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "gemma2": _LLAMA,
    "qwen3": {**_LLAMA, **_NORMED}, "gemma3_text": {**_LLAMA, **_NORMED},
    "mixtral": {**_WORDS, **_HEADS_CUT, **_EXPERTS},
    "qwen2_moe": {**_LLAMA, **_EXPERTS}, "qwen3_moe": {**_LLAMA, **_NORMED, **_EXPERTS},
    "deepseek_v3": {**_WORDS, **_DENSE, **_EXPERTS, **_gated("mlp.shared_experts")},
    "phi3": {**_WORDS, **_FUSED},
    # It brings none: `parallel.plan` cannot name its layers either, which are no linear ones.
    "gpt2": {},
}  # fmt: skip


def tensor_axis_of_values(
    root: ModuleNode, values: Mapping[str, Any], *, size: int, sequence: bool, given: Mapping[str, str] | None
) -> TensorAxis:
    """Plan a tensor axis for the model of a config.json, completed; the same as `tensor_axis_of` of the model."""
    kind = str(values["model_type"])
    written = written_styles(root, given, "transformer" if kind == "gpt2" else "model")
    heads = {name: values[name] for name in HEADS if isinstance(values.get(name), int)}
    return plan_tensor_axis(
        root, {**STYLES[kind], **written}, size=size, sequence=sequence, heads=heads, given=written
    )


def local_values(values: Mapping[str, Any], axis: TensorAxis) -> dict[str, Any]:
    """The sizes in a config.json as one rank computes with them in training: its part of those of divided regions, and
    of the words of a divided head, because the loss is computed of each rank's own logits.
    """
    found = dict(values)
    found["vocab_size"] //= axis.size if axis.head is not None else 1
    divided = {region.path.rpartition(".")[2] for region in axis.regions if region.divided}
    cut = {
        "self_attn": HEADS, "mlp": ("intermediate_size",), "shared_expert": ("shared_expert_intermediate_size",),
        "experts": ("moe_intermediate_size",) if values.get("moe_intermediate_size") else ("intermediate_size",),
    }  # fmt: skip
    if "self_attn" in divided:
        heads = values["num_attention_heads"]
        found["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
        found["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    for name in dict.fromkeys(name for region, names in cut.items() if region in divided for name in names):
        found[name] = found[name] // axis.size
    return found


def exchanged_nbytes(
    axis: TensorAxis, root: ModuleNode, *, tokens: int, width: int, recomputed: float = 0.0,
    runs: Callable[[str], bool] = lambda path: True,
) -> int:  # fmt: skip
    """Bytes that one rank sends to the others of its tensor group in a micro-batch's forward and backward.

    root: the whole model's tree. width: bytes of an element of activations. recomputed: the share of blocks whose
    forward runs again in backward. Rings are assumed: a sum sends its bytes twice but for a rank's own part. Along the
    sequence a sum is a gather and a scatter of the same bytes. The loss's three numbers a token are left out. runs:
    whether the rank's stages run the module at a path.
    """
    if axis.size == 1:
        return 0
    part = (axis.size - 1) / axis.size * tokens * width
    found = 0.0
    for columns, times, block in _sums(axis, root, runs):
        found += part * columns * (times if not block else times * (1 + recomputed))
    return round(found)


def _sums(axis: TensorAxis, root: ModuleNode, runs: Callable[[str], bool]) -> Iterator[tuple[int, int, bool]]:
    """(elements a token, 2 of a sum or 1 of a gather, whether it is part of a block's forward) of every exchange."""
    regions = {region.path for region in axis.regions if runs(region.path)}
    # By region, what its divided layers take.
    taken: dict[str, int] = {}
    for node in root.walk():
        role = axis.roles.get(node.path)
        if role is None or not runs(node.path):
            continue
        weight = next(iter(node.params.values())).shape
        rows, columns = weight[-2:]
        region = next((path for path in _containing(node.path) if path in regions), None)
        inside = region is not None
        if region is not None and role in (Role.COLWISE, Role.COLWISE_GATHER):
            taken.setdefault(region, columns)
        if role is Role.EMBEDDING:
            yield columns, 2, False
        elif role is Role.EXPERTS:
            hidden = node.params["gate_up_proj"].shape[-1] if "gate_up_proj" in node.params else columns
            yield hidden, 2, True
            yield hidden, 2, False
        elif role in (Role.COLWISE, Role.COLWISE_GATHER):
            if not inside:
                yield columns, 2, False
            if role is Role.COLWISE_GATHER and node.path != axis.head:
                yield rows, 1, True
        else:
            yield rows, 2, True
            if role is Role.ROWWISE_SPLIT:
                yield columns, 1, False
    for columns in taken.values():
        # The gradient of its input.
        yield columns, 2, False


def _containing(path: str) -> Iterator[str]:
    """The paths of the modules that contain the one at a path."""
    while path:
        path = path.rpartition(".")[0]
        yield path
