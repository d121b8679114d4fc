"""The examples that name no engine: Trainer, accelerate, and DeepSpeed's functions as books use them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples import make_small_model
from tests.clients.run import ROOT

EXAMPLES = ROOT / "examples"
TEXT = "The class of an object is what it was made from. The name of an object is how it is found again. " * 150

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, a text, and the shipped configuration with a drive of its own."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "text.txt").write_text(TEXT)
    make_small_model.main([
        str(folder / "small"), "--data", str(folder / "text.txt"), "--vocabulary", "300", "--hidden", "32", "--layers",
        "2", "--heads", "2",
    ])  # fmt: skip
    config = json.loads((EXAMPLES / "configs" / "trainer_nvme.json").read_text())
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = str(folder / "drive")
    (folder / "ds.json").write_text(json.dumps(config))
    return folder


def run(ranks: int, script: str, folder: Path, *words: str, client: bool = True) -> str:
    """Run an example on a small model and text; return what it prints."""
    options = ["--as-deepspeed", "--nproc", str(ranks)]
    if client:
        options += ["--no_local_rank", "-m", "tests.support.clients_without_cuda"]
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", *options, str(EXAMPLES / script), "--model", str(folder / "small"),
         "--data", str(folder / "text.txt"), *words],
        capture_output=True, text=True, cwd=folder, timeout=250, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr[-4000:]
    return reply.stdout


@pytest.mark.matrix
def test_trainer_trains_goes_on_and_saves(folder):
    words = [
        "--output_dir", str(folder / "trainer"), "--bf16", "--deepspeed", str(folder / "ds.json"), "--max_steps", "6",
        "--save_steps", "3", "--report_to", "none", "--disable_tqdm", "true", "--learning_rate", "1e-2",
        "--logging_steps", "1",
    ]  # fmt: skip
    told = run(2, "hf_trainer.py", folder, *words)
    held_out = re.search(r"held-out loss (\d+\.\d+)", told)
    assert held_out is not None
    assert float(held_out[1]) < 5.0
    # The drive held the model, and the states with it.
    assert any((folder / "drive").iterdir()) or (folder / "drive").is_dir()
    saved = AutoModelForCausalLM.from_pretrained(folder / "trainer")
    assert all(bool(torch.isfinite(param).all()) for param in saved.parameters())
    again = run(2, "hf_trainer.py", folder, *words, "--resume_from_checkpoint", str(folder / "trainer/checkpoint-3"))
    assert re.search(r"held-out loss (\d+\.\d+)", again)[1] == held_out[1]


@pytest.mark.matrix
def test_a_loop_of_accelerate_goes_on_from_its_state(folder):
    words = ["--deepspeed", str(folder / "ds.json"), "--steps", "15", "--state", str(folder / "state"), "--positions",
             "32"]  # fmt: skip
    told = run(1, "accelerate_loop.py", folder, *words)
    losses = dict(re.findall(r"step (\d+): loss (\d+\.\d+)", told))
    assert list(losses) == ["5", "10", "15"]
    assert float(losses["15"]) < float(losses["5"])
    # The batches of a shuffled epoch are not those of the run before, so only the range can be compared.
    again = dict(re.findall(r"step (\d+): loss (\d+\.\d+)", run(1, "accelerate_loop.py", folder, *words, "--resume")))
    assert list(again) == ["15"]
    assert abs(float(again["15"]) - float(losses["15"])) < 0.3


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "words"), [(1, ["--zero_stage", "2"]), (2, ["--offload"])], ids=["one", "two"])
def test_the_practice_of_books_learns(ranks, words, folder, tmp_path):
    """With no replacement at all: DeepSpeed's own functions ask for no CUDA."""
    told = run(
        ranks, "deepspeed_llama.py", folder, *words, "--max_steps", "8", "--learning_rate", "1e-2", "--output_dir",
        str(tmp_path / "out"), "--positions", "32", "--gradient_checkpointing", client=False,
    )  # fmt: skip
    found = re.search(r"perplexity (\d+\.\d) -> (\d+\.\d); rate (\S+)", told)
    assert found is not None, told
    assert float(found[2]) < 0.6 * float(found[1])
    # The cosine has come to its end: the optimizer that the engine steps is the one that the schedule writes to.
    assert float(found[3]) == 0.0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
