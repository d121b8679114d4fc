"""TRL's trainers, unchanged, give plain TRL's losses; what they save loads without DeepSpeed; generation is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.clients.run import ROOT, run_client

pytestmark = pytest.mark.timeout(600)

EXAMPLES = ROOT / "examples"
# What a reference model may hold of weights, in bytes a parameter in bf16.
REFERENCE_MAX = 1.05 * 2

PLAIN = [
    {"trainer": "sft", "lora": True}, {"trainer": "dpo", "arguments": {"max_steps": 2}}, {"trainer": "grpo"},
]  # fmt: skip
# Everything larger than a few rows is in tiles, the head as well, of which TRL's loss reads all.
IN_TILES = {
    "zero_optimization": {"stage": 3, "tile_parameters": 1000, "stage3_gather_16bit_weights_on_model_save": True}
}
OFFLOADED = [
    {"trainer": "sft", "lora": True, "stage": 3, "offload": "nvme"},
    {"trainer": "dpo", "stage": 3, "by_path": True, "arguments": {"max_steps": 2}, "keys": IN_TILES},
    {"trainer": "grpo", "stage": 3, "offload": "cpu"},
]


def run(module: str, cells: list[dict[str, Any]], *, ranks: int) -> list[dict[str, Any]]:
    """Run cells in one process a rank, and return what each one saw."""
    found = run_client(f"tests.clients.{module}", ranks, json.dumps(cells), timeout=550)
    assert [each["error"] for each in found if "error" in each] == []
    assert len(found) == len(cells)
    return found


def assert_alike(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The run with infinity has seen what the plain one has."""
    assert found["engine"] == "infinity.engine.engine" and plain["engine"].startswith("torch.")
    for column in ("losses", "norms", "rewards"):
        assert found[column] == pytest.approx(plain[column], rel=1e-4, abs=1e-7)
    assert len(found["losses"]) >= 2
    assert found["weights"] == pytest.approx(plain["weights"], rel=1e-4, abs=1e-5)
    # The tokens that TRL's block generates are those of the model that was saved and loaded again.
    assert found["greedy"] == found["loaded_greedy"] == plain["greedy"]
    assert found["saved_differs"] < 1e-5
    if "offloaded" in found:
        before, meanwhile = found["offloaded"]
        assert meanwhile <= 0.05 * before, found["offloaded"]
    if "merged_differs" in plain:
        assert found["merged_differs"] < 1e-5
        assert found["merged_in_place"] == pytest.approx(plain["merged_in_place"], rel=1e-4)


@pytest.mark.matrix
def test_trainers_on_every_tier_give_plain_trls_losses_and_files():
    found = run("trl_cells", PLAIN + OFFLOADED, ranks=1)
    for mine, plain in zip(found[len(PLAIN) :], found, strict=False):
        assert_alike(mine, plain)


@pytest.mark.matrix
@pytest.mark.slow
def test_two_ranks_give_what_ddp_gives():
    found = run("trl_cells", PLAIN + OFFLOADED, ranks=2)
    for mine, plain in zip(found[len(PLAIN) :], found, strict=False):
        assert_alike(mine, plain)


@pytest.mark.matrix
@pytest.mark.slow
def test_the_reference_model_of_dpo_holds_weights_only():
    cell = {"trainer": "dpo", "stage": 3, "width": 256, "arguments": {"bf16": True, "max_steps": 2}}
    # Released after each forward. TRL's loss reads the head as a whole, so nothing is cut into tiles.
    at_once = {
        "stage": 3, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "tile_parameters": 0,
        "offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"},
        "stage3_gather_16bit_weights_on_model_save": True,
    }  # fmt: skip
    for given in (cell, {**cell, "keys": {"zero_optimization": at_once}}):
        (found,) = run("trl_cells", [given], ranks=1)
        held = found["reference"]
        total = sum(sum(kinds.values()) for kinds in held["now"].values())
        assert total <= REFERENCE_MAX * held["parameters"], held


def example(name: str, folder: Path, *words: str) -> Path:
    """Run an example on its tiny model, and return the folder of its results."""
    command = [sys.executable, "-m", "infinity", "run", "--as-deepspeed", "--no_local_rank", "--nproc", "1"]
    command += ["-m", "tests.support.clients_without_cuda", str(EXAMPLES / name), "--local_rank=0", "--tiny"]
    reply = subprocess.run(
        [*command, "--steps", "10", "--drive", "drive", *words, "--out", "run"], cwd=folder, capture_output=True,
        text=True, timeout=500, check=False, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr[-4000:]
    # Weights and states were on the drive.
    assert (folder / "drive").is_dir()
    return folder / "run"


@pytest.mark.matrix
def test_the_sft_example_trains_and_saves_a_model(tmp_path):
    made = example("trl_sft.py", tmp_path)
    before, after = (AutoModelForCausalLM.from_pretrained(made / name) for name in ("tiny", "model"))
    changed = [name for name, value in after.state_dict().items() if not value.equal(before.state_dict()[name])]
    assert "lm_head.weight" in changed
    assert all(bool(torch.isfinite(value).all()) for value in after.state_dict().values())


@pytest.mark.matrix
def test_the_lora_example_saves_adapters_that_peft_loads_and_merges(tmp_path):
    made = example("peft_lora.py", tmp_path)
    base = AutoModelForCausalLM.from_pretrained(made / "tiny")
    before = {name: value.clone() for name, value in base.state_dict().items()}
    merged = PeftModel.from_pretrained(base, made / "adapters").merge_and_unload().state_dict()
    changed = [name for name, value in merged.items() if not value.equal(before[name])]
    assert len(changed) == 14 and all("proj" in name for name in changed)
