"""transformers' Trainer, unchanged, on the engine: a cut of tests.clients.trainer_matrix beside test_clients.py's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.clients.run import run_client
from tests.clients.trainer_matrix import ALL, DIGITS, SAVES, difference

FOUR = {"gradient_accumulation_steps": 4}
AGAIN = ["train", "predict", "train", "engine", "train", "evaluate"]
# Both ranks of a tensor group have the batch that two data ranks have together.
PAIR = {**SAVES, "save_steps": 6, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 8}


NVME = {"stage": 3, "offload": "nvme"}


def run(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each cell gives on two ranks."""
    return run_client("tests.clients.trainer_cells", 2, json.dumps(cells), timeout=500)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_trainer_accumulates_trains_again_and_divides_the_model(tmp_path):
    folder = str(tmp_path / "saved")
    cells = [
        {"arguments": SAVES, "acts": ALL},
        {**NVME, "arguments": SAVES, "acts": ALL, "folder": folder},
        {"arguments": FOUR, "rows": 22},
        {"stage": 2, "offload": "cpu", "in_file": True, "arguments": FOUR, "rows": 22},
        {"acts": AGAIN},
        {"stage": 1, "acts": AGAIN},
        {**NVME, "in_file": True, "acts": ["evaluate", *AGAIN]},
        {"stage": 3, "offload": "cpu", "keys": {"parallel": {"tensor": 2}}, "acts": ALL, "arguments": PAIR},
        {"stage": 1, "keys": {"pipeline": {"stages": 2}}},
    ]  # fmt: skip
    *found, cut = run(cells)
    assert [row.get("error") for row in found] == [None] * len(found)
    plain, trained, plain_four, four, plain_again, again, evaluated, divided = found
    assert difference(plain_four, four, resumed=False) < DIGITS
    # The engine stays: states go on and rates begin anew, as plain Trainer's do. A second Trainer has new states.
    assert difference(plain_again, again, resumed=False) < DIGITS
    assert again["rates"] == plain_again["rates"]
    assert difference(plain_again, {**evaluated, "acts": evaluated["acts"][1:], "evals": evaluated["evals"][1:]},
                      resumed=False) < DIGITS  # fmt: skip
    assert difference(plain, divided, resumed=False) < DIGITS
    assert "pipeline.stages is 2, and a program of accelerate's or Trainer's runs the whole model" in cut["error"]
    # Two ranks saved it, one goes on with the same batches.
    fewer = {**NVME, "acts": ALL, "folder": folder, "resume": "checkpoint-3"}
    fewer["arguments"] = {**SAVES, "per_device_train_batch_size": 4}
    (on_one,) = run_client("tests.clients.trainer_cells", 1, json.dumps([fewer]))
    assert difference(trained, on_one, resumed=True) < DIGITS
