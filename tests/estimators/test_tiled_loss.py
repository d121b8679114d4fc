"""The loss in tiles: what it keeps against measurement, what it costs, and a search that turns to it where it helps."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import peft
import pytest
import torch
import transformers

import infinity
from estimators.activations import activations
from estimators.cli import main
from estimators.estimate import Machine, estimate
from estimators.search import Wish, advise, search, usual
from estimators.step_time import Bound
from infinity import measure_activations
from infinity.errors import ConfigError
from infinity.plan.types import Tier
from tests.estimators.test_activations import FEW_BLOCKS, on_meta
from tests.estimators.test_equals_plan import SMALL
from tests.support.cells import kept

GB = 10**9
# A small model with a large vocabulary, and long sequences: logits are 16 GB, thrice.
WORDY = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128_000,
}  # fmt: skip
WORDLESS = {**WORDY, "vocab_size": 2000}


def wish(model: Any = WORDY, gpu: float = 12, **changes: Any) -> Wish:
    asked = Wish(model, Machine(int(gpu * GB), 64 * GB, None), {"sequence": 8192})
    return dataclasses.replace(asked, **changes)


# Every size, and every pair of the others.
SIZED = [
    ("Llama", "bf16", False, 50_000, 600, True), ("Llama", "bf16", False, 32_000, 1500, False),
    ("Llama", "bf16", False, 20_000, 4096, True), ("Llama", "bf16", True, 20_000, 2500, False),
    ("Llama", "fp32", False, 20_000, 2500, True), ("GPT2", "bf16", False, 20_000, 1500, False),
    ("GPT2", "bf16", True, 50_000, 600, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "dtype", "adapters", "words", "tokens", "checkpointing"),
    kept([*SIZED, *((*cell[:-1], not cell[-1]) for cell in SIZED)], SIZED),
)
def test_a_loss_in_tiles_is_within_a_tenth_of_measured_shapes(name, dtype, adapters, words, tokens, checkpointing):
    longest = {"n_positions": tokens, "attn_pdrop": 0.0} if name == "GPT2" else {"max_position_embeddings": tokens}
    sizes = {**FEW_BLOCKS[name == "GPT2"], "vocab_size": words, **longest}
    model = on_meta(name, "sdpa", dtype, checkpointing, **sizes)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    whole = measure_activations(model, {"input_ids": ids, "labels": ids})
    infinity.tile_sequence(model, mlps=False)
    layers = frozenset({"c_attn"} if name == "GPT2" else {"q_proj", "v_proj"}) if adapters else None
    tiled = model
    if adapters:
        lora = peft.LoraConfig(r=8, fan_in_fan_out=name == "GPT2")
        tiled = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    measured = measure_activations(tiled, {"input_ids": ids, "labels": ids})
    closed = activations(
        json.loads(model.config.to_json_string()), batch=1, sequence=tokens, compute_dtype=dtype,
        checkpointing=checkpointing, tiled_loss=True, adapted=layers, rank=8,
    )  # fmt: skip
    assert closed.nbytes == pytest.approx(measured.nbytes, rel=0.1), (closed.parts, measured.parts)
    assert sum(closed.parts.values()) == closed.nbytes
    assert "logits and loss" not in closed.parts
    assert measured.nbytes < whole.nbytes / 3


def test_the_head_is_computed_once_more_and_its_logits_are_passed_twice():
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    whole, tiled = (estimate(WORDY, config, sequence=1024, tiled_loss=each) for each in (False, True))
    assert tiled.plan == whole.plan
    assert tiled.flops - whole.flops == 2 * 1024 * 1024 * 128_000
    logits = 1024 * 128_000
    compute = whole.profile.compute["bf16"]
    more = (tiled.flops - whole.flops) / compute.rate + logits * compute.logit_seconds
    taken = [each.outline.parts[Bound.COMPUTE] for each in (whole, tiled)]
    assert taken[1] - taken[0] == pytest.approx(more)
    assert tiled.outline.seconds > whole.outline.seconds
    assert tiled.with_tiles(False) == whole


def test_logits_that_do_not_fit_are_tiled_and_nothing_else_is_given_up():
    found = search(wish()).estimate
    assert found.fits
    assert found.work.tiled_loss
    assert not found.work.checkpointing
    assert set(found.plan.placement.states) == {Tier.GPU}
    # As well as without tiles on an accelerator on which the logits have room.
    assert not search(wish(gpu=80)).estimate.work.tiled_loss
    assert not search(wish(tiled_loss=False)).estimate.fits


def test_mlps_are_tiled_where_nothing_less_fits():
    """A long sequence, whose blocks do not fit one by one even with their inputs elsewhere."""
    wide = {**WORDLESS, "intermediate_size": 8192}
    asked = wish(wide, gpu=6, options={"sequence": 65_536})
    found = search(asked).estimate
    assert found.fits
    assert found.work.tiled_mlps
    assert found.work.tiled_loss
    assert not search(dataclasses.replace(asked, tiled_mlps=False)).estimate.fits


def test_where_logits_are_not_what_is_large_they_stay_whole():
    found = search(wish(WORDLESS, gpu=4)).estimate
    assert found.fits
    assert found.work.checkpointing
    assert not found.work.tiled_loss


def test_a_model_that_caps_its_logits_is_never_tiled(capsys):
    capped = {**WORDY, "model_type": "gemma2", "final_logit_softcapping": 30.0}
    assert wish(capped).tilings == [(False, False)]
    with pytest.raises(ConfigError, match="caps its logits"):
        _ = estimate(capped, "{}", tiled_loss=True).activations
    assert main(["gemma-2-2b", "--tiled-loss", "--config", "{}"]) == 2
    assert "leave --tiled-loss out" in capsys.readouterr().err


def test_what_is_asked_for_is_kept():
    assert search(wish(gpu=80, tiled_loss=True)).estimate.work.tiled_loss
    assert all(found.work.tiled_loss for _, found in usual(wish(tiled_loss=True)))
    assert not any(found.work.tiled_loss for _, found in usual(wish()))


def test_advice_with_tiles_is_faster_than_without_them():
    """The room that logits took is given to more sequences at a time; without tiles less is gathered at once."""
    asked = wish(gpu=10, options={"sequence": 2048})
    free, held = (advise(dataclasses.replace(asked, tiled_loss=tiled)).best.estimate for tiled in (None, False))
    assert free.work.tiled_loss
    assert free.outline.tokens_a_second > 1.02 * held.outline.tokens_a_second


def test_the_saved_file_trains_with_the_call_that_is_shown(tmp_path, capsys):
    file, model = tmp_path / "found.json", tmp_path / "config.json"
    model.write_text(json.dumps(WORDY))
    command = [str(model), "--gpu", "12GB", "--ram", "64GB", "--sequence", "8192", "--fit", "--lora", "4"]
    assert main([*command, "--save", str(file)]) == 0
    said = capsys.readouterr()
    code = [
        "infinity.tile_sequence(model, mlps=False)", "model = peft.get_peft_model(model, peft.LoraConfig(r=4))",
    ]  # fmt: skip
    assert "Give infinity.initialize the model with its loss in tiles and its adapters:\n  " + "\n  ".join(code) in (
        said.out
    )
    assert " ".join(code[0].split()) in said.err
    assert "in tiles" in said.out.split("\n\n")[1]
    assert "loss in tiles spares" in said.out
    base = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL))
    scope: dict[str, Any] = {"infinity": infinity, "peft": peft, "model": base}
    for line in code:
        exec(line, scope)
    tokens = torch.randint(96, (1, 12))
    engine, *_ = infinity.initialize(model=scope["model"], config=str(file))
    with engine:
        losses = []
        for _ in range(2 * engine.gradient_accumulation_steps()):
            output = engine(input_ids=tokens, labels=tokens)
            assert getattr(output, "logits", None) is None
            losses.append(float(output.loss.detach()))
            engine.backward(output.loss)
            engine.step()
    assert losses[-1] < losses[0]


def test_one_configuration_is_shown_with_tiles_as_it_was_found(tmp_path, capsys):
    file, model = tmp_path / "found.json", tmp_path / "config.json"
    model.write_text(json.dumps(WORDY))
    command = [str(model), "--gpu", "12GB", "--ram", "64GB", "--sequence", "8192"]
    assert main([*command, "--save", str(file)]) == 0
    found = capsys.readouterr().out
    assert main([*command, "--config", str(file), "--tiled-loss", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["tiled_loss"] and told["fits"]
    assert f"{told['activations']['nbytes'] / 1e9:.2f}" in found
    assert main([*command, "--config", str(file)]) == 1
