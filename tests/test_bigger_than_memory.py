"""Models twice the memory limit train, are built and are loaded, and are what they are without a limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory_cases import run_case
from tests.support.memory_limit import run_limited

ROOT = Path(__file__).parent.parent
LIMIT_NBYTES = 2 << 30


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.drive(12)
@pytest.mark.timeout(900)
def test_four_gigabytes_of_state_train_under_two_of_memory(tmp_path: Path) -> None:
    """The middle case of tests.memory_cases with default keys: what is gathered at once is fitted to the limit,
    clipping and all, and neither that nor the placement shows in the result.
    """
    drive = tmp_path / "drive"
    limited = run_case("middle", LIMIT_NBYTES / 2**30, str(drive), 2, "digest", "fp32")
    assert limited["rc"] == 0, f"under the {limited['how']}: {limited['stderr']}"
    assert limited["numel"] >= 350_000_000
    assert limited["nvme"] >= 12 * limited["numel"] > 2 * LIMIT_NBYTES
    assert [path.name for path in drive.iterdir()] == ["checkpoints"]
    assert limited["peak"] <= limited["predicted"] <= LIMIT_NBYTES
    if limited["how"] == "control group":
        assert limited["peak"] >= 0.9 * limited["predicted"]
    print(f"peak {limited['peak'] / 1e9:.2f} GB of {LIMIT_NBYTES / 1e9:.2f} GB, state {limited['nvme'] / 1e9:.2f} GB")
    free = run_case("middle", None, str(tmp_path), 2, "digest", "fp32", "memory")
    assert free["rc"] == 0, free["stderr"]
    assert (free["losses"], free["sha256"]) == (limited["losses"], limited["sha256"])


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.drive(8)
@pytest.mark.timeout(600)
def test_parameters_of_twice_the_memory_are_built_and_loaded_within_it(tmp_path: Path) -> None:
    limit = 860 << 20
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    folder, drive = str(tmp_path / "model"), str(tmp_path / "drive")

    def command(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "tests.support.load_large", *arguments]

    subprocess.run(command("make", folder), env=env, check=True, timeout=300)
    for how in ("init", "load"):
        limited = run_limited(command(how, folder, drive), limit_nbytes=limit, timeout=300, env=env)
        assert limited.returncode == 0, f"{how} under the {limited.how}: {limited.stderr[-4000:]}"
        result = json.loads(limited.stdout.splitlines()[-1])
        assert result["nbytes"] >= 2 * limit
        assert result["planned"]["nvme"] >= result["nbytes"]
        peak = "unknown" if limited.peak is None else f"{limited.peak / 1e6:.0f} MB"
        print(f"{how}: {result['nbytes'] / 1e6:.0f} MB of parameters, peak {peak} of {limit / 1e6:.0f} MB")
    hashes = {1: result["sha256"]}
    for ranks in (2, 4):
        program = command("load", folder, drive, str(ranks))
        run = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr[-4000:]
        result = json.loads(run.stdout.splitlines()[-1])
        hashes[ranks] = result["sha256"]
        # Above what the process took before: what the plan has in memory, a slice of the largest tensor, and 256 MB.
        allowed = result["planned"]["cpu"] + result["planned"]["gpu"] + 4 * 8000 * 1024 // ranks + (256 << 20)
        print(f"{ranks} ranks: the highest took {result['peak'] / 1e6:.0f} MB, allowed are {allowed / 1e6:.0f} MB")
        assert result["peak"] <= allowed
    assert len(set(hashes.values())) == 1
    assert not list(Path(drive).iterdir())
