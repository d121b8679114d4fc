"""The plan is the truth: resident memory of each phase and bytes on NVMe, in real processes of two ranks.

The whole matrices are `benchmarks/memory_truth.py` and `benchmarks/first_batch.py`; here are cases of them, which mix
tiers, stages, models and precisions.
"""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from benchmarks.support import first_batch
from tests.support.spawn import run_ranks

ROOT = Path(__file__).resolve().parents[2]


def output_of(script: str, *arguments: str) -> str:
    command = [sys.executable, f"benchmarks/{script}.py", *arguments]
    reply = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=220, check=False)
    assert reply.returncode == 0, reply.stderr
    return reply.stdout


# Two processes each that import torch and train 50 million parameters for some steps.
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpt2, nvme", "llama, states"])
def test_each_phase_takes_what_the_plan_says(case, tmp_path):
    model, configuration = case.split(", ")
    arguments = ("--models", model, "--configurations", configuration, "--steps", "3", "--folder", str(tmp_path))
    text = output_of("memory_truth", *arguments)
    assert re.search(rf"^{case} ", text, re.MULTILINE), text
    assert text.count("holds") == 3, text
    assert not list(tmp_path.iterdir())


# Processes that import torch and transformers.
@pytest.mark.matrix
@pytest.mark.slow
def test_activations_are_estimated_within_a_tenth_of_what_is_allocated(tmp_path):
    text = output_of("activations", "--small")
    assert len(re.findall(r"^(?:llama|gpt2), ", text, re.MULTILINE)) == 4, text
    assert text.count("holds") == 2, text


# Processes that import torch and transformers, and train a small model for two steps.
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("case", ["U-Net, 2 rank, fp32, nvme", "T5, 1 rank, fp32, nvme, recomputed"])
def test_what_the_first_batch_tells_is_what_the_process_takes(case, tmp_path):
    model, ranks, dtype, tier, *recomputed = case.split(", ")
    text = output_of(
        "first_batch", "--models", model, "--ranks", ranks[0], "--dtypes", dtype, "--tiers", tier,
        "--recompute", str(len(recomputed)), "--folder", str(tmp_path),
    )  # fmt: skip
    assert re.search(rf"^{case} ", text, re.MULTILINE) and "1 of 1 between 0.9 and 1.1: all: holds" in text, text


def anonymous() -> int:
    """Bytes of this process's anonymous memory."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10


def watched(rank: int, world: int, folder: str) -> tuple[int, int, int]:
    """(the most anonymous memory, that before, what the engine says) of two steps of the benchmark's U-Net."""
    before, over = anonymous(), threading.Event()
    peaks = [before]

    def watch() -> None:
        while not over.wait(0.01):
            peaks.append(anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    options = {"model": "U-Net", "bf16": False, "recompute": False, "tier": "nvme", "folder": folder, "steps": 2}
    said = first_batch.run(options)
    over.set()
    thread.join()
    return max(peaks), before, said["predicted"]


@pytest.mark.slow
def test_what_the_first_batch_tells_is_what_a_rank_takes(tmp_path):
    """In one process that has imported what it needs: of all memory, and nearly so of what it takes by training."""
    ((peak, before, predicted),) = run_ranks(watched, 1, str(tmp_path), timeout=200)
    assert 0.9 <= predicted / peak <= 1.1
    assert 0.85 <= (predicted - before) / (peak - before) <= 1.15
