"""Ranks of a pipeline that part, fail, end or stop: every rank raises in time, and the error names who waits for which
message.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.pipeline_divergence import SHORT, part

ROOT = Path(__file__).parents[2]
# Of what no watchdog has to find; generous, because the ranks share two cores with other tests.
SECONDS_MAX = 20.0
LATE_SECONDS = 5.0
CASES = (
    "raises in F", "raises in B", "sleeps", "comes late", "closes", "another schedule", "fewer micro-batches",
    "skips one",
)  # fmt: skip
ODD = 2
PIPELINES = (4, 2)
# By pipeline ranks: how the odd rank is named.
PLACES = {4: "2", 2: "2 (pp 1, dp 0)"}

Told = tuple[str, str, float]


def diverge(rank: int, world: int) -> dict[str, Told]:
    return {f"{case}, pp {pp}": part(case, pp, ODD) for pp in PIPELINES for case in CASES}


@pytest.fixture(scope="module")
def told(rank_pools: Any) -> list[dict[str, Told]]:
    found: list[dict[str, Told]] = rank_pools[4].run(diverge, timeout=220)
    return found


@pytest.mark.parametrize("pp", PIPELINES)
@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_in_time(told: list[dict[str, Told]], case: str, pp: int) -> None:
    own = {"raises in F": "ArithmeticError", "raises in B": "ArithmeticError", "closes": "StopIteration"}
    for rank, found in enumerate(told):
        kind, text, seconds = found[f"{case}, pp {pp}"]
        print(case, pp, rank, round(seconds, 1), kind, text)
        expected = own.get(case, "DesyncError") if rank == ODD else "DesyncError"
        assert kind == ("none" if case == "comes late" else expected), (rank, text)
        assert seconds < (SHORT + LATE_SECONDS if case == "sleeps" else SECONDS_MAX), (rank, text)
