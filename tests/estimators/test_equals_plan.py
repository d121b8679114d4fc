"""The estimate is the plan: of a config.json alone, the very value that `initialize()` makes of the real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import infinity
from estimators.estimate import Machine, estimate
from infinity.plan.plan import Plan
from tests.support.spawn import run_ranks

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 48},
    "mixtral": {**SMALL, "num_local_experts": 3},
    "qwen2": {**SMALL, "tie_word_embeddings": True},
}
MOE = {"qwen3_moe": {**SMALL, "num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8}}
BOUNDS = {
    "stage3_max_live_parameters": 40_000, "stage3_prefetch_bucket_size": 9000, "sub_group_size": 5000,
    "stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 20_000,
}  # fmt: skip
NVME = {"device": "nvme", "nvme_path": "nvme"}
# Stages, tiers, dtypes, bounds and accumulation; the number is that of the ranks.
CONFIGS: dict[str, tuple[int, dict[str, Any]]] = {
    "everything whole in fp32": (1, {"zero_optimization": {"stage": 0}}),
    "states on NVMe in bf16": (
        1,
        {"bf16": {"enabled": True}, "optimizer": {"type": "Muon"}, "zero_optimization": {
            "stage": 3, "offload_param": {"device": "cpu"}, "offload_optimizer": NVME, **BOUNDS}},
    ),
    "stage 1 on the CPU in bf16": (
        2, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
    ),
    "stage 2 in fp16": (
        2,
        {"fp16": {"enabled": True}, "optimizer": {"type": "Muon", "params": {"ns_dtype": "fp32"}},
         "zero_optimization": {"stage": 2, **BOUNDS}},
    ),
    "stage 3 on NVMe, accumulating": (
        2,
        {"bf16": {"enabled": True}, "gradient_accumulation_steps": 3, "communication_data_type": "fp32",
         "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME, **BOUNDS}},
    ),
    "stage 3 on NVMe with experts a few at a time, in 8 bits": (
        2,
        {"bf16": {"enabled": True}, "optimizer": {"type": "AdamW8bit", "params": {"min_8bit_size": 1000}},
         "zero_optimization": {
             "stage": 3, "offload_param": NVME, "offload_optimizer": NVME, "stage3_max_live_parameters": 10_000,
         }},
    ),
}  # fmt: skip
# The same, planned for clusters that are not here.
CLUSTERS = ((3, 3), (8, 8), (64, 8), (512, 4))


def values_of(model_type: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """What save_pretrained writes into config.json."""
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    return json.loads(config.to_json_string())


def engine_plan(model_type: str, config: dict[str, Any]) -> Plan:
    made = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(made)
    with infinity.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **config})[0] as engine:
        return engine.plan


def engine_plans(rank: int, world_size: int, folder: str, cases: list[tuple[str, dict[str, Any]]]) -> list[Plan]:
    return [engine_plan(model_type, at(folder, config)) for model_type, config in cases]


def at(folder: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with its drive in a folder of the test's own."""
    return json.loads(json.dumps(config).replace('"nvme_path": "nvme"', f'"nvme_path": {json.dumps(folder)}'))


def check(plan: Plan, model_type: str, config: dict[str, Any], ranks: int) -> None:
    found = estimate(
        values_of(model_type, MODELS[model_type]), {"train_micro_batch_size_per_gpu": 1, **config}, ranks=ranks,
        ranks_per_node=ranks, machine=Machine(accelerator=False),
    ).plan  # fmt: skip
    assert found.bytes_by_tier() == plan.bytes_by_tier()
    assert found == plan
    assert found.fingerprint() == plan.fingerprint()


def cases(ranks: int) -> list[tuple[str, dict[str, Any]]]:
    return [(model, config) for count, config in CONFIGS.values() if count == ranks for model in MODELS]


def test_there_are_twenty_four_pairs():
    assert len(cases(1)) + len(cases(2)) == 24


@pytest.mark.parametrize("model_type", MODELS)
def test_of_one_rank_the_estimate_is_the_engines_plan(model_type, tmp_path):
    for model, config in cases(1):
        if model == model_type:
            check(engine_plan(model, at(str(tmp_path), config)), model, config, 1)


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_weights_in_tiles_are_the_same_ones(model_type, tmp_path):
    zero = {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME, "tile_parameters": 900}
    config = {"zero_optimization": zero}
    plan = engine_plan(model_type, at(str(tmp_path), config))
    assert any(layout.is_tile for layout in plan.layouts)
    check(plan, model_type, config, 1)


def test_of_two_ranks_the_estimate_is_the_engines_plan(tmp_path):
    plans = run_ranks(engine_plans, 2, str(tmp_path), cases(2))
    assert plans[0] == plans[1]
    for plan, (model_type, config) in zip(plans[0], cases(2), strict=True):
        check(plan, model_type, config, 2)


@pytest.mark.parametrize("model_type", [*MODELS, *MOE])
def test_a_module_on_the_meta_device_and_its_values_make_one_plan_on_any_cluster(model_type):
    sizes = {**MODELS, **MOE}[model_type]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **sizes))
    for _, config in CONFIGS.values():
        for ranks, local in CLUSTERS:
            whole = {"train_micro_batch_size_per_gpu": 1, **config}
            options = {"ranks": ranks, "ranks_per_node": local}
            described, live = (estimate(each, whole, **options) for each in (values_of(model_type, sizes), model))
            assert described.plan == live.plan
            assert live.phases == described.phases


def test_the_public_name_needs_a_config_json_only(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(values_of("llama", SMALL)))
    found = infinity.estimate(tmp_path, Path("examples/configs/cpu_offload.json"), ranks=2)
    assert found.plan.topology.dp == 2
    assert found.model.name == tmp_path.name
