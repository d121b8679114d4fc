"""A tree made from a config.json is the tree of the model that transformers makes from it."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from estimators.estimate import estimate
from estimators.trees import block_classes, completed, known, model_tree
from infinity.errors import ConfigError
from infinity.plan.spec import ModuleNode, UnitRules, find_units, module_tree

LATENT = {
    "n_routed_experts": 4, "n_shared_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
}  # fmt: skip
CASES = {
    "llama": {"num_key_value_heads": 2},
    "llama-biased": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 24},
    "mistral": {"num_key_value_heads": 4},
    "qwen2": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "qwen3-biased": {"attention_bias": True},
    "mixtral": {"num_local_experts": 3, "num_key_value_heads": 1},
    "qwen2_moe": {"num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "qwen2_moe-some-layers": {"num_experts": 3, "decoder_sparse_step": 2, "qkv_bias": False},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 24, "num_key_value_heads": 2},
    "qwen3_moe-head-dim": {"num_experts": 2, "head_dim": 24, "mlp_only_layers": [1]},
    "deepseek_v3": {**LATENT, "q_lora_rank": 24},
    "deepseek_v3-whole-queries": {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0, "attention_bias": True},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16},
    "phi3": {"num_key_value_heads": 2, "pad_token_id": 0},
    "gpt2": {},
    "gpt2-untied": {"n_inner": 80, "tie_word_embeddings": False},
}
SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SMALL_GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 48}


def with_parameters(node: ModuleNode) -> ModuleNode:
    """The tree without the modules that hold no parameter."""
    children = {name: with_parameters(child) for name, child in node.children.items() if child.all_params()}
    return ModuleNode(node.path, node.class_name, node.params, children, packed=node.packed)


def real_model(config: transformers.PretrainedConfig) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def real_tree(config: transformers.PretrainedConfig) -> ModuleNode:
    return module_tree(real_model(config), compute_dtype="bf16")


@pytest.mark.parametrize("case", CASES)
def test_the_tree_is_the_one_of_transformers(case):
    model_type = case.partition("-")[0]
    sizes = SMALL_GPT2 if model_type == "gpt2" else SMALL
    config = transformers.AutoConfig.for_model(model_type, **sizes, **CASES[case])
    real = real_tree(config)
    made = model_tree(json.loads(config.to_json_string(use_diff=False)), compute_dtype="bf16")
    assert made == with_parameters(real)
    for rules in (UnitRules(), UnitRules(unit_numel_max=10_000, merge_numel_max=500)):
        assert find_units(made, rules) == find_units(real, rules)


@pytest.mark.parametrize("model_type", known())
def test_values_that_a_file_leaves_out_are_those_of_transformers(model_type):
    config = transformers.AutoConfig.for_model(model_type)
    assert model_tree({"model_type": model_type}, compute_dtype="bf16") == with_parameters(real_tree(config))


@pytest.mark.parametrize("model_type", known())
def test_blocks_are_those_that_transformers_does_not_split(model_type):
    sizes = SMALL_GPT2 if model_type == "gpt2" else {**SMALL, "pad_token_id": 0}
    model = real_model(transformers.AutoConfig.for_model(model_type, **sizes))
    assert block_classes({"model_type": model_type}) == tuple(model._no_split_modules)


def test_an_unknown_model_type_is_refused_with_what_is_known():
    with pytest.raises(ConfigError, match=r"'mixtrol' .*llama, mistral.*Did you mean 'mixtral'\?"):
        model_tree({"model_type": "mixtrol"}, compute_dtype="bf16")
    with pytest.raises(ConfigError, match="model_type None"):
        model_tree({}, compute_dtype="bf16")


@pytest.mark.parametrize("value", [0, -1, 2.5, "many", True])
def test_a_size_that_is_none_is_named(value):
    with pytest.raises(ConfigError, match="num_hidden_layers"):
        model_tree({"model_type": "llama", "num_hidden_layers": value}, compute_dtype="bf16")


@pytest.mark.parametrize("model_type", known())
def test_a_value_that_is_null_is_left_out_or_named(model_type):
    values = {**completed({"model_type": model_type}), "resid_pdrop": 0.1, "attn_pdrop": 0.1, "attention_dropout": 0.0}
    values = {**values, **dict.fromkeys({"num_hidden_layers", "n_layer"} & set(values), 2)}
    for name in values:
        try:
            said = None if estimate({**values, name: None}, sequence=16).of_micro_batch else "nothing"
        except ConfigError as error:
            said = str(error)
        assert said is None or name in said


def test_positions_without_bound_are_refused_and_not_walked():
    with pytest.raises(ConfigError, match="n_positions is 1180591620717411303424; it must be a whole number up to"):
        model_tree({"model_type": "gpt2", "n_positions": 1 << 70}, compute_dtype="bf16")
