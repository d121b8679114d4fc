"""The language models of the benchmarks: transformers' own, from a configuration."""

from __future__ import annotations

from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM


def build(shape: dict[str, int], positions: int) -> nn.Module:
    """A Llama of `shape` (see `support.models`) in fp32, for sequences of up to `positions` tokens."""
    config = LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], use_cache=False,
        intermediate_size=shape["intermediate_size"], num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"], num_key_value_heads=shape["heads"],
        max_position_embeddings=max(2048, positions), attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def build_named(name: str, shape: dict[str, int], attention: str = "sdpa") -> nn.Module:
    """A "llama" or "gpt2" of transformers, from the keys of its configuration."""
    config, model = {"llama": (LlamaConfig, LlamaForCausalLM), "gpt2": (GPT2Config, GPT2LMHeadModel)}[name]
    # Token numbers of GPT-2's own vocabulary mean nothing in a smaller one.
    others = {"bos_token_id": 0, "eos_token_id": 0} if name == "gpt2" else {}
    return model(config(**shape, **others, use_cache=False, attn_implementation=attention)).train()
