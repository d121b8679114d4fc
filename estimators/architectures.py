"""The module trees of known architectures, from the hyper-parameters in a Hugging Face config.json.

A tree has the names, shapes and class names that the model in transformers has, so that the plan made from it is the
plan that the engine makes. Modules without parameters are left out: no plan depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, ParamSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """How to build one `model_type`, and the values of hyper-parameters that its config.json may leave out."""

    build: Callable[[Hyper, str], Module]
    prefix: str
    # The suffix of the repeated block's class: what transformers lists as not to be split.
    block: str
    defaults: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Module:
    """A module to be: class, shapes of its own parameters, children by attribute name."""

    class_name: str
    params: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    children: Mapping[str, Module] = field(default_factory=dict)
    # Full parameter name -> full name of the parameter that it is another name for.
    ties: Mapping[str, str] = field(default_factory=dict)


class Hyper:
    """The values of one config.json, or the architecture's defaults; a wrong or missing one is named."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._values = {**defaults, **{name: value for name, value in values.items() if value is not None}}

    def size(self, name: str, otherwise: int | None = None) -> int:
        """A positive whole number; `otherwise` where the file leaves it open."""
        value = self._values.get(name)
        if value is None:
            value = otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"the model's {name} is {value!r}; it must be a positive whole number")
        return value

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name))


def known() -> tuple[str, ...]:
    """The values of `model_type` that can be built."""
    return tuple(_ARCHITECTURES)


def model_tree(values: Mapping[str, Any], *, compute_dtype: str) -> ModuleNode:
    """The tree of the causal language model that a config.json describes; ConfigError for an unknown one."""
    architecture = _architecture(values)
    root = architecture.build(Hyper(values, architecture.defaults), architecture.prefix)
    return _grow(root, "", _specs(root, compute_dtype))


def block_classes(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Class names of the blocks that transformers lists as not to be split."""
    architecture = _architecture(values)
    return (architecture.prefix + architecture.block,)


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


def _affine(class_name: str, weight: tuple[int, ...], bias: int = 0) -> Module:
    """A module with a weight and, where `bias` is not 0, a bias of that size."""
    return Module(class_name, {"weight": weight, **({"bias": (bias,)} if bias else {})})


def _linear(inputs: int, outputs: int, bias: bool = False) -> Module:
    return _affine("Linear", (outputs, inputs), outputs if bias else 0)


def _repeat(module: Module, count: int) -> Module:
    return Module("ModuleList", children={str(index): module for index in range(count)})


def _llama(hyper: Hyper, prefix: str) -> Module:
    """Llama and what was built in its image: Mistral, Qwen2, Qwen3, Mixtral."""
    hidden, vocabulary = hyper.size("hidden_size"), hyper.size("vocab_size")
    norm = _affine(f"{prefix}RMSNorm", (hidden,))
    layer = Module(
        f"{prefix}DecoderLayer",
        children={
            "self_attn": _attention(hyper, prefix, hidden, norm.class_name),
            "mlp": _experts(hyper, prefix, hidden) if prefix == "Mixtral" else _feed_forward(hyper, prefix, hidden),
            "input_layernorm": norm,
            "post_attention_layernorm": norm,
        },
    )
    body = Module(
        f"{prefix}Model",
        children={
            "embed_tokens": _affine("Embedding", (vocabulary, hidden)),
            "layers": _repeat(layer, hyper.size("num_hidden_layers")),
            "norm": norm,
        },
    )
    tied = hyper.flag("tie_word_embeddings")
    return Module(
        f"{prefix}ForCausalLM",
        children={"model": body, "lm_head": _linear(hidden, vocabulary)},
        ties={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )


def _attention(hyper: Hyper, prefix: str, hidden: int, norm_class: str) -> Module:
    heads = hyper.size("num_attention_heads")
    head_dim = hyper.size("head_dim", hidden // heads)
    key_width = hyper.size("num_key_value_heads", heads) * head_dim
    # Qwen2 has biases on its inputs whatever the file says, Mistral and Mixtral have none.
    all_biased = prefix in ("Llama", "Qwen3") and hyper.flag("attention_bias")
    inputs_biased = all_biased or prefix == "Qwen2"
    children = {
        "q_proj": _linear(hidden, heads * head_dim, inputs_biased),
        "k_proj": _linear(hidden, key_width, inputs_biased),
        "v_proj": _linear(hidden, key_width, inputs_biased),
        "o_proj": _linear(heads * head_dim, hidden, all_biased),
    }
    if prefix == "Qwen3":
        children |= {name: _affine(norm_class, (head_dim,)) for name in ("q_norm", "k_norm")}
    return Module(f"{prefix}Attention", children=children)


def _feed_forward(hyper: Hyper, prefix: str, hidden: int) -> Module:
    inner = hyper.size("intermediate_size")
    biased = prefix == "Llama" and hyper.flag("mlp_bias")
    return Module(
        f"{prefix}MLP",
        children={
            "gate_proj": _linear(hidden, inner, biased),
            "up_proj": _linear(hidden, inner, biased),
            "down_proj": _linear(inner, hidden, biased),
        },
    )


def _experts(hyper: Hyper, prefix: str, hidden: int) -> Module:
    inner, count = hyper.size("intermediate_size"), hyper.size("num_local_experts")
    shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    return Module(
        f"{prefix}SparseMoeBlock",
        children={
            "gate": _affine(f"{prefix}TopKRouter", (count, hidden)),
            "experts": Module(f"{prefix}Experts", shapes),
        },
    )


def _gpt2(hyper: Hyper, prefix: str) -> Module:
    width = hyper.size("n_embd")
    inner = hyper.size("n_inner", 4 * width)
    norm = _affine("LayerNorm", (width,), width)

    def conv(inputs: int, outputs: int) -> Module:
        return _affine("Conv1D", (inputs, outputs), outputs)

    attention = Module(f"{prefix}Attention", children={"c_attn": conv(width, 3 * width), "c_proj": conv(width, width)})
    feed_forward = Module(f"{prefix}MLP", children={"c_fc": conv(width, inner), "c_proj": conv(inner, width)})
    block = Module(f"{prefix}Block", children={"ln_1": norm, "attn": attention, "ln_2": norm, "mlp": feed_forward})
    body = Module(
        f"{prefix}Model",
        children={
            "wte": _affine("Embedding", (hyper.size("vocab_size"), width)),
            "wpe": _affine("Embedding", (hyper.size("n_positions"), width)),
            "h": _repeat(block, hyper.size("n_layer")),
            "ln_f": norm,
        },
    )
    tied = hyper.flag("tie_word_embeddings")
    return Module(
        f"{prefix}LMHeadModel",
        children={"transformer": body, "lm_head": _linear(width, hyper.size("vocab_size"))},
        ties={"lm_head.weight": "transformer.wte.weight"} if tied else {},
    )


def _sizes(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, **others,
    }  # fmt: skip


# The defaults are those of the configuration classes in transformers: a saved file leaves out what equals them.
_ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(_llama, "Llama", "DecoderLayer", _sizes(32_000, 4096, 11_008, 32, 32)),
    "mistral": Architecture(
        _llama, "Mistral", "DecoderLayer", _sizes(32_000, 4096, 14_336, 32, 32, num_key_value_heads=8)
    ),
    "qwen2": Architecture(
        _llama, "Qwen2", "DecoderLayer", _sizes(151_936, 4096, 22_016, 32, 32, num_key_value_heads=32)
    ),
    "qwen3": Architecture(
        _llama, "Qwen3", "DecoderLayer",
        _sizes(151_936, 4096, 22_016, 32, 32, num_key_value_heads=32, head_dim=128),
    ),
    "mixtral": Architecture(
        _llama, "Mixtral", "DecoderLayer",
        _sizes(32_000, 4096, 14_336, 32, 32, num_key_value_heads=8, num_local_experts=8),
    ),
    "gpt2": Architecture(
        _gpt2, "GPT2", "Block",
        {"vocab_size": 50_257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "tie_word_embeddings": True},
    ),
}  # fmt: skip
