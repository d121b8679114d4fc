"""Ranks of a pipeline that part, fail, end or stop: every rank raises in time, and the error names who waits for which
message.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.pipeline_divergence import SHORT, part

ROOT = Path(__file__).parents[2]
# Of what no watchdog has to find; generous, because the ranks share two cores with other tests.
SECONDS_MAX = 20.0
LATE_SECONDS = 5.0
# By case, the error of the rank that does something else, and words of all others' errors. {odd}: that rank's place.
CASES = {
    "raises in F": ("ArithmeticError", ["rank {odd} ", "3 is broken", "in the forward of micro-batch 3 in stage"]),
    "raises in B": ("ArithmeticError", ["rank {odd} ", "2 is broken", "in the backward of micro-batch 2 in stage"]),
    "sleeps": ("DesyncError", ["rank {odd} is in the program's own code", "waited", "behind stage 0"]),
    "comes late": ("none", []),
    "closes": ("StopIteration", ["rank {odd} has closed its engine; its latest collective was activation"]),
    "another schedule": (
        "DesyncError", ["rank {odd} has waited", "s for activation", "s for the gradient of micro-batch 0 behind stage"]
    ),
    "fewer micro-batches": (
        "DesyncError", ["rank {odd} has waited", "exchange of norms", "s for the gradient of micro-batch 7 behind"]
    ),
    "skips one": ("DesyncError", ["rank {odd}: activation 4 of stage", ": activation 3 of stage", "same schedule"]),
}  # fmt: skip
ODD = 2
# By pipeline ranks, of four: how the odd rank is named.
PLACES = {4: "2", 2: "2 (pp 1, dp 0)"}

Told = tuple[str, str, float]


# Of ranks that lie on two axes, beside the data axis.
PIPELINES = [4, pytest.param(2, marks=pytest.mark.matrix)]


def diverge(rank: int, world: int, pp: int) -> dict[str, Told]:
    return {case: part(case, pp, ODD) for case in CASES}


@pytest.fixture(scope="module")
def told(rank_pools: Any) -> Callable[[int], list[dict[str, Told]]]:
    """What each rank was told in each case, by number of pipeline ranks."""

    @cache
    def run(pp: int) -> list[dict[str, Told]]:
        found: list[dict[str, Told]] = rank_pools[4].run(diverge, pp, timeout=220)
        return found

    return run


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_in_time_and_names_ranks_and_messages(
    told: Callable[[int], list[dict[str, Told]]], case: str, pp: int
) -> None:
    own, words = CASES[case]
    for rank, found in enumerate(told(pp)):
        kind, text, seconds = found[case]
        assert kind == (own if rank == ODD or case == "comes late" else "DesyncError"), (rank, text)
        assert seconds < (SHORT + LATE_SECONDS if case == "sleeps" else SECONDS_MAX), (rank, text)
        if kind == "DesyncError":
            assert all(word.format(odd=PLACES[pp]) in text for word in words), (rank, text)


@pytest.mark.matrix
@pytest.mark.parametrize("pp", PIPELINES)
def test_a_killed_rank_takes_the_others_with_it(pp: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.parallel.pipeline_divergence", "killed", str(pp)]
    ranks = []
    for rank in range(4):
        environment = {
            "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port, "OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT,
        }  # fmt: skip
        own = {**os.environ, **{name: str(value) for name, value in environment.items()}}
        ranks.append(subprocess.Popen(command, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        answers = [process.communicate(timeout=100) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert ranks[ODD].returncode == -signal.SIGKILL, answers[ODD]
    for rank, (out, errors) in enumerate(answers):
        if rank != ODD:
            kind, text, seconds = json.loads(out)
            assert kind == "DesyncError" and seconds < SECONDS_MAX, (rank, text, errors)
            assert f"rank {PLACES[pp]} gives no sign of life" in text, (rank, text)
            assert "behind stage 0" in text or pp == 2, text
