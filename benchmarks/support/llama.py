"""The language model of the training benchmarks: transformers' own Llama, from a configuration."""

from __future__ import annotations

from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM


def build(shape: dict[str, int], positions: int) -> nn.Module:
    """A Llama of `shape` (see `support.models`) in fp32, for sequences of up to `positions` tokens."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], use_cache=False,
        intermediate_size=shape["intermediate_size"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"],
        max_position_embeddings=max(2048, positions), attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()
