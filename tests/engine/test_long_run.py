"""A run of a thousand steps: what the first hundred need is all that the others need."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import infinity
from tests.engine.test_hygiene import resources
from tests.engine.test_progress import Keep
from tests.support.models import tiny_llama, token_batch

STEPS = 1000
# Buffers, threads and the C library's heap find their size first.
WARM = 200


def run(rank: int, world: int, folder: str) -> tuple[list[dict[str, int]], list[int], list[str]]:
    """Resources every hundred steps, files in the folder then, and the log's lines."""
    torch.set_num_threads(1)
    keep, logger = Keep(), logging.getLogger("infinity")
    logger.addHandler(keep)
    home = {"device": "nvme", "nvme_path": folder}
    config = {
        "train_micro_batch_size_per_gpu": 2, "steps_per_print": 100, "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3, "offload_optimizer": home, "offload_param": home, "stage3_param_persistence_threshold": 0,
        },
    }  # fmt: skip
    engine, *_ = infinity.initialize(model=tiny_llama(), config=config)
    held, files = [], []
    with engine:
        for step in range(1, STEPS + 1):
            engine.backward(engine(**token_batch(rank, step)))
            engine.step()
            if step % 100 == 0:
                held.append(resources())
                files.append(len([*Path(folder).iterdir()]))
    logger.removeHandler(keep)
    return held, files, keep.lines


@pytest.mark.matrix
@pytest.mark.slow
def test_a_thousand_steps_need_no_more_than_two_hundred(rank_pools, tmp_path):
    """On NVMe: resident memory grows by at most 1 MB in a hundred steps, everything else not at all."""
    ((held, files, lines),) = rank_pools[1].run(run, str(tmp_path), timeout=100)
    warm = held[WARM // 100 - 1 :]
    slope = (warm[-1]["resident"] - warm[0]["resident"]) / (len(warm) - 1)
    assert slope <= 1e6, [row["resident"] for row in held]
    assert len({row["descriptors"] for row in warm}) == len({row["threads"] for row in warm}) == 1, warm
    assert set(files) == {1}
    assert len(lines) <= 20, lines
