"""Loops written with accelerate, unchanged: a cut of tests.clients.accelerate_matrix beside test_clients.py's."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.clients.accelerate_matrix import measure
from tests.clients.run import ROOT

SHORT = {"accumulation": 4, "rows": 22}


@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_other_loops_equal_ddp():
    rows = measure(2, [
        ("short last step", SHORT, [{**SHORT, "stage": 1}]),
        ("dummy", {"dummy": True}, [{"dummy": True, "stage": 2, "offload": "cpu"}]),
        ("tensor axis", {}, [{"tensor": 2, "stage": 3, "offload": "cpu"}]),
    ])  # fmt: skip
    assert [row["wrong"] for row in rows] == [[], [], []]


@pytest.mark.matrix
def test_processes_that_accelerate_takes_for_single_ones_are_refused(tmp_path):
    """Without an accelerator and without the replacement of its back end, every rank would train a model of its own."""
    script = tmp_path / "script.py"
    script.write_text(
        "from accelerate import Accelerator, DeepSpeedPlugin\n"
        "import torch\n"
        "accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=1))\n"
        "accelerator.state.deepspeed_plugin.deepspeed_config['train_micro_batch_size_per_gpu'] = 1\n"
        "model = torch.nn.Linear(2, 2)\n"
        "accelerator.prepare(model, torch.optim.AdamW(model.parameters()))\n"
    )
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", "--as-deepspeed", "--nproc", "2", str(script)],
        capture_output=True, text=True, timeout=200, check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert reply.returncode == 1
    assert "has started 2 processes (WORLD_SIZE), but accelerate runs each for itself" in reply.stderr, reply.stderr
