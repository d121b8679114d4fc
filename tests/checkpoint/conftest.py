"""Two ranks that live for all tests of this folder (starting them takes longer than most of those)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.spawn import RankPool


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[RankPool]:
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory, rank_pools: Any) -> Path:
    """Checkpoints of one rank: FOLDER/bf16-1/global_step2, FOLDER/fp32-1/global_step2 and FOLDER/hub/global_step1."""
    from tests.checkpoint.hostile import save

    folder = tmp_path_factory.mktemp("bases")
    rank_pools[1].run(save, str(folder))
    return folder
