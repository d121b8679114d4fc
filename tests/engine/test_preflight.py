"""A model far too large for this machine is asked about on the meta device: an answer in seconds, without memory."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity
import infinity.memory.drives
from infinity.base.sizes import format_bytes
from infinity.engine import preflight
from infinity.engine.activation_forecast import measure_call
from infinity.errors import CapacityError, ConfigError
from infinity.memory.scratch import FILE_NBYTES
from infinity.plan.capacity import Capacity
from infinity.plan.inputs import ANONYMOUS_OVERHEAD_NBYTES
from infinity.plan.types import Tier
from tests.support.clock import fewest_seconds
from tests.support.models import tiny_llama

LLAMA_70B = {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def test_a_llama_of_70_billion_parameters_is_refused_before_it_has_values(tmp_path):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**LLAMA_70B), dtype=torch.bfloat16)
    device = {"device": "nvme", "nvme_path": str(tmp_path / "drive")}
    config = {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": device, "offload_optimizer": device},
        "memory": {"nvme": {"max_bytes": "50GB"}, "cpu": {"max_bytes": "12GB"}},
    }
    texts = []

    def ask() -> None:
        with pytest.raises(CapacityError) as caught:
            infinity.initialize(model=model, config=config)
        texts.append(str(caught.value))

    assert fewest_seconds(ask, below=2.0) < 2.0
    text = texts[0]
    assert "rank 0 plans 847 GB" in text
    assert "too much" in text and "Nearest configuration that fits: on " in text and "ranks" in text
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_would_fit_is_refused_for_having_no_values():
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="meta device"):
        infinity.initialize(model=model, config={})


def offloading(folder: Path, limit: int | None, **more: Any) -> dict[str, Any]:
    """Optimizer states and activation checkpoints on one drive; `limit` is what NVMe may hold."""
    return {
        "train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "log_level": "info",
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}},
        "activation_checkpointing": {"every": 1, "offload": {"device": "nvme", "nvme_path": str(folder)}},
        **({} if limit is None else {"memory": {"nvme": {"max_bytes": limit}}}), **more,
    }  # fmt: skip


def planned_nvme_nbytes(folder: Path) -> int:
    engine, *_ = infinity.initialize(model=tiny_llama(), config=offloading(folder, None))
    with engine:
        return engine.plan.nvme_nbytes


def test_checkpoints_that_have_no_room_beside_the_plan_are_refused(tmp_path):
    """By the byte, before anything is written."""
    least = planned_nvme_nbytes(tmp_path) + FILE_NBYTES
    said = r"rank 0 has 67\.1 MB on nvme for activation checkpoints .*max_bytes"
    with pytest.raises(CapacityError, match=said) as error:
        infinity.initialize(model=tiny_llama(), config=offloading(tmp_path, least - 1))
    assert "activation_checkpointing.offload.device" in str(error.value)
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".bin"]
    infinity.initialize(model=tiny_llama(), config=offloading(tmp_path, least))[0].close()


def test_a_token_of_each_sequence_is_the_least_of_a_large_model(tmp_path):
    """3 blocks x 4 sequences x 2^24 x 2 bytes."""
    model, limit = tiny_llama(), planned_nvme_nbytes(tmp_path) + 3 * 4 * 2 * 2**24
    model.config = SimpleNamespace(hidden_size=2**24)
    with pytest.raises(CapacityError, match="they take at least 403 MB"):
        infinity.initialize(model=model, config=offloading(tmp_path, limit - 1))


def test_the_room_for_checkpoints_is_said_in_tokens(tmp_path, caplog):
    model, limit = tiny_llama(), planned_nvme_nbytes(tmp_path) + 2 * FILE_NBYTES
    model.config = SimpleNamespace(hidden_size=4096, max_position_embeddings=8192)
    with caplog.at_level(logging.INFO, "infinity"):
        infinity.initialize(model=model, config=offloading(tmp_path, limit))[0].close()
    tokens = 2 * FILE_NBYTES // (3 * 4096 * 2)
    said = f"{tokens:,} tokens of 3 blocks a micro-batch, which is {tokens // 4:,} for each of 4 sequences"
    assert said in caplog.text and "takes up to 8,192" in caplog.text


def small_llama() -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, vocab_size=500, max_position_embeddings=64))


def test_the_refusal_says_what_is_set_aside_and_what_was_taken(monkeypatch):
    """A machine that has less than the process's own overhead and this model's activations."""
    monkeypatch.setattr(infinity.memory.drives, "free_cpu_nbytes", lambda: 53_000_000)
    config = {"train_micro_batch_size_per_gpu": 4, "memory": {"activations": {"sequence_length": 48}}}
    with pytest.raises(CapacityError) as caught:
        infinity.initialize(model=small_llama(), config=config)
    text = str(caught.value)
    assert re.search(r"Free: 53\.\d MB of memory\. Of that is set aside: 50\.3 MB for what", text)
    assert re.search(r"The process had [\d.]+ [MG]B before", text)
    assert "for what a process's first steps add" in text and "for activations (4 x 48, measured)" in text


def test_every_rank_plans_with_what_the_poorest_has(monkeypatch):
    monkeypatch.setattr(preflight.collectives, "exchange", lambda mine, _: [mine, [3.0, 3.0, math.inf, math.inf]])
    assert preflight._agreed(Capacity(2, 4, 5, None), None) == Capacity(2, 3, 5, None)


def test_the_start_line_says_what_the_process_will_take_without_activations(caplog):
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=tiny_llama(), config={"log_level": "info"})
    with engine:
        report = engine.memory()
    said = f"this process takes {format_bytes(report.predicted)} of memory without a micro-batch's activations"
    assert said in caplog.text and "at most" not in caplog.text and "without activations" in str(report)
    held = engine.plan.nbytes_by_tier()
    assert report.predicted > report.baseline + held[Tier.GPU] + held[Tier.CPU]


@pytest.mark.parametrize("limit", [123_456_789, "50%"])
def test_what_the_configuration_says_of_activations_is_set_aside(monkeypatch, caplog, limit):
    monkeypatch.setattr(infinity.memory.drives, "free_cpu_nbytes", lambda: 10**9)
    config = {"memory": {"activations": {"max_bytes": limit}}, "log_level": "info"}
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=torch.nn.Linear(64, 64), config=config)
    with engine:
        room = engine.memory().limits["gpu"]
    nbytes = limit if isinstance(limit, int) else 500_000_000
    assert f"{format_bytes(nbytes)} for activations (memory.activations.max_bytes)" in caplog.text
    assert room is not None and abs(10**9 - nbytes - ANONYMOUS_OVERHEAD_NBYTES - room) < 10**6


@pytest.mark.parametrize("has", [False, True])
def test_a_processor_without_16_bits_has_whole_products_in_32(monkeypatch, caplog, has):
    """Of one weight's gradient at a time; a lookup's is no product."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: has)
    model = torch.nn.Sequential(torch.nn.Embedding(9000, 512), torch.nn.Linear(512, 3000), torch.nn.Linear(3000, 2))
    with caplog.at_level(logging.INFO, "infinity"):
        engine, *_ = infinity.initialize(model=model, config={"bf16": {"enabled": True}, "log_level": "info"})
    engine.close()
    assert (f"{format_bytes(4 * 512 * 3000)} for products of 16-bit matrices" in caplog.text) is not has


@pytest.mark.parametrize("every", [0, 1])
def test_a_stated_length_is_measured_at_the_start(caplog, every):
    """Of a model that evaluates, as `from_pretrained` hands it out, and without values: as it will be trained."""
    config = {
        "train_micro_batch_size_per_gpu": 2, "memory": {"activations": {"sequence_length": 32}},
        "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}, "activation_checkpointing": {"every": every},
    }  # fmt: skip
    tokens = torch.zeros(2, 32, dtype=torch.long)
    plain = small_llama().bfloat16().train()
    whole = measure_call(plain, (), {"input_ids": tokens, "labels": tokens}, holds_output=True)
    with infinity.Init(config=config):
        model = small_llama().eval()
    state = torch.get_rng_state()
    engine, *_ = infinity.initialize(model=model, config=config)
    with engine:
        report = engine.memory()
        assert not any(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert report.activations_source == "2 x 32, measured"
    assert report.activations_predicted == whole.nbytes if not every else report.activations_predicted < whole.nbytes
