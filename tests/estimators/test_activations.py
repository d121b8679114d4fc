"""Closed forms of activations against measured shapes of transformers' own models, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from estimators.activations import activations
from estimators.estimate import Machine, estimate
from estimators.phases import Phase
from estimators.report import format_report
from infinity import measure_activations
from infinity.engine.activation_forecast import measure_call
from infinity.errors import ConfigError
from infinity.plan.types import Kind, Tier
from tests.support.cells import covered, turns

LLAMA = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
# What is measured: model, and what changes in its configuration.
MODELS = {
    "Llama": LLAMA, "Qwen2": LLAMA, "Qwen3": {**LLAMA, "head_dim": 32},
    "GPT2": {"vocab_size": 1000, "n_embd": 128, "n_layer": 4, "n_head": 8, "bos_token_id": 0, "eos_token_id": 0},
}  # fmt: skip
_EXPERTS = {**LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_LATENT = {
    **_EXPERTS, "num_key_value_heads": 8, "n_routed_experts": 16, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
    "q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 48,
    "n_group": 2, "topk_group": 1,
}  # fmt: skip
# Blocks unlike Llama's, in bf16: experts are multiplied in nothing else on shapes. Name, attention, what changes.
OTHERS = {
    "Mixtral": ("Mixtral", "sdpa", {**LLAMA, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "Qwen2Moe": ("Qwen2Moe", "sdpa", {**_EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 160}),
    "Qwen3Moe": ("Qwen3Moe", "sdpa", {**_EXPERTS, "num_experts": 8, "head_dim": 32}),
    "Gemma2": ("Gemma2", "eager", {**LLAMA, "head_dim": 32}),
    "Gemma3": ("Gemma3", "sdpa", {**LLAMA, "head_dim": 32}),
    "Phi3": ("Phi3", "sdpa", {**LLAMA, "pad_token_id": 0}),
    "DeepSeek": ("DeepseekV3", "sdpa", _LATENT),
    "DeepSeek, values narrower than keys": ("DeepseekV3", "sdpa", {**_LATENT, "v_head_dim": 24}),
}
# What is measured takes as long as its operations are many: what two blocks tell, more do not tell better.
FEW_BLOCKS = ({"num_hidden_layers": 2, "vocab_size": 500}, {"n_layer": 2, "vocab_size": 500})
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def on_meta(name: str, attention: str, dtype: str, checkpointing: bool, **changes: object) -> torch.nn.Module:
    config = getattr(transformers, f"{name}{'Text' if name == 'Gemma3' else ''}Config")(
        **{**MODELS.get(name, {}), **changes}, use_cache=False, attn_implementation=attention
    )
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, f"{name}{head}")(config).to(DTYPES[dtype]).train()
    if checkpointing:
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
                module._gradient_checkpointing_func = lambda run, *args: torch.utils.checkpoint.checkpoint(
                    run, *args, use_reentrant=False
                )
    return model


@pytest.mark.parametrize(
    *covered(
        name=[*MODELS], computed=[("sdpa", "fp32"), ("sdpa", "bf16"), ("eager", "fp32")], checkpointing=[False, True]
    )
)
def test_a_closed_form_is_within_a_tenth_of_measured_shapes(name, computed, checkpointing):
    attention, dtype = computed
    model = on_meta(name, attention, dtype, checkpointing, **FEW_BLOCKS[name == "GPT2"])
    ids = torch.zeros(2, 300, dtype=torch.int64)
    measured = measure_activations(model, {"input_ids": ids, "labels": ids})
    closed = activations(
        model.config.to_dict(), batch=2, sequence=300, compute_dtype=dtype, checkpointing=checkpointing,
        attention=attention,
    )  # fmt: skip
    assert closed.nbytes == pytest.approx(measured.nbytes, rel=0.1), (closed.parts, measured.parts)
    assert sum(closed.parts.values()) == closed.nbytes
    assert "closed form" in closed.source
    assert "measured" in measured.source


@pytest.mark.parametrize(*turns(case=[*OTHERS], checkpointing=[False, True]))
def test_other_blocks_are_within_a_tenth_of_measured_shapes_too(case, checkpointing):
    name, attention, values = OTHERS[case]
    # Few words: the blocks decide, not the loss.
    model = on_meta(name, attention, "bf16", checkpointing, **{**values, "vocab_size": 100, "num_hidden_layers": 2})
    ids = torch.zeros(2, 300, dtype=torch.int64)
    measured = measure_activations(model, {"input_ids": ids, "labels": ids})
    closed = activations(
        model.config.to_dict(), batch=2, sequence=300, compute_dtype="bf16", checkpointing=checkpointing,
        attention=attention,
    )  # fmt: skip
    assert closed.nbytes == pytest.approx(measured.nbytes, rel=0.1), (closed.parts, measured.parts)


PARTS: dict[str, tuple[str, str, str, bool, int, dict[str, object]]] = {
    # Two ranks each have a copy of the same keys and values.
    "copies": ("Llama", "sdpa", "bf16", False, 4, {}),
    "scores": ("Llama", "eager", "fp32", False, 4, {}),
    "recomputed": ("Qwen3", "sdpa", "bf16", True, 4, {"head_dim": 32}),
    # Exchanges are what its backward holds most of.
    "wide attention": ("Llama", "sdpa", "fp32", True, 4, {"head_dim": 64, "num_key_value_heads": 8}),
    "products apart": ("Phi3", "sdpa", "bf16", False, 2, {"pad_token_id": 0}),
    "latent": ("DeepseekV3", "sdpa", "bf16", False, 2, _LATENT),
}  # fmt: skip


@pytest.mark.parametrize("case", PARTS)
def test_a_part_of_each_sequence_is_within_a_tenth_of_measured_shapes(case):
    """Along a sequence axis a rank has a part of the tokens, and in attention a part of the heads of all of them."""
    name, attention, dtype, checkpointing, parts, changes = PARTS[case]
    sizes = {"vocab_size": 100, "num_hidden_layers": 2}
    model = on_meta(name, attention, dtype, checkpointing, **{**LLAMA, **changes, **sizes})
    ids = torch.zeros(1, 512 // parts, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    measured = measure_call(model, (), batch, parts=parts)
    closed = activations(
        model.config.to_dict(), batch=1, sequence=512, compute_dtype=dtype, checkpointing=checkpointing,
        attention=attention, parts=parts,
    )  # fmt: skip
    assert closed.nbytes == pytest.approx(measured.nbytes, rel=0.1), (closed.parts, measured.parts)


def test_without_dropout_gpt2_keeps_no_scores():
    kept = [
        activations({**MODELS["GPT2"], "model_type": "gpt2", **change}, batch=1, sequence=512, compute_dtype="fp32")
        for change in ({}, {"attn_pdrop": 0.0})
    ]
    scores = 3 * 4 * 8 * 512 * 512
    assert kept[0].nbytes - kept[1].nbytes == pytest.approx(4 * scores, rel=0.01)


def test_activations_grow_with_tokens_and_shrink_with_checkpointing():
    def of(batch: int, checkpointing: bool) -> int:
        return activations(LLAMA, batch=batch, sequence=128, compute_dtype="bf16", checkpointing=checkpointing).nbytes

    assert of(8, False) == 8 * of(1, False)
    assert of(8, True) < of(8, False) / 2


def test_experts_keep_what_the_chosen_ones_compute():
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    parts = activations(mixtral, batch=1, sequence=128, compute_dtype="bf16").parts
    assert "experts of 4 blocks" in parts
    one = activations({**mixtral, "num_experts_per_tok": 1}, batch=1, sequence=128, compute_dtype="bf16").parts
    assert parts["experts of 4 blocks"] > one["experts of 4 blocks"]


def test_a_missing_size_is_named():
    with pytest.raises(ConfigError, match="vocab_size"):
        activations({**LLAMA, "vocab_size": None}, batch=1, sequence=8, compute_dtype="bf16")


def test_offloaded_checkpoints_are_counted_where_they_lie():
    """All but the one that backward works on leave the device; on the tier is every byte, beside the buffers."""
    machine = Machine(gpu_nbytes=10**11, cpu_nbytes=10**12, nvme_nbytes=10**12)

    def estimated(**section):
        config = {"bf16": {"enabled": True}, "activation_checkpointing": section}
        return estimate("llama-3.1-8b", config, batch=2, sequence=4096, machine=machine)

    each = 2 * 4096 * 4096 * 2
    plain = estimated(every=1)
    assert plain.work.checkpointing
    for tier, buffers in (("cpu", 0), ("nvme", 3)):
        offload = {"device": tier, "nvme_path": "/drive", "buffer_count": 3}
        found = estimated(every=1, offload=offload)
        before, after = (one.phases[Phase.FORWARD][Tier.GPU] for one in (plain, found))
        assert before[Kind.ACTIVATION] - after[Kind.ACTIVATION] == 31 * each
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            before, after = plain.phases[phase], found.phases[phase]
            assert after[Tier.named(tier)][Kind.ACTIVATION] == 32 * each
            assert after[Tier.CPU].get(Kind.POOL, 0) - before[Tier.CPU].get(Kind.POOL, 0) == buffers * each
        assert f"inputs of 32 layers, 2.15 GB, lie on {tier} until backward" in " ".join(format_report(found).split())
    # Every second layer: half of the inputs, and the other half of the layers whole.
    second = estimated(every=2)
    assert second.activations.inputs == 16
    assert plain.activations.nbytes < second.activations.nbytes < estimated().activations.nbytes
    assert plain.flops > second.flops > estimated().flops


def test_a_preset_is_counted_by_the_blocks_that_it_has():
    told = {name: estimate(name, "{}").activations for name in ("deepseek-v3", "gemma-2-2b", "gemma-3-1b", "phi-4")}
    assert [found.source.split("'")[0] for found in told.values()] == [
        "closed form of DeepSeek-V3", "closed form of Gemma 2", "closed form of Gemma 3", "closed form of Llama",
    ]  # fmt: skip
    assert {"feed-forward of 3 blocks", "experts of 58 blocks"} <= set(told["deepseek-v3"].parts)
