"""A weight in tiles trains as the whole one does, whoever uses it, and no more of it than the budget is gathered."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.cases import CASES, LEAF
from tests.engine.test_oracle_parity import check

# Smaller than every matrix of the cases, so that all of them are in tiles.
SMALL = 96
PLACES = [("cpu", "cpu"), ("nvme", "nvme"), ("gpu", "gpu"), ("cpu", "nvme")]


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_models_of_every_habit_train_in_tiles(rank_pools: Any, tmp_path: Any, world: int) -> None:
    cells = []
    for index, name in enumerate(CASES):
        if name == "a layer on one rank only":
            continue
        param, optimizer = PLACES[index % len(PLACES)]
        zero = {**LEAF, "tile_parameters": SMALL}
        options = {"accumulation": 2, "param": param, "optimizer": optimizer, "zero": zero}
        cells.append((f"{name} {options}", name, options))
    check(rank_pools, tmp_path, world, cells, steps=4)
