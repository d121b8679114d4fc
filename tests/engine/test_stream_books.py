"""Copies beside compute on an accelerator: a cut of `python -m tests.stream_books`, and what it must show."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from infinity.memory.store import TieredStore
from tests import accelerator_memory, stream_books
from tests.support.accelerator.process import AcceleratedProcess, require
from tests.support.cells import kept
from tests.support.simulated_device import SimulatedDevice
from tests.support.spawn import RankPool, run_ranks


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    require()
    with RankPool(request.param) as pool:
        yield pool


@pytest.mark.parametrize(
    ("homes", "accumulation"), kept([("cpu", 1), ("cpu", 2), ("nvme", 1)], [("cpu", 2), ("nvme", 1)])
)
def test_a_pass_takes_little_longer_than_its_busiest_part(ranks: RankPool, homes: str, accumulation: int) -> None:
    for books in ranks.run(stream_books.run, homes, homes, accumulation):
        assert books.share >= 0.90, "copies and compute overlap"
        assert books.stops == 0 if homes == "cpu" else books.stops_a_unit <= 1
        assert books.early_waits == 0, "compute waits for the copy of its own unit, just before it"
        assert books.down_waits == 0, "compute waits for no gradients of the unit before"
        assert books.races == 0


def _room_is_taken(rank: int, world: int) -> int:
    with patch.object(TieredStore, "prefetch", lambda *keys, **by: True):
        return stream_books.run(rank, world, "nvme", "nvme", 1).races


def test_a_gather_whose_room_another_party_has_taken_returns_what_it_copies_from(ranks: RankPool) -> None:
    """A step in the background may take the room between a prefetch that found it and the gather."""
    assert not any(ranks.run(_room_is_taken))


def test_the_next_forward_runs_beside_a_step_on_the_cpu(ranks: RankPool) -> None:
    """Where each unit follows its step. With several ranks a gather needs all of them, so `step()` waits for it."""
    for books in ranks.run(stream_books.run_step, 2):
        assert books.races == 0
        if books.ranks == 1:
            assert books.share >= 0.95 and books.returned < 0.1 * books.makespan
        else:
            assert books.share >= 0.75 and books.returned < 1.02 * books.seconds["step"]


def test_device_memory_stays_at_the_plan() -> None:
    require()
    for accumulation in (1, 2):
        (peak,) = run_ranks(accelerator_memory.run, 1, "cpu", accumulation, 12)
        assert peak.share <= 1.05, peak


def _threads_on_one_stream() -> list[bool]:
    """Two threads copy up, one inside the other; whether each is on its own stream again."""
    device = SimulatedDevice(torch.device("simulated", 0))
    arrived = device.copy(device.empty(1, torch.float32), torch.zeros(1))
    own = [torch.Stream(device.torch) for _ in range(2)]
    inside, both, left = threading.Event(), threading.Event(), threading.Event()
    found: list[bool] = []

    def first() -> None:
        with device.on_stream(own[0]):
            with device.following(arrived):
                inside.set()
                both.wait()
            found.append(device.program_stream() == own[0])
        left.set()

    def second() -> None:
        inside.wait()
        with device.on_stream(own[1]):
            with device.following(arrived):
                both.set()
                left.wait()
            found.append(device.program_stream() == own[1])

    threads = [threading.Thread(target=each) for each in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_threads_that_copy_stay_on_their_own_streams(process: AcceleratedProcess) -> None:
    """The step's thread brings values to where it steps while the program gathers."""
    assert process.run(_threads_on_one_stream) == [True, True]
