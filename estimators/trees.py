"""Known architectures: from the hyper-parameters in a Hugging Face config.json to the tree of the model.

A tree has the names, shapes and class names that the model in transformers has, so that the plan made from it is the
plan that the engine makes.

Module trees of decoder-only transformers, from hyper-parameters: Llama's family, GPT-2, DeepSeek, Gemma and Phi.

Names, shapes and class names are those of the models in transformers. Modules without parameters are left out: no plan
depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from infinity.base.untrusted import shortened
from infinity.config.section import dotted
from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, ParamSpec


@dataclass(frozen=True, slots=True)
class Module:
    """A module to be: class, shapes of its own parameters, children by attribute name."""

    class_name: str
    params: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    children: Mapping[str, Module] = field(default_factory=dict)
    # Full parameter name -> full name of the parameter that it is another name for.
    ties: Mapping[str, str] = field(default_factory=dict)
    # As of `ModuleNode`.
    packed: bool = False


# Also where a search for the deepest model that fits ends.
LAYERS_MAX = 4096
# The most that whole numbers of a config.json may be. A file with a greater one is damaged, and its model would take
# hours to walk.
_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS_MAX),
    **dict.fromkeys(
        (
            "num_experts", "n_routed_experts", "num_local_experts", "num_experts_per_tok", "n_shared_experts",
            "first_k_dense_replace", "decoder_sparse_step",
        ),
        10_000,
    ),
    **dict.fromkeys(
        (
            "vocab_size", "hidden_size", "n_embd", "intermediate_size", "n_inner", "moe_intermediate_size",
            "shared_expert_intermediate_size", "num_attention_heads", "n_head", "num_key_value_heads", "head_dim",
            "q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_positions",
        ),
        1 << 24,
    ),
}  # fmt: skip
# Rates of dropout.
_SHARES = ("resid_pdrop", "attn_pdrop", "embd_pdrop", "attention_dropout")


class DecoderConfig:
    """The values of one config.json, or the architecture's defaults; a wrong or missing one is named."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._given = values
        # What a file sets to null is derived from other values, or left out.
        self._values = {**defaults, **values}
        for name, most in _MOST.items():
            value = self._values.get(name)
            if value is not None and (type(value) is not int or not 0 <= value <= most):
                raise ConfigError(f"the model's {name} is {shortened(value)}; it must be a whole number up to {most:,}")
        for name in _SHARES:
            value = self._values.get(name)
            if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):
                raise ConfigError(f"the model's {name} is {shortened(value)}; it must be a number from 0 to 1")

    def size(self, name: str, otherwise: int | None = None) -> int:
        """A positive whole number; `otherwise` where the file leaves it open."""
        value = self._values.get(name)
        if value is None:
            value = otherwise
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"the model's {name} is {shortened(value)}; it must be a positive whole number")
        return value

    def first(self, names: Sequence[str]) -> int:
        """A size that files call by one of several names."""
        known = [name for values in (self._given, self._values) for name in names if name in values]
        return self.size((known or [names[0]])[0])

    def count(self, name: str) -> int:
        """A whole number that may be 0."""
        return self.size(name) if self._values.get(name) else 0

    def divides(self, name: str, whole: int, what: str) -> None:
        """ConfigError where a size does not divide another, named in words: such a model cannot be built."""
        parts = self.size(name)
        if whole % parts:
            near = sorted((n for n in range(1, whole + 1) if not whole % n), key=lambda n: abs(n - parts))[:2]
            raise ConfigError(
                f"no such model can be: {name} is {parts:,}, which does not divide {what}, {whole:,}: "
                f"{' or '.join(map(str, near))} would"
            )

    def flag(self, name: str) -> bool:
        return bool(self._values.get(name))

    def absent(self, name: str) -> bool:
        """Whether the file says null where the architecture has a default."""
        return self._values.get(name) is None

    def numbers(self, name: str) -> tuple[int, ...]:
        values = self._values.get(name) or []
        if not isinstance(values, list) or any(type(value) is not int for value in values):
            raise ConfigError(f"the model's {name} is {shortened(values)}; it must be a list of whole numbers")
        return tuple(values)


@dataclass(frozen=True, slots=True)
class Style:
    """In what a member of Llama's family differs from Llama."""

    # Attention has a bias on its inputs: whatever the file says, or where this flag of the file is set.
    input_bias: bool | str = False
    # Also on its output, by a flag of the file.
    output_bias: str = ""
    # The feed-forward layers have a bias, by a flag of the file.
    mlp_bias: str = ""
    # Queries and keys are normed, head by head.
    normed_heads: bool = False
    # The feed-forward layer has norms of its own before and after it.
    sandwich: bool = False
    # Queries, keys and values are one matrix, and so are the gate and the way up.
    fused: bool = False
    # The mixture of experts that is the feed-forward layer, or None for the layers that have an ordinary one.
    experts: Callable[[DecoderConfig, str, int, int], Module | None] | None = None
    body: str = "Model"
    embedding: str = "Embedding"


def llama(hyper: DecoderConfig, prefix: str, style: Style) -> Module:
    """Llama and what was built in its image."""
    hidden = hyper.size("hidden_size")
    norm = _affine(f"{prefix}RMSNorm", (hidden,))
    attention = _attention(hyper, prefix, hidden, norm.class_name, style)
    names = ["input_layernorm", "post_attention_layernorm"]
    names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] if style.sandwich else []

    def layer(index: int) -> Module:
        mlp = style.experts(hyper, prefix, hidden, index) if style.experts else None
        if mlp is None:
            biased = bool(style.mlp_bias) and hyper.flag(style.mlp_bias)
            mlp = _feed_forward(prefix, hidden, hyper.size("intermediate_size"), biased=biased, fused=style.fused)
        children = {"self_attn": attention, "mlp": mlp, **dict.fromkeys(names, norm)}
        return Module(f"{prefix}DecoderLayer", children=children)

    return _language_model(hyper, prefix, layer, norm, style.body, style.embedding)


def _language_model(
    hyper: DecoderConfig, prefix: str, layer: Callable[[int], Module], norm: Module, body: str, embedding: str
) -> Module:
    hidden, vocabulary = hyper.size("hidden_size"), hyper.size("vocab_size")
    layers = {str(index): layer(index) for index in range(hyper.size("num_hidden_layers"))}
    model = Module(
        prefix + body,
        children={
            "embed_tokens": _affine(embedding, (vocabulary, hidden)),
            "layers": Module("ModuleList", children=layers),
            "norm": norm,
        },
    )
    tied = hyper.flag("tie_word_embeddings")
    return Module(
        f"{prefix}ForCausalLM",
        children={"model": model, "lm_head": _linear(hidden, vocabulary)},
        ties={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
    )


def _attention(hyper: DecoderConfig, prefix: str, hidden: int, norm_class: str, style: Style) -> Module:
    heads = hyper.size("num_attention_heads")
    if hyper.absent("head_dim"):
        hyper.divides("num_attention_heads", hidden, "the hidden size")
    # More of them than heads is what a class's own default leaves in a file that names few heads.
    if hyper.size("num_key_value_heads", heads) < heads:
        hyper.divides("num_key_value_heads", heads, "the number of heads")
    head_dim = hyper.size("head_dim", hidden // heads)
    key_width = hyper.size("num_key_value_heads", heads) * head_dim
    biased = hyper.flag(style.input_bias) if isinstance(style.input_bias, str) else style.input_bias
    output = _linear(heads * head_dim, hidden, bool(style.output_bias) and hyper.flag(style.output_bias))
    if style.fused:
        joined = _linear(hidden, heads * head_dim + 2 * key_width, biased)
        return Module(f"{prefix}Attention", children={"o_proj": output, "qkv_proj": joined})
    children = {
        "q_proj": _linear(hidden, heads * head_dim, biased),
        "k_proj": _linear(hidden, key_width, biased),
        "v_proj": _linear(hidden, key_width, biased),
        "o_proj": output,
    }
    if style.normed_heads:
        children |= {name: _affine(norm_class, (head_dim,)) for name in ("q_norm", "k_norm")}
    return Module(f"{prefix}Attention", children=children)


def _feed_forward(prefix: str, hidden: int, inner: int, *, biased: bool = False, fused: bool = False) -> Module:
    down = _linear(inner, hidden, biased)
    if fused:
        return Module(f"{prefix}MLP", children={"gate_up_proj": _linear(hidden, 2 * inner), "down_proj": down})
    up = _linear(hidden, inner, biased)
    return Module(f"{prefix}MLP", children={"gate_proj": up, "up_proj": up, "down_proj": down})


def _experts(prefix: str, count: int, inner: int, hidden: int) -> Module:
    shapes = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    return Module(f"{prefix}Experts", shapes, packed=True)


def mixtral_experts(hyper: DecoderConfig, prefix: str, hidden: int, layer: int) -> Module:
    """Every layer is a mixture."""
    count = hyper.first(EXPERT_COUNTS)
    return Module(
        f"{prefix}SparseMoeBlock",
        children={
            "gate": _affine(f"{prefix}TopKRouter", (count, hidden)),
            "experts": _experts(prefix, count, hyper.size("intermediate_size"), hidden),
        },
    )


def qwen3_experts(hyper: DecoderConfig, prefix: str, hidden: int, layer: int) -> Module | None:
    """Every so many layers; experts have a width of their own."""
    if layer in hyper.numbers("mlp_only_layers") or (layer + 1) % hyper.size("decoder_sparse_step"):
        return None
    count = hyper.first(EXPERT_COUNTS)
    experts = _experts(prefix, count, hyper.size("moe_intermediate_size"), hidden)
    router = _affine(f"{prefix}TopKRouter", (count, hidden))
    return Module(f"{prefix}SparseMoeBlock", children={"experts": experts, "gate": router})


def qwen2_experts(hyper: DecoderConfig, prefix: str, hidden: int, layer: int) -> Module | None:
    """As Qwen3's, and one expert that every token sees, behind a gate."""
    block = qwen3_experts(hyper, prefix, hidden, layer)
    if block is None:
        return None
    shared = _feed_forward(prefix, hidden, hyper.size("shared_expert_intermediate_size"))
    children = {
        "gate": block.children["gate"], "experts": block.children["experts"], "shared_expert": shared,
        "shared_expert_gate": _linear(hidden, 1),
    }  # fmt: skip
    return Module(block.class_name, children=children)


def deepseek(hyper: DecoderConfig, prefix: str) -> Module:
    """DeepSeek-V3: latent attention, a few dense layers, then mixtures with shared experts."""
    hidden = hyper.size("hidden_size")
    norm = _affine(f"{prefix}RMSNorm", (hidden,))
    dense = _feed_forward(prefix, hidden, hyper.size("intermediate_size"))
    inner, count = hyper.size("moe_intermediate_size"), hyper.first(("n_routed_experts", *EXPERT_COUNTS))
    sparse = Module(
        f"{prefix}MoE",
        children={
            "experts": _experts(prefix, count, inner, hidden),
            "gate": _affine(f"{prefix}TopkRouter", (count, hidden)),
            "shared_experts": _feed_forward(prefix, hidden, inner * hyper.size("n_shared_experts")),
        },
    )
    attention = _latent_attention(hyper, prefix, hidden)

    def layer(index: int) -> Module:
        mlp = sparse if index >= hyper.count("first_k_dense_replace") else dense
        children = {"self_attn": attention, "mlp": mlp, "input_layernorm": norm, "post_attention_layernorm": norm}
        return Module(f"{prefix}DecoderLayer", children=children)

    return _language_model(hyper, prefix, layer, norm, "Model", "Embedding")


def _latent_attention(hyper: DecoderConfig, prefix: str, hidden: int) -> Module:
    heads, biased = hyper.size("num_attention_heads"), hyper.flag("attention_bias")
    rope, plain, value = (hyper.size(name) for name in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
    latent = hyper.size("kv_lora_rank")
    if hyper.absent("q_lora_rank"):
        queries = {"q_proj": _linear(hidden, heads * (plain + rope))}
    else:
        rank = hyper.size("q_lora_rank")
        queries = {
            "q_a_proj": _linear(hidden, rank, biased),
            "q_a_layernorm": _affine(f"{prefix}RMSNorm", (rank,)),
            "q_b_proj": _linear(rank, heads * (plain + rope)),
        }
    return Module(
        f"{prefix}Attention",
        children={
            **queries,
            "kv_a_proj_with_mqa": _linear(hidden, latent + rope, biased),
            "kv_a_layernorm": _affine(f"{prefix}RMSNorm", (latent,)),
            "kv_b_proj": _linear(latent, heads * (plain + value)),
            "o_proj": _linear(heads * value, hidden, biased),
        },
    )


def gpt2(hyper: DecoderConfig, prefix: str) -> Module:
    """GPT-2: learned positions, norms with biases, weights of (inputs, outputs)."""
    width = hyper.size("n_embd")
    hyper.divides("n_head", width, "the width")
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
            "h": Module("ModuleList", children={str(index): block for index in range(hyper.size("n_layer"))}),
            "ln_f": norm,
        },
    )
    tied = hyper.flag("tie_word_embeddings")
    return Module(
        f"{prefix}LMHeadModel",
        children={"transformer": body, "lm_head": _linear(width, hyper.size("vocab_size"))},
        ties={"lm_head.weight": "transformer.wte.weight"} if tied else {},
    )


# What files call the number of experts.
EXPERT_COUNTS = ("num_experts", "num_local_experts")


def _affine(class_name: str, weight: tuple[int, ...], bias: int = 0) -> Module:
    """A module with a weight and, where `bias` is not 0, a bias of that size."""
    return Module(class_name, {"weight": weight, **({"bias": (bias,)} if bias else {})})


def _linear(inputs: int, outputs: int, bias: bool = False) -> Module:
    return _affine("Linear", (outputs, inputs), outputs if bias else 0)


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
        shapes.update((dotted(path, name), shape) for name, shape in module.params.items())
        for name, child in module.children.items():
            collect(child, dotted(path, name))

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
        params={name: specs[dotted(path, name)] for name in module.params},
        children={name: _grow(child, dotted(path, name), specs) for name, child in module.children.items()},
        packed=module.packed,
    )


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
