"""`infinity-estimate` prints the engine's own plan, quickly, without torch, or says why it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import transformers

from estimators.cli import estimate, main
from infinity.config import ResolveContext, load_config, resolve
from infinity.plan.plan import make_plan
from infinity.plan.request import plan_request, unit_rules
from infinity.plan.spec import describe, find_units
from infinity.plan.topology import Topology

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
}  # fmt: skip
PLAIN_8B = "--layers 32 --hidden 4096 --intermediate 14336 --heads 32 --kv-heads 8 --vocab 128256".split()
# 671 billion parameters: 58 layers of 256 experts.
HUGE = {
    "model_type": "mixtral", "hidden_size": 7168, "intermediate_size": 2048, "num_hidden_layers": 58,
    "num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 192, "num_local_experts": 256,
    "vocab_size": 129_280,
}  # fmt: skip
NVME = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": "nvme"},
        "offload_optimizer": {"device": "nvme", "nvme_path": "nvme"},
    },
}


def test_the_estimate_is_the_plan_of_the_real_model():
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**LLAMA_8B))
    resolved = resolve(load_config(NVME), ResolveContext(world_size=4, hidden_size=4096))
    spec = find_units(describe(model, compute_dtype="bf16"), unit_rules(resolved, tuple(model._no_split_modules)))
    plan = make_plan(spec, Topology(dp=4), plan_request(resolved, accelerator=True))
    assert estimate(LLAMA_8B, config=NVME, ranks=4, accelerator=True) == plan


def test_twelve_bytes_a_parameter_lie_on_the_drive(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "offload.json").write_text(json.dumps(NVME))
    assert main([str(tmp_path), "--config", str(tmp_path / "offload.json"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters"] == 8_030_261_248
    assert 12 <= answer["nvme_file_nbytes"] / answer["parameters"] < 12.01


def test_plain_numbers_are_a_llama(tmp_path, capsys):
    assert main(PLAIN_8B) == 0
    from_numbers = capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main([str(tmp_path / "config.json")]) == 0
    assert capsys.readouterr().out == from_numbers
    assert "8,030.3 M parameters" in from_numbers


def test_671_billion_parameters_take_less_than_a_second():
    began = time.perf_counter()
    plan = estimate(HUGE, config=NVME, ranks=64, accelerator=True)
    plan.explain()
    assert time.perf_counter() - began < 1
    assert 6.6e11 < plan.numel < 7.0e11


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--layers, --hidden, --intermediate, --heads, --vocab missing"),
        (["--layers", "3"], "--hidden, --intermediate, --heads, --vocab missing"),
        (["nowhere.json"], "nowhere.json: the model's configuration cannot be read: No such file"),
        (["nowhere.json", "--layers", "3"], "not both"),
        ([*PLAIN_8B, "--config", '{"zero_optimisation": {}}'], "zero_optimization"),
    ],
)
def test_what_cannot_be_answered_is_one_sentence(arguments, words, capsys):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert words in captured.err


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "bert"}'])
def test_a_file_that_is_no_known_model_is_refused(text, tmp_path, capsys):
    (tmp_path / "config.json").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("infinity-estimate: ")


def test_the_module_is_the_command():
    reply = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "estimators", *PLAIN_8B],
        capture_output=True, text=True, check=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    assert "8,030.3 M parameters" in reply.stdout
    assert "| torch" not in reply.stderr
