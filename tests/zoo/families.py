"""The families: how each is made small, and what it is fed.

Nothing is downloaded: weights are random, from a seed. Dropout is off, so that plain torch in one process can say what
an engine on any ranks must give; LayerDrop stays where a family has it, and draws from a seed that is equal on all
ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PretrainedConfig

VOCABULARY = 128
LAYER_DROP = 0.4
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
    "max_position_embeddings": 64,
}  # fmt: skip
_TEXT = {**_TOKENS, **_SIZES}
_GROUPED = {**_TEXT, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 8}
_PAIR = {
    **_TOKENS, "d_model": 32, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}  # fmt: skip
_IMAGE = {"image_size": 16, "patch_size": 8, "num_channels": 3}
_VISION = {name: value for name, value in {**_SIZES, **_IMAGE}.items() if name != "max_position_embeddings"}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WAVES = {
    **_TEXT, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False, "num_labels": 8,
    "classifier_proj_size": 16,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """`model_type`: as transformers names the configuration. `task`: the model's class, or the end of its Auto class.
    `inputs`: what it is fed. `layer_drop`: whole layers are left out at random.
    """

    model_type: str
    task: str
    inputs: str
    sizes: dict[str, Any]
    layer_drop: bool = False

    @property
    def has_decoder(self) -> bool:
        """Whether every layer of a decoder reads the encoder's output."""
        return self.task in ("ForSeq2SeqLM", "WhisperForConditionalGeneration")


def _causal(model_type: str, sizes: dict[str, Any], *, layer_drop: bool = False) -> Family:
    return Family(model_type, "ForCausalLM", "text", sizes, layer_drop)


def _masked(model_type: str, **sizes: Any) -> Family:
    return Family(model_type, "ForMaskedLM", "text", {**_TEXT, **sizes})


def _pair(model_type: str, sizes: dict[str, Any], *, layer_drop: bool = False) -> Family:
    return Family(model_type, "ForSeq2SeqLM", "text", sizes, layer_drop)


def _image(model_type: str, sizes: dict[str, Any], task: str = "ForImageClassification") -> Family:
    return Family(model_type, task, "image", {**sizes, "num_labels": 8})


FAMILIES: dict[str, Family] = {
    "gpt2": _causal("gpt2", _TEXT),
    "llama": _causal("llama", _GROUPED),
    "llama tied": _causal("llama", {**_GROUPED, "tie_word_embeddings": True}),
    "mistral": _causal("mistral", {**_GROUPED, "sliding_window": 8}),
    "mixtral": _causal("mixtral", {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": _causal("qwen2", _GROUPED),
    "qwen2_moe": _causal("qwen2_moe", {**_GROUPED, **_EXPERTS, "shared_expert_intermediate_size": 32}),
    "qwen3": _causal("qwen3", _WIDE),
    "qwen3_moe": _causal("qwen3_moe", {**_WIDE, **_EXPERTS}),
    "gemma": _causal("gemma", _WIDE),
    "gemma2": _causal("gemma2", {**_WIDE, "sliding_window": 8}),
    "gemma3_text": _causal("gemma3_text", {**_WIDE, "sliding_window": 8}),
    "phi": _causal("phi", _TEXT),
    "phi3": _causal("phi3", _GROUPED),
    "opt": _causal("opt", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}),
    "opt LayerDrop": _causal("opt", {**_TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, layer_drop=True),
    "bloom": _causal("bloom", {**_TOKENS, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": _causal("falcon", _TEXT),
    "gpt_neo": _causal(
        "gpt_neo",
        {**_TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "intermediate_size": 64,
         "max_position_embeddings": 64, "attention_types": [[["global", "local"], 1]], "window_size": 8},
    ),
    "gpt_neox": _causal("gpt_neox", _TEXT),
    "gptj": _causal("gptj", {**_TEXT, "rotary_dim": 4}),
    "gpt_bigcode": _causal("gpt_bigcode", _TEXT),
    "stablelm": _causal("stablelm", _GROUPED),
    "starcoder2": _causal("starcoder2", _GROUPED),
    "cohere": _causal("cohere", _GROUPED),
    "olmo": _causal("olmo", _GROUPED),
    "olmo2": _causal("olmo2", _GROUPED),
    "olmoe": _causal("olmoe", {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2}),
    "granite": _causal("granite", _GROUPED),
    "mpt": _causal("mpt", {**_TOKENS, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    "mamba": _causal("mamba", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "bert": _masked("bert"),
    "roberta": _masked("roberta"),
    "albert": _masked("albert", embedding_size=16),
    "distilbert": _masked("distilbert", dim=32, n_layers=3, n_heads=4, hidden_dim=64),
    "electra": _masked("electra", embedding_size=16),
    "deberta-v2": _masked(
        "deberta-v2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8, type_vocab_size=0
    ),
    "mpnet": _masked("mpnet"),
    "modernbert": _masked("modernbert", cls_token_id=1, sep_token_id=2),
    "t5": _pair(
        "t5", {**_TOKENS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4,
               "decoder_start_token_id": 0},
    ),
    "bart": _pair("bart", _PAIR),
    "bart LayerDrop": _pair("bart", _PAIR, layer_drop=True),
    "mbart": _pair("mbart", _PAIR),
    "pegasus": _pair("pegasus", _PAIR),
    "marian": _pair("marian", _PAIR),
    "whisper LayerDrop": Family(
        "whisper", "WhisperForConditionalGeneration", "spectrum",
        {**_PAIR, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64}, layer_drop=True,
    ),
    "vit": _image("vit", _VISION),
    "deit": _image("deit", _VISION, "DeiTForImageClassification"),
    "beit": _image("beit", _VISION),
    "convnext": _image("convnext", {"num_channels": 3, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}),
    "swin": _image("swin", {**_IMAGE, "patch_size": 2, "embed_dim": 8, "depths": [1, 2], "num_heads": [2, 4],
                            "window_size": 4}),
    "clip": Family(
        "clip", "CLIPModel", "both",
        {"text_config": {**_TEXT, "eos_token_id": 2}, "vision_config": _VISION, "projection_dim": 16},
    ),
    "siglip": Family("siglip", "SiglipModel", "both", {"text_config": _TEXT, "vision_config": _VISION}),
    "wav2vec2 LayerDrop": Family("wav2vec2", "Wav2Vec2ForSequenceClassification", "wave", _WAVES, layer_drop=True),
    "hubert": Family("hubert", "HubertForSequenceClassification", "wave", _WAVES),
}  # fmt: skip

# What runs on several ranks as well: what shares, drops or chooses between its parts, and one plain one of each kind.
ON_SEVERAL_RANKS = (
    "gpt2", "llama tied", "mixtral", "qwen2_moe", "gemma2", "opt LayerDrop", "bert", "albert", "t5", "bart LayerDrop",
    "whisper LayerDrop", "clip", "wav2vec2 LayerDrop",
)  # fmt: skip


def build(name: str) -> nn.Module:
    """The family's model in training mode, with the same weights at every call."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **family.sizes)
    for part in _parts(config):
        for attribute, value in vars(part).items():
            if "drop" in attribute and isinstance(value, float):
                keeps = family.layer_drop and "layerdrop" in attribute
                setattr(part, attribute, LAYER_DROP if keeps else 0.0)
    torch.manual_seed(0)
    made = getattr(transformers, family.task, None)
    if made is not None:
        return made(config).train()
    return getattr(transformers, f"AutoModel{family.task}").from_config(config).train()


def _parts(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PretrainedConfig):
            yield from _parts(value)


def batch(name: str, rank: int, step: int) -> dict[str, Any]:
    """Two samples that differ by rank and by step, always the same for the same two."""
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1_000_003 * (rank + 1) + step)

    def tokens(length: int) -> Tensor:
        return torch.randint(3, VOCABULARY, (2, length), generator=generator)

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator)

    classes = torch.randint(8, (2,), generator=generator)
    if family.inputs == "text":
        ids = tokens(16)
        return {"input_ids": ids, "labels": tokens(12) if family.task == "ForSeq2SeqLM" else ids}
    if family.inputs == "spectrum":
        return {"input_features": noise(8, 32), "labels": tokens(12)}
    if family.inputs == "image":
        size = family.sizes.get("image_size", 32)
        return {"pixel_values": noise(3, size, size), "labels": classes}
    if family.inputs == "wave":
        return {"input_values": noise(800), "labels": classes}
    ids = tokens(16)
    # CLIP takes what it says of a text at its end.
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": noise(3, 16, 16), "return_loss": True}
