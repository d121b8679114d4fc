"""transformers' Trainer, with no line changed, against plain Trainer (DDP with several ranks): every stage and tier.

    python -m tests.clients.trainer_matrix [--only 1]

Writes benchmarks/results/clients_trainer.json: for each run the largest difference of a loss from plain Trainer's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.clients.run import ROOT, run_client

RESULT = ROOT / "benchmarks" / "results" / "clients_trainer.json"
# Losses equal to 4 digits behind the decimal point.
DIGITS = 5e-5
Row = dict[str, Any]

SAVES = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}
BEST = {
    "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2,
    "load_best_model_at_end": True, "metric_for_best_model": "eval_loss",
}  # fmt: skip
ALL = ("train", "evaluate", "save")


def recomputed(reentrant: bool) -> Row:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


def groups(folder: str) -> list[tuple[str, Row, list[Row]]]:
    """Return (name, the plain run, the runs that have to equal it)."""
    placed = [{"stage": stage, "offload": tier} for stage in range(4) for tier in ("none", "cpu", "nvme")]
    few: list[Row] = [
        {"stage": 1, "offload": "none"}, {"stage": 2, "offload": "cpu"}, {"stage": 3, "offload": "none"},
        {"stage": 3, "offload": "nvme"},
    ]  # fmt: skip
    half = {"arguments": {"bf16": True}}

    def each(**more: Any) -> tuple[Row, list[Row]]:
        return more, [{**row, **more} for row in few]

    return [
        ("every stage and tier", {}, [{**row, "in_file": own} for row in placed for own in (False, True)]),
        ("accumulation 4", *each(arguments={"gradient_accumulation_steps": 4})),
        ("accumulation 4, 3 in the epoch's last step", *each(
            arguments={"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1}, rows=22)),
        ("reentrant checkpointing", *each(arguments=recomputed(True))),
        ("checkpointing", *each(arguments=recomputed(False))),
        ("tied weights", *each(tied=True, acts=ALL)),
        ("bf16 against no offload", {"stage": 2, **half}, [{**row, **half} for row in few]),
        ("the best is loaded at the end", *each(arguments=BEST, acts=ALL)),
        ("only the model is saved", {"acts": ("train", "save")}, [
            {**row, "arguments": {"save_strategy": "steps", "save_steps": 3, "save_only_model": True},
             "acts": ("train", "save")} for row in few]),
        ("evaluation without training", {"acts": ("evaluate",)}, [
            {"stage": 3, "offload": tier, "acts": ("evaluate",)} for tier in ("none", "cpu", "nvme")]),
        ("a second Trainer with the same model", *each(acts=("train", "engine", "train", "evaluate"))),
        ("saves", {"arguments": SAVES, "acts": ALL}, [
            {**row, "arguments": SAVES, "acts": ALL, "folder": f"{folder}/{row['stage']}{row['offload']}"}
            for row in few]),
        ("resumed from checkpoint-3", {"arguments": SAVES, "acts": ALL}, [
            {**row, "arguments": SAVES, "acts": ALL, "resume": "checkpoint-3",
             "folder": f"{folder}/{row['stage']}{row['offload']}"} for row in few]),
    ]  # fmt: skip


def difference(plain: Row, run: Row, resumed: bool) -> float:
    """Return the largest difference of a loss; infinite where one is missing."""
    if "error" in run or run["engine"] != "infinity.engine.engine":
        return float("inf")
    steps = [row[-3:] if resumed else row for row in (plain["losses"], run["losses"])]
    evals = [row[-1:] if resumed else row for row in (plain["evals"], run["evals"])]
    pairs = [*zip(*steps, strict=True), *zip(*evals, strict=True), *zip(plain["acts"], run["acts"], strict=True)]
    return max((abs(first - second) for first, second in pairs), default=float("inf"))


def measure(ranks: int, folder: str) -> list[Row]:
    """Run all groups with `ranks` ranks; a group's largest difference, and its runs that are not right."""
    listed = groups(folder)
    if ranks == 2:
        # On one rank later, with the same batches of all ranks together.
        listed.append(("saved for one rank", {"arguments": SAVES}, [
            {"stage": 3, "offload": "nvme", "arguments": SAVES, "folder": f"{folder}/fewer"}]))  # fmt: skip
    cells = [cell for _, plain, runs in listed for cell in (plain, *runs)]
    file = Path(folder) / "cells.json"
    file.write_text(json.dumps(cells))
    found = iter(run_client("tests.clients.trainer_cells", ranks, str(file), timeout=3000))
    rows = []
    for name, _, runs in listed:
        plain = next(found)
        replies = [next(found) for _ in runs]
        apart = [difference(plain, reply, name.startswith("resumed")) for reply in replies]
        wrong = [
            {"run": run, "error": reply.get("error", f"differs by {each}")}
            for run, reply, each in zip(runs, replies, apart, strict=True)
            if not each <= DIGITS
        ]  # fmt: skip
        rows.append({"ranks": ranks, "name": name, "runs": len(runs), "right": len(runs) - len(wrong),
                     "largest_difference": max(apart), "wrong": wrong})  # fmt: skip
        print(f"{ranks} rank(s), {name}: {rows[-1]['right']} of {len(runs)}, at most {max(apart):.1e}", flush=True)
        for each in wrong:
            print(f"  {each['run']}: {each['error']}", flush=True)
        if name == "saved for one rank":
            rows.append(_on_fewer(folder, replies[0]))
    return rows


def _on_fewer(folder: str, saved: Row) -> Row:
    """Resume on one rank what two have saved; it sees the same batches of all ranks together."""
    cell = {"stage": 3, "offload": "nvme", "resume": "checkpoint-3", "folder": f"{folder}/fewer",
            "arguments": {**SAVES, "per_device_train_batch_size": 4}}  # fmt: skip
    reply = run_client("tests.clients.trainer_cells", 1, json.dumps([cell]))[0]
    apart = difference(saved, reply, True)
    print(f"2 ranks, resumed on 1: at most {apart:.1e}", flush=True)
    wrong = [] if apart <= DIGITS else [{"run": cell, "error": reply.get("error", f"differs by {apart}")}]
    return {"ranks": 1, "name": "resumed on fewer ranks", "runs": 1, "right": 1 - len(wrong),
            "largest_difference": apart, "wrong": wrong}  # fmt: skip


def main() -> int:
    """Return 1 if a run is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", type=int, choices=(1, 2), help="with this number of ranks only")
    ranks = parser.parse_args().only
    rows: list[Row] = []
    for count in (1, 2) if ranks is None else (ranks,):
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(count, folder)
    if ranks is None:
        RESULT.write_text(json.dumps({
            "command": "python -m tests.clients.trainer_matrix", "date": datetime.date.today().isoformat(),
            "versions": {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")},
            "limit": DIGITS, "rows": rows,
        }, indent=1) + "\n")  # fmt: skip
    return int(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
