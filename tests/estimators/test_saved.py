"""The configuration that a search saves trains as it is."""

from __future__ import annotations

import json
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import infinity
from estimators.cli import main
from tests.estimators.test_cli import FOUR_BLOCKS


@pytest.mark.parametrize(
    "machine",
    [
        ["--no-gpu", "--ram", "16GB"],
        ["--gpu", "1.6GB", "--ram", "3.25GB", "--nvme", "100GB"],
        ["--gpu", "24GB", "--ram", "64GB", "--nvme", "1TB"],
    ],
    ids=["in memory", "on a drive", "on the device"],
)
def test_the_saved_file_is_given_to_initialize_and_trains(machine, tmp_path, capsys):
    file, drive = tmp_path / "found.json", tmp_path / "drive"
    words = ["--sequence", "512", "--nvme-path", str(drive), "--save", str(file)]
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BLOCKS))
    model = str(tmp_path) if "1.6GB" in machine else "qwen2.5-0.5b"
    assert main([model, *machine, *words]) == 0
    assert "Choose optimizer.params.lr yourself" in capsys.readouterr().err
    saved = json.loads(file.read_text())
    assert saved["optimizer"] == {"type": "AdamW", "params": {"lr": 1e-5}}
    paths = [section["nvme_path"] for section in saved["zero_optimization"].values() if "nvme_path" in str(section)]
    assert all(path == str(drive) and os.path.isabs(path) for path in paths)
    assert bool(paths) == (machine[1] == "1.6GB")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            vocab_size=50,
        )
    )  # fmt: skip
    weight = model.model.layers[0].mlp.up_proj.weight
    tokens = torch.randint(50, (1, 12))
    engine, *_ = infinity.initialize(model=model, config=str(file))
    with engine:
        assert engine.get_lr() == [1e-5]
        before = infinity.state(weight).master.clone()
        for _ in range(3):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
            assert engine.was_step_applied()
        moved = (infinity.state(weight).master - before).abs().max().item()
    assert moved == pytest.approx(3e-5, rel=0.1)


@pytest.mark.matrix
def test_a_relative_folder_becomes_an_absolute_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    machine = ["--gpu", "4GB", "--ram", "5GB", "--nvme", "100GB", "--sequence", "512"]
    assert main(["qwen2.5-0.5b", *machine, "--nvme-path", "drive", "--json"]) == 0
    assert str(tmp_path / "drive") in capsys.readouterr().out
    assert main(["gpt2", "--nvme-path", "drive", "--config", "{}"]) == 2
    assert "names its own drive" in capsys.readouterr().err
