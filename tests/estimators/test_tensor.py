"""Estimates of a tensor axis: the run's own decisions, a rank's bytes, and what ranks send each other."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import transformers

from estimators.cli import main
from estimators.compute import STYLES
from estimators.estimate import Estimate, estimate
from estimators.traffic import Link
from infinity.errors import CapacityError, ConfigError
from infinity.plan.capacity import Capacity
from infinity.plan.capacity_report import nearest_fit, refuse
from infinity.plan.inputs import PlanInputs
from infinity.plan.shards import Replica
from infinity.plan.spec import module_tree
from infinity.plan.tensor_axis import styles_of
from tests.support.hub import hf_config

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
OTHERS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4}, "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24},
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24,
        "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20,
    },
}  # fmt: skip
BF16 = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def real(model_type: str) -> tuple[Any, dict[str, Any]]:
    """The model on the meta device, and the values of its config.json."""
    sizes = {} if model_type == "gpt2" else {**SMALL, **OTHERS.get(model_type, {})}
    config = transformers.AutoConfig.for_model(model_type, **sizes)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config), json.loads(config.to_json_string(use_diff=False))


def of(model_type: str = "llama", config: dict[str, Any] = BF16, **options: Any) -> Estimate:
    return estimate(real(model_type)[1], config, **{"ranks": 4, "sequence": 16, **options})


@pytest.mark.parametrize("model_type", STYLES)
def test_the_styles_of_an_architecture_are_those_of_its_model(model_type):
    model, _ = real(model_type)
    assert styles_of(model, module_tree(model, compute_dtype="bf16")) == STYLES[model_type]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "phi3", "gemma2", "mixtral", "deepseek_v3"])
def test_a_config_json_and_its_module_are_divided_alike(model_type, sequence):
    if sequence and model_type in ("mixtral", "deepseek_v3"):
        pytest.skip("experts are refused along the sequence")
    model, values = real(model_type)
    config = {**BF16, "parallel": {"tensor": 2, "sequence": sequence}}
    live, described = (estimate(each, config, ranks=4, sequence=16) for each in (model, values))
    assert live.plan == described.plan and live.axis == described.axis
    assert live.plan.topology.tp == live.plan.topology.dp == 2
    whole = estimate(values, BF16, ranks=2, sequence=16)
    local = live.plan.bytes_by_tier()
    assert local != whole.plan.bytes_by_tier()
    assert live.numel == whole.plan.numel


def test_one_rank_of_the_tensor_axis_changes_nothing():
    assert of(tp=1).as_dict() == of().as_dict()
    assert "tensor" not in of().as_dict()


def test_a_rank_has_its_shards_and_what_is_replicated():
    found = of("qwen3", tp=2)
    layer = {replica: 0 for replica in Replica}
    for layout in found.plan.layouts:
        for slot in layout.slots:
            layer[layout.replica] += slot.numel
    # Norms of width 32 before attention, before the feed-forward layer and at the end; those of heads are summed.
    assert layer[Replica.SAME] == 32 * (2 * 3 + 1)
    assert layer[Replica.PARTIAL] == 8 * 2 * 3
    assert 2 * layer[Replica.NONE] == found.numel - layer[Replica.SAME] - layer[Replica.PARTIAL]


def test_ranks_send_two_sums_a_region_and_what_the_vocabulary_needs():
    found = of(tp=2, batch=1)
    tokens, hidden, width = 16, 32, 2
    # Of two ranks a ring's sum sends its bytes once, a gather half of them.
    region = 2 * tokens * hidden * width
    # Looked-up words are summed, and so is the gradient of the head's input; the loss needs no gathered logits.
    words = 2 * tokens * hidden * width
    assert found.exchanged_nbytes == 3 * 2 * region + words
    # What is gathered within regions: queries, keys and values, the gate and the way up; in backward, what o_proj and
    # down_proj take.
    gathered = tokens * (3 * 32 + 2 * 64 + 32 + 64) * width // 2
    assert of("phi3", tp=2).exchanged_nbytes == 3 * (2 * region + gathered) + words
    # A layer that is computed again sums again.
    assert of(tp=2, checkpointing=True).exchanged_nbytes == 3 * 2 * region * 3 // 2 + words
    sent = found.traffic.total(Link.NETWORK) - found.exchanged_nbytes
    alone = estimate(found.model, BF16, ranks=2, sequence=16).traffic.total(Link.NETWORK)
    assert 0.4 < sent / alone < 0.7


def test_a_step_waits_for_what_ranks_send():
    slow, fast = (
        of(tp=2, sequence=512, profile=of().profile.model_copy(update={"network_rate": rate}), ranks=2)
        for rate in (1e8, 1e12)
    )
    waits = slow.exchanged_nbytes / 1e8 - slow.exchanged_nbytes / 1e12
    assert slow.time.seconds - fast.time.seconds == pytest.approx(waits, rel=0.2)
    assert slow.time.bound_by.value == "collectives"


def test_activations_within_regions_are_a_ranks_part():
    whole, cut = of(sequence=512).activations, of(sequence=512, tp=2).activations
    along = of(config={**BF16, "parallel": {"tensor": 2, "sequence": True}}, sequence=512).activations
    assert whole is not None and cut is not None and along is not None
    for part in ("attention of 3 blocks", "feed-forward of 3 blocks"):
        assert 2 * cut.parts[part] == whole.parts[part] == 2 * along.parts[part]
    logits = "logits and loss"
    big = {"vocab_size": 9600}
    wide, half = (estimate({**real("llama")[1], **big}, BF16, ranks=2, sequence=512, tp=tp) for tp in (1, 2))
    assert wide.activations is not None and half.activations is not None
    assert 2 * half.activations.parts[logits] == wide.activations.parts[logits]
    assert along.parts["norms of 3 blocks"] < cut.parts["norms of 3 blocks"] == whole.parts["norms of 3 blocks"]


def test_operations_are_a_ranks_part():
    whole, cut = of(ranks=1), of(ranks=2, tp=2)
    assert cut.flops == pytest.approx(whole.flops / 2, rel=0.01)
    assert of(ranks=2, tp=2, tiled_loss=True).flops < whole.flops


def test_more_ranks_keep_the_tensor_axis():
    found = of(tp=2)
    root = found.axis.divide(found.tree)
    inputs = PlanInputs(
        node=root, config=found.config, topology=found.plan.topology, accelerator=False,
        capacity=Capacity(process=found.plan.numel * 8),
    )  # fmt: skip
    fit = nearest_fit(inputs)
    assert fit is not None and fit.plan.topology.tp == 2
    assert fit.ranks == fit.plan.topology.dp * 2
    with pytest.raises(CapacityError, match="Nearest configuration that fits"):
        refuse(inputs, found.plan)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tp": 3, "ranks": 3}, "num_attention_heads of .* is 4.*parallel.tensor = 2 or 4"),
        ({"tp": 3, "ranks": 4}, "nearest is 2 or 4"),
        ({"tp": 2, "config": {**BF16, "parallel": {"tensor": 4}}}, "parallel.tensor is 4, and 2 ranks"),
        ({"model_type": "gpt2", "tp": 2, "sequence": 8}, "GPT2LMHeadModel .* parallel.plan"),
        ({"tp": 2, "lora": 8}, "adapters .* parallel.tensor = 1"),
        ({"model_type": "mixtral", "config": {**BF16, "parallel": {"tensor": 2, "sequence": True}}}, "experts"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        of(**options)


def test_an_uneven_vocabulary_is_remarked(capsys: pytest.CaptureFixture[str], tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**real("llama")[1], "vocab_size": 97}))
    assert main([str(tmp_path), "--ranks", "4", "--tp", "2", "--gpu", "8GB", "--ram", "32GB"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "4 ranks (data 2 x tensor 2)" in text
    assert "a vocabulary of 97 cannot be divided by 2" in text


def test_a_search_writes_the_axis_that_it_was_given(capsys: pytest.CaptureFixture[str], tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config("llama").to_dict()))
    saved = tmp_path / "saved.json"
    options = ["--ranks", "4", "--sequence", "16", "--gpu", "4GB", "--ram", "32GB"]
    assert main([str(tmp_path), *options, "--tp", "2", "--save", str(saved), "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert json.loads(saved.read_text())["parallel"] == {"tensor": 2}
    assert (best["estimate"]["data"], best["estimate"]["tensor"]) == (2, 2)
    assert main([str(tmp_path), *options, "--config", str(saved), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fingerprint"] == best["estimate"]["fingerprint"]
    assert main([str(tmp_path), *options, "--tp", "4", "--config", str(saved)]) == 2
    assert "parallel.tensor is 2, and 4 ranks" in capsys.readouterr().err
