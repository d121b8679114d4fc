"""Tiny transformers models, apart from the others: importing transformers takes seconds."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from tests.support.models import VOCABULARY

HF_CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    ),
    "mistral": lambda: transformers.MistralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, bos_token_id=1, eos_token_id=2,
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64, use_cache=False, bos_token_id=1,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64, use_cache=False,
    ),
}  # fmt: skip


def hf_config(name: str) -> transformers.PretrainedConfig:
    """The tiny transformers configuration of one family: llama, qwen2, mistral, gpt2 or mixtral."""
    return HF_CONFIGS[name]()


def hf_model(name: str, seed: int = 0) -> nn.Module:
    """A tiny transformers causal language model of one family, in fp32, with the weights of `seed`."""
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(hf_config(name)).float()


def lora(model: nn.Module, **settings: Any) -> Any:
    """A model with peft's adapters of rank 4; peft is imported here alone, because that takes seconds too."""
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=4, **settings))
