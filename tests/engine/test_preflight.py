"""A model far too large for this machine is asked about on the meta device: an answer in seconds, without memory."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import infinity.api
from infinity.errors import CapacityError, ConfigError
from tests.support.clock import usual_seconds

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
    with usual_seconds() as taken, pytest.raises(CapacityError) as caught:
        infinity.api.initialize(model=model, config=config)
    assert taken.seconds < 2.0
    text = str(caught.value)
    assert "rank 0 plans 847 GB" in text
    assert "too much" in text and "Nearest configuration that fits: on " in text and "ranks" in text
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_would_fit_is_refused_for_having_no_values():
    with torch.device("meta"):
        model = torch.nn.Linear(8, 8)
    with pytest.raises(ConfigError, match="meta device"):
        infinity.api.initialize(model=model, config={})
