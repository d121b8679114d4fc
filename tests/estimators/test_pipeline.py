"""Estimates of a pipeline: each place's plan is the run's, activations follow the table, and a step waits as it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import infinity
from estimators.estimate import estimate
from estimators.node import Machine
from infinity.plan.plan import Plan
from tests.conftest import RankPools
from tests.estimators.test_equals_plan import BOUNDS, NVME, SMALL, at, values_of
from tests.support.oracle import join

LAYERS = {**SMALL, "num_hidden_layers": 6}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LAYERS, "qwen2": {**LAYERS, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 96, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 48},
    "mixtral": {**LAYERS, "num_local_experts": 3},
}  # fmt: skip
# Model, axes and the rest, by the number of ranks.
RUNS: dict[int, list[tuple[str, dict[str, Any]]]] = {
    2: [
        ("llama", {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 4,
                   "zero_optimization": {"stage": 3, "offload_param": NVME, "offload_optimizer": NVME, **BOUNDS}}),
        ("qwen2", {"parallel": {"pipeline": 2, "schedule": "zero_bubble"}, "gradient_accumulation_steps": 2,
                   "bf16": {"enabled": True}, "zero_optimization": {"stage": 2, **BOUNDS}}),
        ("gpt2", {"parallel": {"pipeline": 2, "schedule": "gpipe", "stages": [4, 2]}, "bf16": {"enabled": True},
                  "gradient_accumulation_steps": 3, "zero_optimization": {"stage": 0}}),
        ("mixtral", {"parallel": {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2},
                     "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 3, **BOUNDS}}),
    ],
    4: [
        ("llama", {"parallel": {"pipeline": 2, "tensor": 2}, "gradient_accumulation_steps": 4,
                   "bf16": {"enabled": True}, "zero_optimization": {"stage": 3, **BOUNDS}}),
        ("qwen2", {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2,
                   "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
        ("llama", {"parallel": {"pipeline": 4, "schedule": "zero_bubble"}, "gradient_accumulation_steps": 8,
                   "activation_checkpointing": {"every": 1}, "zero_optimization": {"stage": 3, **BOUNDS}}),
    ],
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def run_plan(model_type: str, config: dict[str, Any]) -> Plan:
    torch.set_num_threads(1)
    made = transformers.AutoConfig.for_model(model_type, **MODELS[model_type])
    model = transformers.AutoModelForCausalLM.from_config(made)
    with infinity.initialize(model=model, config={"train_micro_batch_size_per_gpu": 1, **config})[0] as engine:
        return engine.plan


def run_plans(rank: int, world: int, folder: str) -> list[Plan]:
    join(world)
    return [run_plan(model_type, at(folder, config)) for model_type, config in RUNS[world]]


@pytest.mark.parametrize("world", RUNS)
def test_the_plan_of_each_place_is_the_plan_of_the_engines_there(world: int, rank_pools: RankPools, tmp_path) -> None:
    ranks = rank_pools[world].run(run_plans, str(tmp_path), timeout=200)
    for case, (model_type, config) in enumerate(RUNS[world]):
        found = estimate(
            values_of(model_type, MODELS[model_type]), {"train_micro_batch_size_per_gpu": 1, **config}, ranks=world,
            ranks_per_node=world, machine=Machine(accelerator=False),
        )  # fmt: skip
        topology = found.plan.topology
        assert len(found.plans) == topology.pp
        for rank, plans in enumerate(ranks):
            own = found.plans[topology.coordinate(rank).pp]
            assert own == plans[case], (model_type, config, rank)
            assert own.fingerprint() == plans[case].fingerprint()
