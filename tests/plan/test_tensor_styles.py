"""From the plans of real models to a `TensorAxis`, and what is refused."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers

from infinity.errors import ConfigError
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import ModuleNode, ParamSpec, UnitRules, find_units, module_tree
from infinity.plan.tensor_axis import Region, Role, TensorAxis, heads_of, plan_tensor_axis, styles_of, tensor_axis_of

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "Llama": {}, "Qwen2": {}, "Phi3": {}, "Apertus": {}, "GPTNeoX": {}, "MiniMaxM2": {"num_local_experts": 4},
    "Qwen3": {"head_dim": 8}, "Gemma2": {"head_dim": 8}, "Mixtral": {"num_local_experts": 4},
}  # fmt: skip
GPT2 = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "num_key_value_heads": 4,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "n_group": 1, "topk_group": 1,
}  # fmt: skip
FAMILIES = ["Llama", "Qwen2", "Qwen3", "Phi3", "Gemma2", "Mixtral", "GPTNeoX"]


def model_of(family: str, **changed: Any) -> Any:
    values = GPT2 if family == "GPT2" else {**SIZES, **OTHERS.get(family, {})}
    config = getattr(transformers, f"{family}Config")(**{**values, **changed})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def tree_of(model: Any) -> ModuleNode:
    return module_tree(model, compute_dtype="bf16")


def axis_of(family: str, given: Mapping[str, str] | None = None, *, size: int = 2, sequence: bool = False,
            **changed: Any) -> TensorAxis:  # fmt: skip
    model = model_of(family, **changed)
    return tensor_axis_of(model, tree_of(model), size=size, sequence=sequence, given=given)


@pytest.mark.parametrize("family", FAMILIES)
def test_shards_of_all_ranks_cover_each_parameter_once(family):
    model = model_of(family)
    root = tree_of(model)
    axis = tensor_axis_of(model, root, size=2)
    whole, local = root.all_params(), axis.divide(root).all_params()
    assert whole.keys() == local.keys() == axis.params.keys()
    for name, spec in whole.items():
        shard, replica = axis.params[name]
        assert (local[name].shard, local[name].replica) == (shard, replica)
        if shard is None:
            assert local[name].shape == spec.shape
            assert replica is not Replica.NONE
            continue
        assert replica is Replica.NONE
        assert math.prod(local[name].shape) * 2 == math.prod(spec.shape)
        assert shard.whole_shape(local[name].shape) == spec.shape
        rows = [row for index in range(2) for begin, end in shard.ranges(index) for row in range(begin, end)]
        assert sorted(rows) == [*range(spec.shape[shard.dim])]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_units_of_a_divided_tree_are_homogeneous_in_their_replica(family, sequence):
    model = model_of(family)
    root = tree_of(model)
    axis = tensor_axis_of(model, root, size=2, sequence=sequence and family != "Mixtral")
    units = find_units(axis.divide(root), UnitRules()).units
    assert sorted(spec.name for unit in units for spec in unit.params) == sorted(root.all_params())
    for unit in units:
        assert {spec.replica for spec in unit.params} == {unit.replica}
        assert {spec.shard is None for spec in unit.params} == {unit.replica is not Replica.NONE}


@pytest.mark.parametrize("family", [*FAMILIES, "GPT2"])
def test_one_rank_changes_nothing(family):
    model = model_of(family)
    root = tree_of(model)
    axis = tensor_axis_of(model, root, size=1, given={"nothing": "at all"})
    assert axis == TensorAxis() and axis.divide(root) is root


def test_llama_has_two_regions_a_block_and_a_cut_vocabulary():
    axis = axis_of("Llama")
    assert axis.regions == tuple(Region(f"model.layers.{at}.{name}") for at in (0, 1) for name in ("self_attn", "mlp"))
    in_block = {path[len("model.layers.1.") :]: role for path, role in axis.roles.items() if ".1." in path}
    assert in_block == {
        "self_attn.q_proj": Role.COLWISE, "self_attn.k_proj": Role.COLWISE, "self_attn.v_proj": Role.COLWISE,
        "self_attn.o_proj": Role.ROWWISE, "mlp.gate_proj": Role.COLWISE, "mlp.up_proj": Role.COLWISE,
        "mlp.down_proj": Role.ROWWISE,
    }  # fmt: skip
    assert axis.roles["model.embed_tokens"] is Role.EMBEDDING
    assert axis.roles["lm_head"] is Role.COLWISE_GATHER and axis.head == "lm_head"
    assert axis.params["model.layers.0.mlp.down_proj.weight"] == (Shard(1, (48,), 2), Replica.NONE)
    assert axis.params["model.layers.0.mlp.up_proj.weight"] == (Shard(0, (48,), 2), Replica.NONE)
    assert axis.params["model.norm.weight"] == (None, Replica.SAME)
    assert not axis.remarks and not axis.sequence


def test_biases_are_cut_with_columns_and_replicated_behind_sums():
    axis = axis_of("GPTNeoX")
    assert axis.params["gpt_neox.layers.0.attention.query_key_value.bias"] == (Shard(0, (96,), 2), Replica.NONE)
    assert axis.params["gpt_neox.layers.0.attention.dense.bias"] == (None, Replica.SAME)
    assert axis.roles["gpt_neox.embed_in"] is Role.EMBEDDING


def test_norms_of_heads_have_parts_of_their_gradients():
    axis = axis_of("Qwen3")
    assert axis.params["model.layers.0.self_attn.q_norm.weight"] == (None, Replica.PARTIAL)
    assert axis.params["model.layers.0.input_layernorm.weight"] == (None, Replica.SAME)
    assert Region("model.layers.0.self_attn") in axis.regions


def test_what_is_gathered_within_a_region_is_alike_on_all_ranks():
    axis = axis_of("Phi3")
    assert axis.regions[:2] == (Region("model.layers.0.self_attn", False), Region("model.layers.0.mlp", False))
    assert axis.roles["model.layers.0.self_attn.qkv_proj"] is Role.COLWISE_GATHER
    assert axis.roles["model.layers.0.self_attn.o_proj"] is Role.ROWWISE_SPLIT
    # Heads are not divided: three ranks do not share two key heads, but rows of widths that three divides.
    assert axis_of("Phi3", size=3, hidden_size=48, num_key_value_heads=4).size == 3
    # Ranks may see the input of an attention otherwise, through layers that are alike on all: no region.
    own = axis_of("MiniMaxM2")
    assert Region("model.layers.0.self_attn", False) not in own.regions
    assert own.params["model.layers.0.self_attn.q_norm.weight"] == (None, Replica.SAME)


def test_a_tied_head_and_its_embedding_are_one_shard():
    axis = axis_of("Gemma2")
    assert axis.params["model.embed_tokens.weight"] == (Shard(0, (96,), 2), Replica.NONE)
    assert "lm_head.weight" not in axis.params and axis.head == "lm_head"
    assert axis.roles["model.embed_tokens"] is Role.EMBEDDING
    # Also where only one of the two has a style.
    model = model_of("Gemma2")
    root = tree_of(model)
    styles = {name: style for name, style in styles_of(model, root).items() if name != "model.embed_tokens"}
    assert plan_tensor_axis(root, styles, size=2) == axis


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_an_uneven_vocabulary_stays_whole_and_says_so(family):
    axis = axis_of(family, vocab_size=97)
    assert axis.head is None and {"lm_head", "model.embed_tokens"}.isdisjoint(axis.roles)
    assert axis.params["model.embed_tokens.weight"] == (None, Replica.SAME)
    (remark,) = axis.remarks
    assert "97" in remark and "model.embed_tokens and lm_head" in remark and "98" in remark
    assert axis.roles["model.layers.0.mlp.up_proj"] is Role.COLWISE


def test_packed_experts_give_each_rank_its_part_of_every_expert():
    axis = axis_of("Mixtral")
    experts = "model.layers.0.mlp.experts"
    assert axis.params[f"{experts}.gate_up_proj"] == (Shard(1, (48, 48), 2), Replica.NONE)
    assert axis.params[f"{experts}.down_proj"] == (Shard(2, (48,), 2), Replica.NONE)
    assert axis.roles[experts] is Role.EXPERTS and Region(experts) in axis.regions
    assert axis.params["model.layers.0.mlp.gate.weight"] == (None, Replica.SAME)


def test_packed_linear_layers_are_cut_in_two_blocks():
    given = {
        "model.layers.*.mlp.gate_up_proj": "packed_colwise", "model.layers.*.mlp.down_proj": "rowwise",
    }  # fmt: skip
    axis = axis_of("Phi3", given)
    assert axis.params["model.layers.1.mlp.gate_up_proj.weight"] == (Shard(0, (48, 48), 2), Replica.NONE)
    assert Region("model.layers.1.mlp") in axis.regions


def test_along_the_sequence_norms_and_added_biases_have_parts_of_their_gradients():
    axis = axis_of("Qwen3", sequence=True)
    assert axis.blocks == ("model.layers.0", "model.layers.1") and axis.sequence
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"):
        assert axis.params[f"model.layers.1.{name}.weight"] == (None, Replica.PARTIAL)
    assert axis.params["model.norm.weight"] == (None, Replica.SAME)
    neox = axis_of("GPTNeoX", sequence=True)
    assert neox.params["gpt_neox.layers.0.mlp.dense_4h_to_h.bias"] == (None, Replica.PARTIAL)
    assert axis_of("Llama", sequence=True, num_hidden_layers=1).blocks == ("model.layers.0", "model.layers.0")


def test_a_plan_given_for_a_model_without_one_is_taken():
    given = {"layers.*.fc1": "colwise", "layers.*.fc2": "rowwise"}
    norms = {"layers.*.self_attn_layer_norm": "replicate", "layers.*.final_layer_norm": "replicate"}
    attention = dict.fromkeys((f"layers.*.self_attn.{name}_proj" for name in ("q", "k", "v", "out")), "replicate")
    root = opt_like()
    axis = plan_tensor_axis(root, given | norms | attention, size=2)
    # Its layers lie beside the attention in the block itself: each copies its own input.
    assert axis.regions == () and axis.roles["layers.0.fc1"] is Role.COLWISE
    assert axis.params["layers.0.final_layer_norm.weight"] == (None, Replica.SAME)


def test_a_given_pattern_may_leave_out_the_base_model_and_name_one_block():
    axis = axis_of("Llama", {f"layers.1.mlp.{name}_proj": "replicate" for name in ("gate", "up", "down")})
    assert axis.roles["model.layers.0.mlp.up_proj"] is Role.COLWISE
    assert "model.layers.1.mlp.up_proj" not in axis.roles
    assert axis.params["model.layers.1.mlp.up_proj.weight"] == (None, Replica.SAME)


def test_a_wrapped_model_is_cut_by_the_wrapped_plan():
    outer = torch.nn.Module()
    outer.inner = model_of("Llama")
    assert styles_of(outer, tree_of(outer))["inner.model.layers.*.mlp.up_proj"] == "colwise"
    assert heads_of(outer) == {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert tensor_axis_of(outer, tree_of(outer), size=2).head == "inner.lm_head"


def opt_like() -> ModuleNode:
    """Two blocks whose feed-forward layers lie in the block itself."""

    def leaf(path: str, class_name: str, **shapes: tuple[int, ...]) -> ModuleNode:
        params = {name: ParamSpec(f"{path}.{name}", shape, "fp32") for name, shape in shapes.items()}
        return ModuleNode(path, class_name, params)

    def block(path: str) -> ModuleNode:
        linears = {"fc1": (64, 32), "fc2": (32, 64)}
        names = [f"{name}_proj" for name in ("q", "k", "v", "out")]
        attention = {name: leaf(f"{path}.self_attn.{name}", "Linear", weight=(32, 32)) for name in names}
        norms = ("self_attn_layer_norm", "final_layer_norm")
        return ModuleNode(path, "Block", children={
            "self_attn": ModuleNode(f"{path}.self_attn", "Attention", children=attention),
            **{name: leaf(f"{path}.{name}", "Linear", weight=of) for name, of in linears.items()},
            **{name: leaf(f"{path}.{name}", "LayerNorm", weight=(32,)) for name in norms},
        })  # fmt: skip

    blocks = {str(index): block(f"layers.{index}") for index in range(2)}
    return ModuleNode("", "Model", children={"layers": ModuleNode("layers", "ModuleList", children=blocks)})


LAYER = "model.layers.0"
# What is asked of whom, and what the refusal says: the module or numbers, and the nearest that is supported.
REFUSED: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "GPT-2 has no plan": ("GPT2", {}, ["GPT2LMHeadModel", "parallel.plan", "parallel.tensor = 1"]),
    "a transposed weight": (
        "GPT2", {"given": {"transformer.h.*.mlp.c_fc": "colwise"}},
        ["transformer.h.0.mlp.c_fc", "Conv1D", "'replicate'"],
    ),
    "more ranks than key heads": (
        "Llama", {"size": 4}, [f"num_key_value_heads of {LAYER}.self_attn is 2", "parallel.tensor = 2"]
    ),
    "heads that three ranks cannot share": (
        "Llama", {"size": 3, "hidden_size": 48}, ["num_attention_heads", "parallel.tensor = 2"]
    ),
    "an uneven width": (
        "Llama", {"intermediate_size": 50, "num_key_value_heads": 4, "size": 4},
        [f"{LAYER}.mlp.gate_proj.weight has 50 rows", "parallel.tensor = 2"],
    ),
    "an uneven block of a packed weight": (
        "Phi3", {"given": {"layers.*.mlp.gate_up_proj": "packed_colwise", "layers.*.mlp.down_proj": "rowwise"},
                 "intermediate_size": 49},
        [f"{LAYER}.mlp.gate_up_proj.weight has 98 rows, 2 blocks of 49", "parallel.tensor = 1"],
    ),
    "uneven experts": (
        "Mixtral", {"intermediate_size": 51},
        [f"{LAYER}.mlp.experts.gate_up_proj", "2 blocks of 51", "parallel.tensor = 1"],
    ),
    "packed_rowwise": ("Llama", {"given": {"layers.*.mlp.down_proj": "packed_rowwise"}}, ["down_proj", "'rowwise'"]),
    "sequence_parallel": ("Llama", {"given": {"norm": "sequence_parallel"}}, ["parallel.sequence = true"]),
    "all_reduce": ("Llama", {"given": {"layers.*.mlp": "all_reduce"}}, ["mlp", "'rowwise'"]),
    "moe_identity_expert": ("Mixtral", {"given": {"layers.*.mlp.experts": "moe_identity_expert"}}, ["'replicate'"]),
    "mla_kv_a_proj": ("DeepseekV2", DEEPSEEK, ["kv_a_proj_with_mqa", "'replicate'"]),
    "an embedding by its width": ("Llama", {"given": {"embed_tokens": "embedding_colwise"}}, ["'embedding_rowwise'"]),
    "a misspelt style": ("Llama", {"given": {"layers.*.mlp.up_proj": "colwize"}}, ["'colwize'", "'colwise'"]),
    "a pattern that matches nothing": (
        "Llama", {"given": {"layers.*.mlp.up_prj": "colwise"}}, ["layers.*.mlp.up_prj", "'model.layers.*.mlp.up_proj'"]
    ),
    "a module that is no linear layer": (
        "Llama", {"given": {"layers.*.input_layernorm": "colwise"}},
        [f"{LAYER}.input_layernorm", "LlamaRMSNorm", "'replicate'"],
    ),
    "columns that nothing sums": ("Llama", {"given": {"lm_head": "colwise"}}, ["lm_head", "'colwise_gather_output'"]),
    "a sum of what nothing divided": (
        "Llama", {"given": {f"layers.*.self_attn.{name}_proj": "replicate" for name in "qkv"}},
        [f"{LAYER}.self_attn.o_proj", "'rowwise_split_input'"],
    ),
    "a sum of gradients that are whole": (
        "Llama", {"given": {"norm": "replicated_with_grad_allreduce"}}, ["model.norm", "'replicate'"]
    ),
    "a parameter within a cut of which nothing is said": (
        "Apertus", {}, [f"{LAYER}.mlp.act_fn.alpha_p", "'replicated_with_grad_allreduce'", "'replicate'"]
    ),
    "one of two tied": ("Gemma2", {"given": {"lm_head": "rowwise"}}, ["lm_head", "'colwise_gather_output'"]),
    "experts of which a parameter stays whole": (
        "Mixtral", {"given": {"layers.*.mlp.experts.down_proj": "replicate"}},
        ["experts.down_proj", "no style", "'replicate'"],
    ),
    "a bare parameter": ("Llama", {"given": {"norm.weight": "colwise"}}, ["model.norm.weight", "'replicate'"]),
    "experts along the sequence": (
        "Mixtral", {"sequence": True}, [f"{LAYER}.mlp.experts", "parallel.sequence = false"]
    ),
    "an attention without a style along the sequence": (
        "Llama", {"sequence": True, "given": {f"layers.*.self_attn.{name}_proj": "replicate" for name in "qkvo"}},
        [f"{LAYER}.self_attn.q_proj", "parallel.sequence = false"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_in_a_second_with_the_nearest_that_is(case):
    family, asked, said = REFUSED[case]
    known = ("given", "size", "sequence")
    model = model_of(family, **{name: value for name, value in asked.items() if name not in known})
    root = tree_of(model)
    start = time.perf_counter()
    with pytest.raises(ConfigError) as caught:
        tensor_axis_of(model, root, **{"size": 2, **{name: asked[name] for name in known if name in asked}})
    assert time.perf_counter() - start < 1
    for words in said:
        assert words in str(caught.value)


def test_an_attention_that_adds_its_residual_is_refused_by_name():
    model = model_of("Bloom", vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    given = {"h.*.self_attention.query_key_value": "colwise", "h.*.self_attention.dense": "rowwise"}
    with pytest.raises(ConfigError, match=r"transformer\.h\.0\.self_attention .*residual"):
        tensor_axis_of(model, tree_of(model), size=2, given=given)


def test_a_model_whose_linear_layers_are_wrapped_is_refused_by_name():
    model = model_of("Llama")
    for layer in model.model.layers:
        wrapper = type("Linear", (torch.nn.Module,), {})()
        wrapper.base_layer, layer.mlp.up_proj = layer.mlp.up_proj, wrapper
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp\.up_proj.*without a weight of its own"):
        tensor_axis_of(model, tree_of(model), size=2)
