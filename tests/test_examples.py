"""The example trains with every shipped configuration."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub import hf_config

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "examples" / "configs"
SMALL = "--dim 32 --layers 2 --heads 2 --seq 32 --steps 3".split()

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the example in a folder of its own; what it wrote into loss.json."""
    monkeypatch.chdir(tmp_path)

    def run_example(*arguments: str) -> dict:
        importlib.import_module("examples.train_lm").main([*SMALL, "--run-dir", "run", *arguments])
        return json.loads((tmp_path / "run" / "loss.json").read_text())

    return run_example


@pytest.mark.parametrize("name", ["demo", "on_device", "cpu_offload", "nvme_offload"])
def test_a_shipped_configuration_trains(name, run, tmp_path):
    record = run("--config", str(CONFIGS / f"{name}.json"), "--nvme-path", str(tmp_path / "drive"))
    assert len(record["losses"]) == 3
    assert all(math.isfinite(loss) for loss in record["losses"])
    assert 5 < record["held_out_before"] < 7
    assert (tmp_path / "run" / "loss_and_memory.png").stat().st_size > 10_000


def test_parameters_and_states_lie_on_the_drive_and_leave_it(run, tmp_path):
    drive = tmp_path / "drive"
    record = run("--nvme-path", str(drive))
    held = sum(record["memory_peak"]["nvme"].values())
    assert held > 0
    assert sum(file["nbytes"] for file in record["nvme_files"]) >= held
    assert all(file["path"].startswith(str(drive)) for file in record["nvme_files"])
    assert not [file for file in drive.rglob("*") if file.is_file() and file.stat().st_size]


def test_several_drives_are_all_in_the_report(run, tmp_path):
    config = json.loads((CONFIGS / "demo.json").read_text())
    drives = [str(tmp_path / "a"), str(tmp_path / "b")]
    for section in ("offload_param", "offload_optimizer"):
        config["zero_optimization"][section]["nvme_path"] = drives
    config["aio"] = {"drive_weights": [1, 1]}
    (tmp_path / "drives.json").write_text(json.dumps(config))
    record = run("--config", "drives.json", "--steps", "1")
    assert {str(Path(file["path"]).parent) for file in record["nvme_files"]} == set(drives)


@pytest.mark.parametrize("example", ["train_lm", "finetune_hf"])
def test_another_drive_is_meant_for_whatever_may_use_one(example, tmp_path):
    devices = {"offload_param": {"device": "auto", "nvme_path": "there"}, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "auto.json").write_text(json.dumps({"zero_optimization": {"stage": 3, **devices}}))
    options = ["--config", str(tmp_path / "auto.json"), "--nvme-path", "here"]
    module = importlib.import_module(f"examples.{example}")
    args = module.parse(["small", *options] if example == "finetune_hf" else options)
    made = module.load_config(args)
    zero = (made[0] if example == "finetune_hf" else made)["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == "here"
    assert "nvme_path" not in zero["offload_optimizer"]


def test_the_model_made_under_init_trains_to_the_same_losses(run, tmp_path):
    ordinary = run("--nvme-path", str(tmp_path / "drive"))
    assert run("--nvme-path", str(tmp_path / "drive"), "--init")["losses"] == ordinary["losses"]


def test_an_unmodified_transformers_model_trains_on_the_users_text(run, tmp_path):
    config = hf_config("llama")
    config.vocab_size = 256
    config.save_pretrained(tmp_path)
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    record = run("--hf", str(tmp_path / "config.json"), "--data", "text.txt", "--nvme-path", str(tmp_path / "drive"))
    assert record["held_out_after"] < record["held_out_before"]


def test_a_vocabulary_below_256_is_refused(run, tmp_path):
    hf_config("llama").save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="vocab_size is 96, but bytes need 256"):
        run("--hf", str(tmp_path / "config.json"))


@pytest.mark.matrix
def test_two_ranks_train_under_torchrun_and_one_speaks(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = [str(ROOT / "examples" / "train_lm.py"), "--config", str(CONFIGS / "two_ranks.json")]
    reply = subprocess.run(
        [*launch, *script, *SMALL, "--run-dir", "run"],
        cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    assert reply.stdout.count("held-out loss") == 1
    assert (tmp_path / "run" / "loss_and_memory.png").exists()


def test_long_sequences_train(tmp_path):
    losses = importlib.import_module("examples.long_sequences").main(
        ["--tokens", "2048", "--window", "256", "--steps", "3", "--nvme-path", str(tmp_path)]
    )
    assert losses[-1] < losses[0]
