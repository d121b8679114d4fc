"""Well-known models by name: the values of their public config.json files, as far as a size depends on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from infinity.errors import ConfigError

# What a published name says beside a shape: the kind of tuning, a version of it, a date, the length of sequences.
_ADDED = re.compile(r"-(instruct|chat|hf|base|it|pt|coder|math|v0\.[12]|\d{4}|\d+[km])(?=-|$)")
# Releases of another name whose shape is a known one's.
_LIKE = (
    (re.compile(r"meta-"), ""), (re.compile(r"llama-3(\.3)?(?=-(8|70)b$)"), "llama-3.1"),
    (re.compile(r"deepseek-r1$"), "deepseek-v3"),
)  # fmt: skip


def preset(name: str) -> dict[str, Any]:
    """The values of a model's config.json by its name, in any case; ConfigError for an unknown one."""
    known = preset_name(name)
    if known is None:
        near = get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
        raise ConfigError(
            f"{name} is neither a file, nor a folder with a config.json, nor the name of a known model. "
            + (f"Did you mean {' or '.join(near)}? " if near else "")
            + "--list shows the names"
        )
    return dict(PRESETS[known])


def preset_name(name: str) -> str | None:
    """The known model that a name means: in any case, with the owner of a Hugging Face id, as a chat model or not."""
    wanted = _ADDED.sub("", name.lower().rpartition("/")[2])
    for theirs, ours in _LIKE:
        wanted = theirs.sub(ours, wanted) if theirs.match(wanted) else wanted
    return wanted if wanted in PRESETS else None


def family(name: str) -> str:
    """What the sizes of one model are called together: "llama-3.1" of "llama-3.1-70b"."""
    return name.lower().rpartition("-")[0] if not name.lower().startswith("gpt2") else "gpt2"


def _model(model_type: str, sizes: tuple[int, ...], *, tied: bool = False, **others: Any) -> dict[str, Any]:
    """sizes: vocabulary, hidden, intermediate, layers, heads, heads of keys and values."""
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads",
    )  # fmt: skip
    return {
        "model_type": model_type, **dict(zip(names, sizes, strict=True)), "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16", **others,
    }  # fmt: skip


def _gpt2(layers: int, width: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2", "vocab_size": 50_257, "n_positions": 1024, "n_embd": width, "n_layer": layers,
        "n_head": heads, "tie_word_embeddings": True,
    }  # fmt: skip


def _mixture(
    model_type: str, sizes: tuple[int, ...], inner: int, count: int, chosen: int, **others: Any
) -> dict[str, Any]:
    return _model(
        model_type, sizes, moe_intermediate_size=inner, num_experts=count, num_experts_per_tok=chosen, **others
    )


_HEAD_128: dict[str, Any] = {"head_dim": 128}
PRESETS: Mapping[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _model("llama", (32_000, 4096, 11_008, 32, 32, 32)),
    "llama-2-13b": _model("llama", (32_000, 5120, 13_824, 40, 40, 40)),
    "llama-2-70b": _model("llama", (32_000, 8192, 28_672, 80, 64, 8)),
    "llama-3.1-8b": _model("llama", (128_256, 4096, 14_336, 32, 32, 8)),
    "llama-3.1-70b": _model("llama", (128_256, 8192, 28_672, 80, 64, 8)),
    "llama-3.1-405b": _model("llama", (128_256, 16_384, 53_248, 126, 128, 8)),
    "llama-3.2-1b": _model("llama", (128_256, 2048, 8192, 16, 32, 8), tied=True, head_dim=64),
    "llama-3.2-3b": _model("llama", (128_256, 3072, 8192, 28, 24, 8), tied=True, head_dim=128),
    "mistral-7b": _model("mistral", (32_000, 4096, 14_336, 32, 32, 8)),
    "mistral-7b-v0.3": _model("mistral", (32_768, 4096, 14_336, 32, 32, 8)),
    "mixtral-8x7b": _model(
        "mixtral", (32_000, 4096, 14_336, 32, 32, 8), num_local_experts=8, num_experts_per_tok=2
    ),
    "mixtral-8x22b": _model(
        "mixtral", (32_000, 6144, 16_384, 56, 48, 8), num_local_experts=8, num_experts_per_tok=2
    ),
    "qwen2.5-0.5b": _model("qwen2", (151_936, 896, 4864, 24, 14, 2), tied=True),
    "qwen2.5-1.5b": _model("qwen2", (151_936, 1536, 8960, 28, 12, 2), tied=True),
    "qwen2.5-3b": _model("qwen2", (151_936, 2048, 11_008, 36, 16, 2), tied=True),
    "qwen2.5-7b": _model("qwen2", (152_064, 3584, 18_944, 28, 28, 4)),
    "qwen2.5-14b": _model("qwen2", (152_064, 5120, 13_824, 48, 40, 8)),
    "qwen2.5-32b": _model("qwen2", (152_064, 5120, 27_648, 64, 40, 8)),
    "qwen2.5-72b": _model("qwen2", (152_064, 8192, 29_568, 80, 64, 8)),
    "qwen3-0.6b": _model("qwen3", (151_936, 1024, 3072, 28, 16, 8), tied=True, **_HEAD_128),
    "qwen3-1.7b": _model("qwen3", (151_936, 2048, 6144, 28, 16, 8), tied=True, **_HEAD_128),
    "qwen3-4b": _model("qwen3", (151_936, 2560, 9728, 36, 32, 8), tied=True, **_HEAD_128),
    "qwen3-8b": _model("qwen3", (151_936, 4096, 12_288, 36, 32, 8), **_HEAD_128),
    "qwen3-14b": _model("qwen3", (151_936, 5120, 17_408, 40, 40, 8), **_HEAD_128),
    "qwen3-32b": _model("qwen3", (151_936, 5120, 25_600, 64, 64, 8), **_HEAD_128),
    "qwen3-30b-a3b": _mixture("qwen3_moe", (151_936, 2048, 6144, 48, 32, 4), 768, 128, 8, **_HEAD_128),
    "qwen3-235b-a22b": _mixture("qwen3_moe", (151_936, 4096, 12_288, 94, 64, 4), 1536, 128, 8, **_HEAD_128),
    "gemma-2-2b": _model("gemma2", (256_000, 2304, 9216, 26, 8, 4), tied=True, head_dim=256),
    "gemma-2-9b": _model("gemma2", (256_000, 3584, 14_336, 42, 16, 8), tied=True, head_dim=256),
    "gemma-2-27b": _model("gemma2", (256_000, 4608, 36_864, 46, 32, 16), tied=True, head_dim=128),
    "gemma-3-1b": _model("gemma3_text", (262_144, 1152, 6912, 26, 4, 1), tied=True, head_dim=256),
    "phi-3-mini": _model("phi3", (32_064, 3072, 8192, 32, 32, 32)),
    "phi-4": _model("phi3", (100_352, 5120, 17_920, 40, 40, 10)),
    "deepseek-v3": _model(
        "deepseek_v3", (129_280, 7168, 18_432, 61, 128, 128), n_routed_experts=256, n_shared_experts=1,
        num_experts_per_tok=8, moe_intermediate_size=2048, first_k_dense_replace=3, q_lora_rank=1536,
        kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128,
    ),
}  # fmt: skip
