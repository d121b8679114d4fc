"""Notes between ranks: heard once they are there, and who waits for one that will not come is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from infinity.distributed import mailbox
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.mailbox import StoreMailbox


def boards(seconds: float = 60.0) -> list[StoreMailbox]:
    """Two ranks' boards over one store."""
    store = dist.HashStore()
    return [StoreMailbox(store, "t", group=AxisGroup("world", rank, 2), timeout_seconds=seconds) for rank in range(2)]


def nothing() -> None:
    """Nothing speaks against waiting."""


def test_notes_of_all_ranks_are_heard_in_their_order():
    first, second = boards()
    first.post("done", "a")
    threading.Timer(0.1, second.post, ("done", "")).start()
    assert first.collect("done", nothing) == ["a", ""]


def test_a_rank_alone_reads_its_own():
    alone = StoreMailbox(None, "t", group=AxisGroup("world"), timeout_seconds=1.0)
    alone.post("done", "x")
    assert alone.collect("done", nothing) == ["x"]


def test_what_speaks_against_waiting_ends_it():
    def gone() -> None:
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        boards()[0].read("done", 1, gone)


def test_signs_of_life_may_be_given_as_often_as_one_likes():
    store = CountingStore()
    busy = StoreMailbox(store, "t", group=AxisGroup("world", 0, 2), timeout_seconds=60.0)
    for _ in range(1000):
        busy.alive()
    assert store.calls == 1


class CountingStore:
    """Counts what is asked of it."""

    calls = 0

    def add(self, key: str, amount: int) -> int:
        self.calls += 1
        return self.calls


def test_a_rank_that_moves_is_waited_for_beyond_the_limit_and_one_that_does_not_is_not(monkeypatch: Any):
    first, second = boards(0.3)
    moves = [threading.Timer(0.15 * turn, second.alive) for turn in range(1, 5)]
    for move in [*moves, threading.Timer(0.75, second.post, ("done", "late"))]:
        move.start()
    assert first.read("done", 1, nothing) == "late"
    with pytest.raises(TimeoutError, match="nothing has moved"):
        first.read("more", 1, nothing)
    monkeypatch.setattr(mailbox, "_SILENT_SECONDS", 0.1)
    with pytest.raises(TimeoutError, match="rank 1 has not come to 'more' and has been silent"):
        first.read("more", 1, nothing)
