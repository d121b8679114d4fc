"""Saved at world {1, 2, 4} x stage x tier, loaded at every other: pair by pair.

    python -m tests.checkpoint.elastic_matrix [PRECISION]

Prints a line for each pair that differs, and ends with 1 when there is one: masters, moments and parameters as full
tensors must be the same bits, the next losses within 1e-6.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from typing import Any

from tests.checkpoint.cells import name_of
from tests.checkpoint.elastic import check_pairs, load_cells, save_cells
from tests.support.spawn import RankPool

PLACES = [
    (0, "gpu", "gpu"), (1, "gpu", "cpu"), (2, "gpu", "nvme"), (3, "gpu", "gpu"), (3, "cpu", "cpu"), (3, "nvme", "nvme"),
]  # fmt: skip
WORLDS = (1, 2, 4)


def cells_of(dtype: str) -> list[dict[str, Any]]:
    """Every world with every place."""
    return [
        {"world": world, "stage": stage, "param": param, "optimizer": optimizer, "dtype": dtype}
        for world, (stage, param, optimizer) in itertools.product(WORLDS, PLACES)
    ]


def main(dtype: str) -> int:
    """Run all; returns the exit status."""
    cells = cells_of(dtype)
    saved: dict[str, Any] = {}
    wrong: list[str] = []
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        for world in WORLDS:
            own = [cell for cell in cells if cell["world"] == world]
            with RankPool(world) as pool:
                rows = pool.run(save_cells, folder, own, timeout=1200)
            saved |= {name_of(cell): row for cell, row in zip(own, rows[0], strict=True)}
            assert all(row == rows[0] for row in rows), "ranks have different losses on the same data"
        for world in WORLDS:
            own = [cell for cell in cells if cell["world"] == world]
            pairs = [(source, target) for source in cells for target in own if source != target]
            with RankPool(world) as pool:
                rows = pool.run(load_cells, folder, pairs, timeout=3000)
            for row in rows:
                wrong += check_pairs(pairs, saved, row)
            count += len(pairs)
            print(f"loaded by {world} ranks: {len(pairs)} pairs", flush=True)
    print(*wrong[:40], sep="\n")
    print(f"{dtype}: {count} pairs of {len(cells)} cells, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "bf16"))
