"""Every name of Trainer's `optim`, with offload, against plain Trainer: which train, and which are refused.

    PYTHONPATH=FOLDER python -m tests.clients.optim_matrix [NAME ...]

Writes benchmarks/results/clients_optim.json, of which docs/make_clients.py makes a table. FOLDER has the packages of
optimizers that are not torch's (bitsandbytes, torchao, galore-torch, lomo-optim, grokadamw, schedulefree, apollo-torch,
torch-optimi). With names, only their rows are measured anew.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers.training_args import OptimizerNames

from tests.clients.run import ROOT, run_client
from tests.clients.trainer_matrix import DIGITS, difference

RESULT = ROOT / "benchmarks" / "results" / "clients_optim.json"
PLACES: list[dict[str, Any]] = [{"stage": 2, "offload": "cpu"}, {"stage": 3, "offload": "nvme"}]


def cells_of(name: str) -> list[dict[str, Any]]:
    """Return the plain run of a name, and those on the engine. Galore and Apollo have to be told their layers."""
    more = {"optim_target_modules": ["attn", "mlp"]} if name.startswith(("galore", "apollo")) else {}
    cell = {"arguments": {"optim": name, **more}}
    return [cell, *({**place, **cell} for place in PLACES)]


def verdict(plain: dict[str, Any], replies: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what became of a name: trained with a difference, refused with words, or plain Trainer's own error."""
    if "error" in plain:
        return {"verdict": "plain Trainer refuses", "words": plain["error"].strip().splitlines()[-1]}
    refused = {reply["error"].strip().splitlines()[-1] for reply in replies if "error" in reply}
    if not refused:
        apart = max(difference(plain, reply, resumed=False) for reply in replies)
        return {"verdict": "trains" if apart <= DIGITS else "wrong", "difference": apart}
    ours = all(words.startswith("infinity.errors.ConfigError: ") for words in refused) and len(refused) == 1
    return {"verdict": "refused" if ours else "wrong", "words": " | ".join(sorted(refused))}


def main() -> int:
    """Return 1 if a name neither trains as plain Trainer nor is refused by one error of ours on every tier."""
    names = sys.argv[1:] or [each.value for each in OptimizerNames]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cells.json"
        file.write_text(json.dumps([cell for name in names for cell in cells_of(name)]))
        found = iter(run_client("tests.clients.trainer_cells", 1, str(file), timeout=3000))
    rows = [{"name": name, **verdict(next(found), [next(found) for _ in PLACES])} for name in names]
    for row in rows:
        print(row, flush=True)
    wrong = any(row["verdict"] == "wrong" for row in rows)
    if sys.argv[1:]:
        measured = {row["name"]: row for row in rows}
        rows = [measured.get(row["name"], row) for row in json.loads(RESULT.read_text())["rows"]]
    RESULT.write_text(json.dumps({
        "command": "PYTHONPATH=FOLDER python -m tests.clients.optim_matrix", "date": datetime.date.today().isoformat(),
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "accelerate")},
        "limit": DIGITS, "rows": rows,
    }, indent=1) + "\n")  # fmt: skip
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
