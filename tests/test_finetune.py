"""The fine-tuning example: whole and by LoRA, on one rank and on two, and what it leaves behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import finetune_hf, make_small_model
from tests.support.cells import kept

ROOT = Path(__file__).resolve().parents[1]
TEXT = "The class of an object is what it was made from. The name of an object is how it is found again. " * 150
SMALL = "--seq 32 --steps 12 --eval-every 6 --tokens 8".split()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, and a text beside it."""
    folder = tmp_path_factory.mktemp("finetune")
    (folder / "text.txt").write_text(TEXT)
    make_small_model.main([
        str(folder / "small"), "--data", str(folder / "text.txt"), "--vocabulary", "300", "--hidden", "32", "--layers",
        "2", "--heads", "2",
    ])  # fmt: skip
    return folder


def options(folder: Path, drive: Path, run: Path) -> list[str]:
    paths = ["--data", str(folder / "text.txt"), "--nvme-path", str(drive), "--run-dir", str(run)]
    return [str(folder / "small"), *SMALL, *paths]


def continued(model: torch.nn.Module, folder: Path) -> str:
    """What a model loaded in the ordinary way makes of the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The class of an object", return_tensors="pt", return_token_type_ids=False)
    made = model.eval().generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id)
    return tokenizer.decode(made[0], skip_special_tokens=True)


@pytest.mark.parametrize(
    ("ranks", "lora"), kept([(1, False), (1, True), (2, False), (2, True)], [(1, True)])
)
def test_it_learns_writes_and_leaves_weights_that_transformers_loads(
    ranks: int, lora: bool, folder: Path, tmp_path: Path
) -> None:
    arguments = [*options(folder, tmp_path / "drive", tmp_path / "run"), *(["--lora"] if lora else [])]
    if ranks == 1:
        finetune_hf.main(arguments)
    else:
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        reply = subprocess.run(
            [*launch, str(ROOT / "examples" / "finetune_hf.py"), *arguments],
            cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False,
        )  # fmt: skip
        assert reply.returncode == 0, reply.stderr
        assert reply.stdout.count("held-out loss") == 1
        assert reply.stdout.count("from this example's default") == 1
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert list(result["held_out"]) == ["0", "6", "12"]
    assert result["held_out"]["12"] < 0.97 * result["held_out"]["0"]
    assert result["text"].startswith("The class of an object")
    held = {kind: sum(tier.get(kind, 0) for tier in result["memory_peak"].values()) for kind in ("param", "exp_avg")}
    assert held["param"] > 0
    assert not any((tmp_path / "drive").rglob("*.bin"))
    left = tmp_path / "run" / "model"
    if lora:
        assert held["exp_avg"] < held["param"]
        base = AutoModelForCausalLM.from_pretrained(folder / "small")
        model = peft.PeftModel.from_pretrained(base, left)
    else:
        model = AutoModelForCausalLM.from_pretrained(left)
    assert continued(model, left) == result["text"]


@pytest.mark.parametrize(
    ("options", "rate", "source"),
    [
        ("", 1e-3, "this example's default"),
        ("--lora", 1e-2, "this example's default"),
        ("--lr 5e-5", 5e-5, "--lr"),
        ("--config warm.json --lr 5e-5", 5e-5, "--lr"),
        ("--config warm.json", 2e-4, "warm.json"),
        ("--config warm.json --lora", 2e-4, "warm.json"),
        ("--config auto.json", 1e-3, "this example's default"),
        ("--config peak.json", 3e-4, "peak.json"),
        ("--config plain.json", 1e-3, "this example's default"),
    ],
)
def test_the_command_lines_rate_comes_before_the_configurations(
    options: str, rate: float, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lr, peak in (("warm", 2e-4, "auto"), ("auto", "auto", "auto"), ("peak", "auto", 3e-4)):
        optimizer = {"type": "AdamW", "params": {"lr": lr}}
        scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": peak}}
        Path(f"{name}.json").write_text(json.dumps({"optimizer": optimizer, "scheduler": scheduler}))
    Path("plain.json").write_text("{}")
    config, told = finetune_hf.load_config(finetune_hf.parse(["small", *options.split()]))
    assert (config["optimizer"]["params"]["lr"], told) == (rate, source)
    if "scheduler" in config and "--config" in options:
        assert config["scheduler"]["params"]["warmup_max_lr"] == rate


@pytest.mark.matrix
def test_a_run_goes_on_where_it_was_left(folder: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    finetune_hf.main(options(folder, tmp_path / "drive", whole))
    finetune_hf.main([*options(folder, tmp_path / "drive", parts), "--steps", "6", "--save-every", "6"])
    finetune_hf.main([*options(folder, tmp_path / "drive", parts), "--resume"])
    one, other = (json.loads((run / "result.json").read_text()) for run in (whole, parts))
    assert [one[name] for name in ("losses", "held_out", "text")] == [
        other[name] for name in ("losses", "held_out", "text")
    ]
