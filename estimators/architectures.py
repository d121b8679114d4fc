"""Known architectures: from the hyper-parameters in a Hugging Face config.json to the tree of the model.

A tree has the names, shapes and class names that the model in transformers has, so that the plan made from it is the
plan that the engine makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from estimators.decoders import (
    DecoderConfig,
    Module,
    Style,
    deepseek,
    gpt2,
    llama,
    mixtral_experts,
    qwen2_experts,
    qwen3_experts,
)
from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, ParamSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to build one `model_type`, and the values of hyper-parameters that its config.json may leave out."""

    build: Callable[[DecoderConfig, str], Module]
    prefix: str
    # The suffix of the repeated block's class: what transformers lists as not to be split.
    block: str
    defaults: Mapping[str, Any]


def known() -> tuple[str, ...]:
    """The values of `model_type` that can be built."""
    return tuple(_ARCHITECTURES)


def model_tree(values: Mapping[str, Any], *, compute_dtype: str) -> ModuleNode:
    """The tree of the causal language model that a config.json describes; ConfigError for an unknown one."""
    architecture = _architecture(values)
    root = architecture.build(DecoderConfig(values, architecture.defaults), architecture.prefix)
    return _grow(root, "", _specs(root, compute_dtype))


def block_classes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names of the blocks that transformers lists as not to be split."""
    architecture = _architecture(values)
    return (architecture.prefix + architecture.block,)


def completed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with those that the file leaves out."""
    return {**_architecture(values).defaults, **values}


def _architecture(values: Mapping[str, Any]) -> Architecture:
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        near = get_close_matches(str(model_type), _ARCHITECTURES, n=1)
        raise ConfigError(
            f"model_type {model_type!r} is not one that can be sized: there are {', '.join(known())}. "
            + (f"Did you mean {near[0]!r}? " if near else "")
            + "A model of Llama's shape can be sized from plain numbers (--layers, --hidden, ...)."
        )
    return _ARCHITECTURES[model_type]


def _specs(root: Module, dtype: str) -> dict[str, ParamSpec]:
    """Every parameter by each of its names; tied names share one specification."""
    shapes: dict[str, tuple[int, ...]] = {}

    def collect(module: Module, path: str) -> None:
        shapes.update((_join(path, name), shape) for name, shape in module.params.items())
        for name, child in module.children.items():
            collect(child, _join(path, name))

    collect(root, "")
    specs = {}
    for name, shape in shapes.items():
        if name not in root.ties:
            others = tuple(other for other, first in root.ties.items() if first == name)
            specs[name] = ParamSpec(name=name, shape=shape, dtype=dtype, tied=others)
    return {name: specs[root.ties.get(name, name)] for name in shapes}


def _grow(module: Module, path: str, specs: Mapping[str, ParamSpec]) -> ModuleNode:
    return ModuleNode(
        path=path,
        class_name=module.class_name,
        params={name: specs[_join(path, name)] for name in module.params},
        children={name: _grow(child, _join(path, name), specs) for name, child in module.children.items()},
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, **others,
    }  # fmt: skip


def _member(prefix: str, style: Style, defaults: Mapping[str, Any]) -> Architecture:
    """A model of Llama's family."""
    return Architecture(lambda hyper, name: llama(hyper, name, style), prefix, "DecoderLayer", defaults)


_GEMMA = _sizes(256_000, 2304, 9216, 26, 8, num_key_value_heads=4, head_dim=256, tie_word_embeddings=True)
# The defaults are those of the configuration classes in transformers: a saved file leaves out what equals them.
_ARCHITECTURES: dict[str, Architecture] = {
    "llama": _member(
        "Llama", Style("attention_bias", "attention_bias", "mlp_bias"), _sizes(32_000, 4096, 11_008, 32, 32)
    ),
    "mistral": _member("Mistral", Style(), _sizes(32_000, 4096, 14_336, 32, 32, num_key_value_heads=8)),
    "qwen2": _member(
        "Qwen2", Style(input_bias=True), _sizes(151_936, 4096, 22_016, 32, 32, num_key_value_heads=32)
    ),
    "qwen3": _member(
        "Qwen3", Style("attention_bias", "attention_bias", normed_heads=True),
        _sizes(151_936, 4096, 22_016, 32, 32, num_key_value_heads=32, head_dim=128),
    ),
    "mixtral": _member(
        "Mixtral", Style(experts=mixtral_experts),
        _sizes(32_000, 4096, 14_336, 32, 32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen2_moe": _member(
        "Qwen2Moe", Style("qkv_bias", experts=qwen2_experts),
        _sizes(
            151_936, 2048, 5632, 24, 16, num_key_value_heads=16, num_experts=60, num_experts_per_tok=4,
            moe_intermediate_size=1408, shared_expert_intermediate_size=5632, decoder_sparse_step=1, qkv_bias=True,
        ),
    ),
    "qwen3_moe": _member(
        "Qwen3Moe", Style("attention_bias", "attention_bias", normed_heads=True, experts=qwen3_experts),
        _sizes(
            151_936, 2048, 6144, 24, 32, num_key_value_heads=4, num_experts=128, num_experts_per_tok=8,
            moe_intermediate_size=768, decoder_sparse_step=1,
        ),
    ),
    "deepseek_v3": Architecture(
        deepseek, "DeepseekV3", "DecoderLayer",
        _sizes(
            129_280, 7168, 18_432, 61, 128, num_key_value_heads=128, n_routed_experts=256, num_experts_per_tok=8,
            n_shared_experts=1, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
            kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
        ),
    ),
    "gemma2": _member(
        "Gemma2",
        Style("attention_bias", "attention_bias", sandwich=True, embedding="Gemma2TextScaledWordEmbedding"),
        {**_GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": _member(
        "Gemma3",
        Style(
            "attention_bias", "attention_bias", normed_heads=True, sandwich=True, body="TextModel",
            embedding="Gemma3TextScaledWordEmbedding",
        ),
        {**_GEMMA, "vocab_size": 262_208},
    ),
    "phi3": _member("Phi3", Style(fused=True), _sizes(32_064, 3072, 8192, 32, 32)),
    "gpt2": Architecture(
        gpt2, "GPT2", "Block",
        {
            "vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
