"""The tensor axis of a model that is not built: its plan by architecture, what a rank computes, what ranks send.

The styles are those that the models of transformers bring; a test holds the two side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from infinity.plan.model_styles import HEADS, written_styles
from infinity.plan.spec import ModuleNode
from infinity.plan.tensor_axis import Role, TensorAxis
from infinity.plan.tensor_styles import plan_tensor_axis

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
