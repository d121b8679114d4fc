"""Every cell of stage x tier of parameters x tier of optimizer x precision: saved in one process, taken up in another.

    python -m tests.checkpoint.resume_matrix [WORLD]

Prints a line a cell, and ends with 1 when the next losses, the final states or the random numbers of any differ in a
bit from those of the run that was not cut.
"""

from __future__ import annotations

import itertools
import sys
import tempfile

from tests.checkpoint.cells import TIERS, check_resumed, load_cells, save_cells
from tests.support.spawn import run_ranks


def main(world: int) -> int:
    """Run all; returns the exit status."""
    rows = itertools.product((0, 1, 2, 3), TIERS, TIERS, ("fp32", "bf16", "fp16"))
    cells = [dict(zip(("stage", "param", "optimizer", "dtype"), row, strict=True)) for row in rows]
    # Below stage 3 parameters stay on the device: the configuration has no key to say anything else.
    cells = [cell for cell in cells if cell["stage"] == 3 or cell["param"] == "gpu"]
    with tempfile.TemporaryDirectory() as folder:
        saved = run_ranks(save_cells, world, folder, cells, timeout=1200)
        refused = {at: row for at, row in enumerate(saved[0]) if isinstance(row, str)}
        kept = [cell for at, cell in enumerate(cells) if at not in refused]
        saved = [[row for row in rows if not isinstance(row, str)] for rows in saved]
        loaded = run_ranks(load_cells, world, folder, kept, timeout=1200)
    for at, why in refused.items():
        print(f"refused  {cells[at]}: {why}")
    wrong = check_resumed(kept, saved, loaded)
    for cell in kept:
        print("differs" if any(line.startswith(str(cell)) for line in wrong) else "equal", "  ", cell)
    print(*wrong, sep="\n")
    print(f"{len(kept)} cells at {world} ranks, {len(refused)} refused by the configuration, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
