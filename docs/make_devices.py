"""Writes the tables of docs/devices.md from benchmarks/results/stream_books.json: python docs/make_devices.py

A test holds that nothing has to be written.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "devices.md"
RESULTS = ROOT / "benchmarks" / "results" / "stream_books.json"
HOMES = {"none": "device", "cpu": "CPU", "nvme": "NVMe"}


def refreshed(text: str) -> str:
    """The page with the tables that the results make."""
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    for head, lines in (PASSES, passes(results["rows"])), (STEPS, steps(results["steps"], results["before"]["steps"])):
        begin, rest = text.split(_table(head, []))
        text = begin + _table(head, lines) + re.sub(r"\A(?:\|.*\n)*", "", rest)
    return text


PASSES = ("parameters on", "states on", "ranks", "accumulation", "busiest part / pass", "host stops a unit")
STEPS = (
    "stage", "ranks", "busiest part / step and forward", "step and forward", "`step()` returns after",
    "before: step and forward", "`step()` returned after",
)  # fmt: skip


def passes(rows: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """The lines of the forward and backward passes."""
    return [
        (
            HOMES[row["param"]], HOMES[row["optimizer"]], str(row["ranks"]), str(row["accumulation"]),
            f"{row['share']:.3f}", f"{row['stops_a_unit']:.2f}".removesuffix(".00"),
        )
        for row in rows
    ]  # fmt: skip


def steps(rows: Sequence[Mapping[str, Any]], before: Sequence[Mapping[str, Any]]) -> list[Sequence[str]]:
    """The lines of steps on the CPU with the next forward."""
    return [
        (
            str(row["stage"]), str(row["ranks"]), f"{row['share']:.2f}",
            *(f"{1e3 * each[name]:.0f} ms" for each in (row, old) for name in ("makespan", "returned")),
        )
        for row, old in zip(rows, before, strict=True)
    ]  # fmt: skip


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = ["| " + " | ".join(row) + " |\n" for row in (head, *lines)]
    return "".join([rows[0], "|" + "---|" * len(head) + "\n", *rows[1:]])


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
