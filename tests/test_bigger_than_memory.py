"""A model whose state is twice the memory limit trains, and gives the weights of a run without a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.memory_limit import run_limited

ROOT = Path(__file__).parent.parent
LIMIT_NBYTES = 4 << 30


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_eight_gigabytes_of_state_train_under_four_of_memory(tmp_path: Path) -> None:
    program = [sys.executable, "-m", "tests.support.train_large"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    limited = run_limited([*program, str(tmp_path / "drive")], limit_nbytes=LIMIT_NBYTES, timeout=800, env=env)
    assert limited.returncode == 0, f"under the {limited.how}: {limited.stderr[-4000:]}"
    result = json.loads(limited.stdout.splitlines()[-1])
    assert result["numel"] >= 700_000_000
    at_rest = sum(result["peak"]["nvme"].values())
    assert at_rest >= 12 * result["numel"] > 2 * LIMIT_NBYTES * 0.99
    assert list((tmp_path / "drive").iterdir()) == []
    if limited.peak is not None:
        assert limited.peak <= LIMIT_NBYTES
        print(f"peak {limited.peak / 1e9:.2f} GB of {LIMIT_NBYTES / 1e9:.2f} GB, state {at_rest / 1e9:.2f} GB")
    # Without a limit, and in memory: neither the limit nor the placement shows in the result.
    free = subprocess.run([*program, "-"], env=env, capture_output=True, text=True, timeout=800, check=False)
    assert free.returncode == 0, free.stderr[-4000:]
    unlimited = json.loads(free.stdout.splitlines()[-1])
    assert unlimited["losses"] == result["losses"]
    assert unlimited["sha256"] == result["sha256"]
