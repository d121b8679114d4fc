"""transformers' Trainer, unchanged, on the engine: the cut of tests.clients.trainer_matrix that the suite keeps."""

from __future__ import annotations

import json

import pytest

from tests.clients.run import run_client
from tests.clients.trainer_matrix import ALL, DIGITS, SAVES, difference

FOUR = {"gradient_accumulation_steps": 4}


@pytest.mark.timeout(400)
def test_trainer_equals_ddp_saves_and_resumes(tmp_path):
    folder = str(tmp_path / "saved")
    cells = [
        {"arguments": SAVES, "acts": ALL},
        {"stage": 3, "offload": "nvme", "arguments": SAVES, "acts": ALL, "folder": folder},
        {"stage": 3, "offload": "nvme", "arguments": SAVES, "acts": ALL, "folder": folder, "resume": "checkpoint-3"},
        {"arguments": FOUR, "rows": 22},
        {"stage": 2, "offload": "cpu", "in_file": True, "arguments": FOUR, "rows": 22},
        {"acts": ["train", "engine", "train", "evaluate"]},
        {"stage": 1, "acts": ["train", "engine", "train", "evaluate"]},
        {"arguments": {"optim": "rmsprop"}},
        {"stage": 2, "offload": "cpu", "arguments": {"optim": "rmsprop"}},
        {"stage": 2, "offload": "cpu", "arguments": {"optim": "adafactor"}},
    ]  # fmt: skip
    found = run_client("tests.clients.trainer_cells", 2, json.dumps(cells))
    refused = found.pop()
    assert [row.get("error") for row in found] == [None] * len(found)
    plain, trained, resumed, plain_four, four, plain_again, again, plain_rmsprop, rmsprop = found
    # accelerate would have DeepSpeed's Adam step where states are offloaded.
    assert difference(plain_rmsprop, rmsprop, resumed=False) < DIGITS
    assert "ConfigError: optimizer Adafactor is not elementwise" in refused["error"]
    assert difference(plain, trained, resumed=False) < DIGITS
    assert difference(trained, resumed, resumed=True) == 0.0
    assert difference(plain_four, four, resumed=False) < DIGITS
    assert difference(plain_again, again, resumed=False) < DIGITS
    # Two ranks saved it, one goes on with the same batches.
    fewer = {**cells[2], "arguments": {**SAVES, "per_device_train_batch_size": 4}}
    (on_one,) = run_client("tests.clients.trainer_cells", 1, json.dumps([fewer]))
    assert difference(trained, on_one, resumed=True) < DIGITS


def test_a_trainer_that_trains_again_is_told_to_make_another_one():
    """accelerate has forgotten the engine by then, with DeepSpeed too; the weights are in the model."""
    (reply,) = run_client("tests.clients.trainer_cells", 1, json.dumps([{"stage": 2, "acts": ["train", "train"]}]))
    assert "its model has the weights: give the model to initialize() again" in reply["error"]
