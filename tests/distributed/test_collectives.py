"""Collectives that gloo composes itself: ranks meet before them, however many they are, and however late one comes."""

from __future__ import annotations

import time

import pytest
import torch

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.groups import ProcessGroups, detect


def sums(rank: int, world: int) -> list[list[float]]:
    """Sums and broadcasts one after the other, some of the same name and size, each rank late once; then this rank's
    slice of a sum of slices that differ, of 16 bits, which are rounded once."""
    groups = ProcessGroups(detect(), timeout_seconds=60)
    found = []
    for turn in range(world + 2):
        if turn == rank:
            time.sleep(0.2)
        values = torch.full((3,), float(rank + turn))
        collectives.all_reduce(values, groups.reduction, "sum").wait()
        mine = torch.full((2,), float(rank))
        collectives.broadcast(mine, groups.reduction, turn % world, "broadcast")
        found.append([*values.tolist(), *mine.tolist()])
    slices = torch.tensor([(256.0 if rank == 0 else 1.0) * 2**at for at in range(world)], dtype=torch.bfloat16)
    reduction = collectives.reduce_scatter(slices, group=groups.reduction)
    reduction.wait()
    found.append([value for _, piece in reduction.sums() for value in piece.tolist()])
    groups.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3, pytest.param(4, marks=pytest.mark.matrix)])
def test_sums_and_broadcasts_are_those_of_all_ranks(rank_pools, ranks):
    turns = range(ranks + 2)
    expected = [[sum(rank + turn for rank in range(ranks))] * 3 + [turn % ranks] * 2 for turn in turns]
    total = float(torch.tensor(256.0 + ranks - 1).bfloat16())
    assert rank_pools[ranks].run(sums) == [[*expected, [total * 2**rank]] for rank in range(ranks)]


def test_numbers_lie_where_the_back_end_can_send_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL knows the accelerator alone, gloo the CPU too."""
    sent: list[str] = []

    def gathered(everyone: torch.Tensor, mine: torch.Tensor, *rest: object) -> None:
        sent.extend((everyone.device.type, mine.device.type))
        raise ValueError("seen")

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(collectives, "all_gather", gathered)
    group = AxisGroup("tensor", 0, 2, object())
    for backend in ("nccl", "gloo"):
        monkeypatch.setattr(collectives.dist, "get_backend", lambda _, name=backend: name)
        with pytest.raises(ValueError, match="seen"):
            collectives.exchange([1.0], group)
        with pytest.raises(ValueError, match="seen"):
            collectives.exchange_texts("text", group)
    assert sent == ["meta"] * 4 + ["cpu"] * 4
