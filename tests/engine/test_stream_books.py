"""Copies beside compute on an accelerator: a cut of `python -m tests.stream_books`, and what it must show."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import accelerator_memory, stream_books
from tests.support import accelerator
from tests.support.spawn import RankPool, run_ranks


@pytest.fixture(scope="module", params=[1, 2])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    try:
        accelerator.library()
    except accelerator.Unavailable as error:
        pytest.skip(str(error))
    with RankPool(request.param) as pool:
        yield pool


@pytest.mark.parametrize(("homes", "accumulation"), [("cpu", 1), ("cpu", 2), ("nvme", 1)])
def test_a_pass_takes_little_longer_than_its_busiest_part(ranks: RankPool, homes: str, accumulation: int) -> None:
    for books in ranks.run(stream_books.run, homes, homes, accumulation):
        assert books.share >= 0.90, "copies and compute overlap"
        assert books.stops == 0 if homes == "cpu" else books.stops_a_unit <= 1
        assert books.early_waits == 0, "compute waits for the copy of its own unit, just before it"
        assert books.down_waits == 0, "compute waits for no gradients of the unit before"
        assert books.races == 0


def test_device_memory_stays_at_the_plan() -> None:
    try:
        accelerator.library()
    except accelerator.Unavailable as error:
        pytest.skip(str(error))
    for accumulation in (1, 2):
        (peak,) = run_ranks(accelerator_memory.run, 1, "cpu", accumulation, 12)
        assert peak.share <= 1.05, peak
