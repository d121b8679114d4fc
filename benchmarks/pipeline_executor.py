"""Claim: the pipeline's executor takes at most 20 us of host time an action beside its messages.

    python benchmarks/pipeline_executor.py [--micro-batches 32] [--rounds 30] [--json FILE]

Two ranks of gloo run steps of stages that compute next to nothing, under 1f1b and interleaved with two chunks a rank,
where each action receives and sends: by our executor, by torch's runtime (torch.distributed.pipelining), and in a plain
loop on tensors that lie ready. They take turns in the same processes. Host time is that of steps whose messages are
over at once, less the loop's. torch's calls for one message are timed alone.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from support.launch import run_ranks
from support.machine import describe
from support.table import Table, claim

COMMAND = "python benchmarks/pipeline_executor.py"
LIMIT_US = 20.0
CALLS = ("isend", "irecv", "wait")
SCHEDULES = {"1f1b": "1f1b", "interleaved": "interleaved, 2 chunks"}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--micro-batches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", help="ignored: nothing is written to a drive")
    parser.add_argument("--json", type=Path, help="write the result into this file")
    options = parser.parse_args()
    print(describe())
    print(f"{options.micro_batches} micro-batches on 2 ranks, {options.rounds} rounds, us an action of the slower rank")
    task = {"micro_batches": options.micro_batches, "rounds": options.rounds}
    ranks = run_ranks("pipeline_executor", task, world_size=2)
    table = Table("CPU:.1f", "CPU beyond:.1f", "wall:.1f", "CPU, messages:.1f", "wall, messages:.1f", name_width=28)
    rows = []
    for schedule, title in SCHEDULES.items():
        table.row(f"{title}: loop", *(_slower(ranks, schedule, "loop", at) for at in (1, None, 0, None, None)))
        for name in ("ours", "torch"):
            free = f"{name} free"
            beyond = [1e6 * (rank[schedule][free][1] - rank[schedule]["loop"][1]) for rank in ranks]
            table.row(
                f"{title}: {name}", _slower(ranks, schedule, free, 1), max(beyond), _slower(ranks, schedule, free, 0),
                _slower(ranks, schedule, name, 1), _slower(ranks, schedule, name, 0),
            )  # fmt: skip
            rows.append((f"{title}: {'infinity' if name == 'ours' else 'torch'}", beyond, name == "ours"))
    calls = {name: [1e6 * rank[name][1] for rank in ranks] for name in CALLS}
    print("a message alone, CPU time: " + ", ".join(f"{name} {max(each):.0f} us" for name, each in calls.items()))
    worst = max(max(beyond) for _, beyond, ours in rows if ours)
    claim(f"at most {LIMIT_US:.0f} us of the thread's CPU time an action", worst <= LIMIT_US)
    if options.json:
        options.json.write_text(json.dumps(_topic(options, rows, calls), indent=1) + "\n")


def _slower(ranks: list[dict[str, Any]], schedule: str, name: str, at: int | None) -> float | None:
    return None if at is None else 1e6 * max(rank[schedule][name][at] for rank in ranks)


def _topic(
    options: argparse.Namespace, rows: list[tuple[str, list[float], bool]], calls: dict[str, list[float]]
) -> dict[str, Any]:
    def row(what: str, figures: list[float], limit: str = "") -> dict[str, Any]:
        return {"what": what, "figures": [round(figure, 1) for figure in figures], "limit": limit, "unit": "us"}

    return {
        "topic": "Pipeline executor",
        "claim": f"The pipeline's executor takes at most {LIMIT_US:.0f} us of host time an action beside its messages.",
        "command": COMMAND,
        "machine": f"{describe().partition(', ')[2]}, torch {torch.__version__}",
        "date": time.strftime("%Y-%m-%d"),
        "commit": None,
        "how": (
            f"{options.micro_batches} micro-batches through stages that compute next to nothing, 2 ranks of gloo, "
            f"{options.rounds} rounds; the least CPU time of the training thread in a step whose messages are over at "
            "once, less that of a plain loop over the same actions, by action; each rank's. torch is "
            "torch.distributed.pipelining on the same stages in the same run; the last rows are torch's calls for one "
            "message alone."
        ),
        "rows": [
            *(row(what, figures, f"<= {LIMIT_US:.0f}" if ours else "") for what, figures, ours in rows),
            *(row(f"{name} alone", figures) for name, figures in calls.items()),
        ],
    }


if __name__ == "__main__":
    main()
