"""TRL's trainers, with no line changed, against plain TRL (DDP with several ranks): the table of docs/with_trl.md.

    python -m tests.clients.trl_matrix [--only 2/grpo/lora]

Writes rows into benchmarks/results/clients_trl.json; those that were not chosen stay as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping
from typing import Any

from tests.clients.run import ROOT, run_client

RESULT = ROOT / "benchmarks" / "results" / "clients_trl.json"
# The largest relative difference from plain TRL that is right.
LIMIT = 1e-4
Row = dict[str, Any]


def name_of(row: Row) -> str:
    """Return what `--only` chooses by: ranks/trainer, /lora, /tier."""
    lora = "/lora" if row["lora"] else ""
    return f"{row['ranks']}/{row['trainer']}{lora}/{row['offload']}"


def listed() -> list[Row]:
    """Return the table's rows, each without what it found."""
    return [
        {"ranks": ranks, "trainer": trainer, "lora": lora, "stage": 3, "offload": tier}
        for ranks, trainer, lora, tier in itertools.product(
            (1, 2), ("sft", "dpo", "grpo"), (False, True), ("none", "cpu", "nvme")
        )
    ]


def _apart(mine: Any, plain: Any) -> float:
    """Return the largest relative difference; infinite where something is missing."""
    if isinstance(plain, Mapping):
        mine, plain = ([each[key] for key in sorted(each)] for each in (mine, plain))
    if len(mine) != len(plain):
        return float("inf")
    # GRPO's first loss is zero but for rounding.
    return max((abs(one - two) / max(abs(two), 1e-3) for one, two in zip(mine, plain, strict=True)), default=0.0)


def compared(row: Row, found: Row, plain: Row) -> Row:
    """Return a row with what its run saw, beside the plain one's."""
    if "error" in found:
        return {**row, "error": found["error"]}
    kept = {key: found[key] for key in ("saved_differs", "merged_differs", "offloaded") if key in found}
    if "merged_in_place" in plain:
        kept["merged_in_place_equal"] = _apart(found["merged_in_place"], plain["merged_in_place"]) <= LIMIT
    return {
        **row, "losses": found["losses"],
        "loss_difference": _apart(found["losses"], plain["losses"]),
        "norm_difference": _apart(found["norms"], plain["norms"]),
        "rewards_equal": _apart(found["rewards"], plain["rewards"]) <= LIMIT,
        "weights_difference": _apart(found["weights"], plain["weights"]),
        "tokens_equal": found["greedy"] == found["loaded_greedy"] == plain["greedy"], **kept,
    }  # fmt: skip


def is_right(row: Row) -> bool:
    """Return whether a row has what plain TRL has."""
    apart = ("loss_difference", "norm_difference", "weights_difference", "saved_differs")
    equal = ("rewards_equal", "tokens_equal", "merged_in_place_equal")
    return "error" not in row and all(row[key] <= LIMIT for key in apart) and all(row.get(key, True) for key in equal)


def measure(rows: list[Row]) -> list[Row]:
    """Run rows of one trainer, with or without LoRA, on one number of ranks, and the plain one beside them."""
    plain = {"trainer": rows[0]["trainer"], "lora": rows[0]["lora"]}
    cells = [plain, *({**plain, "stage": row["stage"], "offload": row["offload"]} for row in rows)]
    replies = run_client("tests.clients.trl_cells", rows[0]["ranks"], json.dumps(cells), timeout=3000)
    return [compared(row, found, replies[0]) for row, found in zip(rows, replies[1:], strict=True)]


def main() -> int:
    """Return 1 if a row is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", default="", help="rows whose name begins so: ranks/trainer, /lora, /tier")
    only = parser.parse_args().only
    chosen = [row for row in listed() if name_of(row).startswith(only)]
    if not chosen:
        parser.error(f"no row begins with {only}: {', '.join(map(name_of, listed()))}")
    result = json.loads(RESULT.read_text())
    known = {name_of(row): row for row in result["rows"]}
    wrong = 0
    for _, group in itertools.groupby(chosen, key=lambda row: (row["ranks"], row["trainer"], row["lora"])):
        for row in measure(list(group)):
            known[name_of(row)] = row
            wrong += not is_right(row)
            print(f"{name_of(row)}: {'right' if is_right(row) else row}", flush=True)
        result["rows"] = [known[name_of(row)] for row in listed() if name_of(row) in known]
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
