"""Two ranks that live for all tests of this folder (starting them takes longer than most of those), and one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.conftest import one_thread
from tests.support.spawn import RankPool

__all__ = ["one_thread", "two_ranks"]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool
