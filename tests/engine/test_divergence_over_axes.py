"""Ranks of a data and a tensor axis that part: every rank raises in time, also one that shares no group with another
that does, and the message names coordinates and collectives.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from infinity.distributed import collectives
from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.groups import ProcessGroups, detect
from infinity.errors import DesyncError
from infinity.plan.types import Topology

# Of a true mismatch, which no watchdog has to find; generous, for the ranks share two cores with other tests.
SECONDS_MAX, WATCHDOG_SECONDS, SHORT_SECONDS = 20.0, 300.0, 2.0
PLACES = ["0 (dp 0, tp 0)", "1 (dp 0, tp 1)", "2 (dp 1, tp 0)", "3 (dp 1, tp 1)"]
# By case: what each rank does, in order. "tensor" sums and "data" gathers along the axis what the rest names.
CASES: dict[str, tuple[list[str], ...]] = {
    "another sum": (["tensor a"], ["tensor b"], ["tensor a", "world"], ["tensor a", "world"]),
    "another gather": (["data a", "world"], ["data a"], ["data a", "world"], ["data b"]),
    # Each waits for another on the other axis; no collective has two names.
    "circle": (["tensor a", "data b"], ["data b", "tensor a"], ["data b", "tensor a"], ["tensor a", "data b"]),
    # Rank 0 waits for none that rank 3 keeps waiting but through rank 2.
    "error": (["data a"], ["data a"], ["tensor a", "data a"], ["raise"]),
    "late": (["data a"], ["tensor a"], ["sleep"], ["tensor a"]),
    # Of no bytes: nobody waits before the step.
    "nothing sent": (["data a", "step"], ["data a", "step"], ["data a", "step"], ["data c", "step"]),
}


def part(rank: int, world: int) -> dict[str, tuple[str, str, float]]:
    """By case: (kind of error, its text, seconds until this rank was through)."""
    torch.set_num_threads(1)
    found = {}
    for case, scripts in CASES.items():
        seconds = SHORT_SECONDS if case == "late" else WATCHDOG_SECONDS
        groups = ProcessGroups(detect(), Topology(dp=2, tp=2, local_size=4), timeout_seconds=seconds)
        began, kind, text = time.monotonic(), "none", ""
        try:
            with groups.telling():
                for each in scripts[rank]:
                    _act(groups, each, 0 if case == "nothing sent" else 4)
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        groups.close()
        found[case] = kind, text, time.monotonic() - began
    return found


def _act(groups: ProcessGroups, what: str, numel: int) -> None:
    kind, _, name = what.partition(" ")
    if kind == "raise":
        raise ArithmeticError("the batch of rank 3 is broken")
    if kind == "sleep":
        time.sleep(10_000)
    elif kind == "world":
        collectives.exchange([1.0], groups.world, "exchange of norms")
    elif kind == "step":
        agree_on_numbers([1.0], groups.world, "exchange of norms")
    elif kind == "tensor":
        collectives.all_reduce(torch.ones(numel), groups.tensor, f"sum of {name}").wait()
    else:
        collectives.all_gather(torch.ones(2 * numel), torch.ones(numel), groups.data, f"gather of {name}").wait()


@pytest.fixture(scope="module")
def told(rank_pools: Any) -> list[dict[str, tuple[str, str, float]]]:
    found: list[dict[str, tuple[str, str, float]]] = rank_pools[4].run(part, timeout=100)
    return found


@pytest.mark.parametrize("case", CASES)
def test_every_rank_raises_in_time(told: list[dict[str, tuple[str, str, float]]], case: str) -> None:
    for rank, found in enumerate(told):
        kind, text, seconds = found[case]
        assert seconds < SECONDS_MAX, (rank, text)
        assert kind == ("ArithmeticError" if (case, rank) == ("error", 3) else DesyncError.__name__), (rank, text)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("another sum", [f"  rank {PLACES[0]}: sum of a, 16 bytes", f"  rank {PLACES[1]}: sum of b"]),
        ("another gather", [f"  rank {PLACES[1]}: gather of a, 32 bytes", f"  rank {PLACES[3]}: gather of b"]),
        ("circle", [f"rank {PLACES[0]} has waited", f"rank {PLACES[3]} has waited", "for sum of a", "for gather of b"]),
        ("error", [f"rank {PLACES[3]} has closed its engine after an error", "the batch of rank 3 is broken"]),
        ("late", [f"for rank {PLACES[2]} (watchdog_seconds is 2)", f"rank {PLACES[2]} is in the program's own code"]),
        ("nothing sent", ["not taken", f"rank {PLACES[1]}: gather of a, 0 bytes", f"rank {PLACES[3]}: gather of c"]),
    ],
)  # fmt: skip
def test_coordinates_and_collectives_are_named(
    told: list[dict[str, tuple[str, str, float]]], case: str, words: list[str]
) -> None:
    for rank, found in enumerate(told):
        text = found[case][1]
        if (case, rank) != ("error", 3):
            assert all(word in text for word in words), (rank, text)
        if case == "another sum":
            assert f"  rank {PLACES[2]}: " not in text, "those of another group have done nothing else"
