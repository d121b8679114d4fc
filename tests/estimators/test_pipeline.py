"""Estimates of a pipeline: each place's plan is the run's; activations, time and traffic follow its table."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

import infinity
from estimators.cli import main
from estimators.estimate import Estimate, Machine, estimate
from estimators.phases import Phase
from estimators.traffic import Link
from infinity.errors import ConfigError
from infinity.parallel.stage_check import cut_into_stages
from infinity.plan.pipeline import SCHEDULES, activations_in_flight
from infinity.plan.plan import Plan
from infinity.plan.spec import module_tree
from infinity.plan.types import Kind, Tier
from tests.conftest import RankPools
from tests.estimators.test_equals_plan import BOUNDS, NVME, SMALL, at, values_of
from tests.estimators.test_tensor import real
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


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "phi3", "mixtral", "gpt2"])
def test_a_config_json_is_cut_where_a_run_cuts_its_model(model_type: str) -> None:
    model, values = real(model_type)
    asked = {**BF16, "parallel": {"pipeline": 2}}
    found = estimate(values, asked, ranks=2, sequence=16)
    assert found.plan.pipeline is not None
    node = module_tree(model, compute_dtype="bf16")
    cut = cut_into_stages(model, found.config, node, tuple(model._no_split_modules or ()))
    assert found.plan.pipeline.split.cut == cut
    assert estimate(model, asked, ranks=2, sequence=16).plans == found.plans


def of(config: dict[str, Any] = BF16, **options: Any) -> Estimate:
    given = {"ranks": 4, "pp": 4, "micro_batches": 8, "sequence": 32, **options}
    return estimate(values_of("llama", {**SMALL, "num_hidden_layers": 8}), config, **given)


def test_one_rank_of_the_pipeline_axis_changes_nothing() -> None:
    assert of(pp=1).as_dict() == of(pp=None).as_dict()
    assert "pipeline" not in of(pp=1).as_dict()


def test_stages_have_the_model_between_them() -> None:
    # Nothing is joined with what other stages need.
    apart = {**BF16, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10}}
    whole, cut = of(apart, pp=1, ranks=1), of(apart)
    assert cut.numel == whole.numel == sum(own.plan.numel for own in cut.stages)
    assert sum(own.flops for own in cut.stages) == pytest.approx(whole.flops)
    tensor, both = of(ranks=2, pp=1, tp=2), of(ranks=8, tp=2)
    assert sum(own.exchanged_nbytes for own in both.stages) == pytest.approx(tensor.exchanged_nbytes, rel=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_are_those_of_the_table(schedule: str) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    found = of(schedule=schedule, virtual_stages=virtual)
    part = found.plan.pipeline
    assert part is not None
    counts = activations_in_flight(part.split.tables)
    assert [own.held.in_flight for own in found.stages if own.held is not None] == [*counts]
    for own in found.stages:
        assert own.activations is not None and own.held is not None
        assert own.activations.nbytes == own.held.nbytes == sum(own.activations.parts.values())
        held = own.phases[Phase.PIPELINE][Tier.GPU][Kind.ACTIVATION]
        assert held <= own.held.nbytes
        assert Phase.FORWARD not in own.phases
    assert found.peak(Tier.GPU) == max(own.peak(Tier.GPU) for own in found.stages)


def test_schedules_hold_and_wait_in_their_order() -> None:
    gpipe, plain, split = (of(schedule=schedule) for schedule in ("gpipe", "1f1b", "zero_bubble"))
    interleaved = of(schedule="interleaved", virtual_stages=2)
    bubbles = [each.schedule.times.bubble for each in (plain, interleaved, split) if each.schedule is not None]
    assert bubbles[0] > bubbles[1] and bubbles[0] > bubbles[2]
    assert plain.outline.seconds > split.outline.seconds
    assert gpipe.stages[0].activations.nbytes > plain.stages[0].activations.nbytes  # type: ignore[union-attr]
    assert "deferred weight gradients" in split.stages[3].activations.parts  # type: ignore[union-attr]


def test_what_crosses_boundaries_is_sent_and_takes_time() -> None:
    found = of()
    boundary = 32 * 32 * 2
    assert [own.passed_nbytes for own in found.stages] == [boundary * 8 * times for times in (1, 2, 2, 1)]
    sent = found.stages[1].traffic.nbytes[Link.NETWORK]
    assert sent[Kind.ACTIVATION] == 2 * 8 * boundary
    slow = of(profile=found.profile.model_copy(update={"network_rate": 1e5}))
    assert slow.outline.seconds > found.outline.seconds + 3 * boundary / 1e5


def test_recomputed_blocks_hold_their_inputs() -> None:
    kept, again = of(), of({**BF16, "activation_checkpointing": {"every": 1}})
    away = of({**BF16, "activation_checkpointing": {"every": 1, "offload": {"device": "cpu"}}})
    saved = [found.stages[1].held.saved[1] for found in (kept, again, away)]  # type: ignore[union-attr]
    # Of two blocks.
    assert saved[0] > saved[1] == 2 * 32 * 32 * 2 > saved[2] == 0
    # Two blocks of each of four micro-batches of place 0.
    assert away.stages[0].offloaded is not None and away.stages[0].offloaded.count == 8


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pp": 3}, "parallel.pipeline is 3 but 4 ranks"),
        ({"config": {**BF16, "parallel": {"pipeline": 2}}}, "parallel.pipeline is 2, and 4 ranks of the pipeline axis"),
        ({"schedule": "interleaved", "virtual_stages": 3}, "12 but LlamaForCausalLM has 8 blocks"),
        ({"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 9}, "nearest numbers of micro-batches"),
        ({"config": {**BF16, "gradient_accumulation_steps": 4}}, "gradient_accumulation_steps is 4"),
    ],
)  # fmt: skip
def test_what_cannot_be_a_pipeline_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        of(**options)


def test_the_command_prints_a_line_a_place(capsys: pytest.CaptureFixture[str], tmp_path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(BF16))
    options = ["llama-3.2-1b", "--ranks", "8", "--pp", "4", "--micro-batches", "8"]
    options += ["--config", str(tmp_path / "c.json")]
    assert main([*options, "--schedule", "zero_bubble", "--gpu", "80GB", "--ram", "512GB"]) == 0
    text = capsys.readouterr().out
    assert "pipeline of 4, zero_bubble, 8 micro-batches: bubble" in " ".join(text.split())
    assert sum(line.startswith(f"  {place} ") for line in text.splitlines() for place in range(4)) == 4
    assert main([*options, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [place["in_flight"] for place in data["pipeline"]["places"]] == [4, 3, 2, 1]
    assert 0 < data["pipeline"]["bubble"] < 1
