"""A loop written with accelerate against the same loop over DDP: losses, norms, weights, saved states.

    python -m tests.clients.accelerate_matrix

Writes benchmarks/results/clients_accelerate.json.
"""

from __future__ import annotations

import datetime
import json
import sys
from importlib import metadata
from typing import Any

from tests.clients.run import ROOT, run_client

RESULT = ROOT / "benchmarks" / "results" / "clients_accelerate.json"
# Losses and norms equal to 4 digits behind the decimal point.
DIGITS = 5e-5
Row = dict[str, Any]
# A name, the plain run, the runs that have to equal it.
Group = tuple[str, Row, list[Row]]


def groups() -> list[Group]:
    """Return all of them."""
    placed: list[Row] = [
        {"stage": 0}, {"stage": 1, "offload": "cpu"}, {"stage": 2}, {"stage": 2, "offload": "nvme"}, {"stage": 3},
        {"stage": 3, "offload": "cpu"}, {"stage": 3, "offload": "nvme"},
    ]  # fmt: skip
    settings: list[tuple[str, Row]] = [
        ("accumulation 1", {}), ("accumulation 4", {"accumulation": 4}),
        ("accumulation 4, 3 in the last step", {"accumulation": 4, "rows": 22}),
        ("save_state, load_state", {"saves": True}), ("the same, accumulation 4", {"saves": True, "accumulation": 4}),
        ("DummyOptim, DummyScheduler", {"dummy": True}),
    ]  # fmt: skip
    return [(name, more, [{**row, **more} for row in placed]) for name, more in settings]


def difference(plain: Row, run: Row) -> float:
    """Return the largest difference of a loss or a norm; infinite where a run failed or a loaded state is not the same
    to the last bit.
    """
    if "error" in run or run["engine"] != "infinity.engine.engine":
        return float("inf")
    if run["again"] and (run["again"] != run["losses"][-len(run["again"]) :] or run["sum_again"] != run["sum"]):
        return float("inf")
    pairs = [pair for name in ("losses", "norms", "again") for pair in zip(plain[name], run[name], strict=True)]
    return max(abs(first - second) for first, second in pairs)


def measure(ranks: int, listed: list[Group]) -> list[Row]:
    """Run groups with `ranks` ranks."""
    cells = json.dumps(cells_of(listed))
    return judged(ranks, listed, run_client("tests.clients.accelerate_cells", ranks, cells, timeout=3000))


def cells_of(listed: list[Group]) -> list[Row]:
    return [cell for _, plain, runs in listed for cell in (plain, *runs)]


def judged(ranks: int, listed: list[Group], replies: list[Row]) -> list[Row]:
    """Return each group's largest difference, and its runs that are not right."""
    found, rows = iter(replies), []
    for name, _, runs in listed:
        plain = next(found)
        apart = [(run, reply, difference(plain, reply)) for run, reply in ((run, next(found)) for run in runs)]
        bad = [each for each in apart if not each[2] <= DIGITS]
        wrong = [{"run": run, "error": reply.get("error", f"differs by {each}")} for run, reply, each in bad]
        rows.append({"ranks": ranks, "name": name, "runs": len(runs), "right": len(runs) - len(wrong),
                     "largest_difference": max(each for _, _, each in apart), "wrong": wrong})  # fmt: skip
    return rows


def main() -> int:
    """Return 1 if a run is not right."""
    rows = [row for ranks in (1, 2) for row in measure(ranks, groups())]
    for row in rows:
        print(f"{row['ranks']} rank(s), {row['name']}: {row['right']} of {row['runs']}, at most "
              f"{row['largest_difference']:.1e}", *row["wrong"], sep="\n  ", flush=True)  # fmt: skip
    RESULT.write_text(json.dumps({
        "command": "python -m tests.clients.accelerate_matrix", "date": datetime.date.today().isoformat(),
        "versions": {name: metadata.version(name) for name in ("torch", "accelerate")}, "limit": DIGITS, "rows": rows,
    }, indent=1) + "\n")  # fmt: skip
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
