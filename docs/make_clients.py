"""Writes the tables of docs/with_trainer.md from benchmarks/results/clients_*.json: python docs/make_clients.py

A test holds that nothing has to be written.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "with_trainer.md"
RESULTS = ROOT / "benchmarks" / "results"
CLIENTS = {"Trainer": "clients_trainer.json", "accelerate": "clients_accelerate.json"}
_TABLE = re.compile(r"(?<=<!-- begin: clients -->\n).*?(?=<!-- end: clients -->)", re.DOTALL)


_OPTIM = re.compile(r"(?<=<!-- begin: optim -->\n).*?(?=<!-- end: optim -->)", re.DOTALL)


def optimizers() -> str:
    """The table of Trainer's `optim` names: those of one fate and reason in a row."""
    rows = json.loads((RESULTS / "clients_optim.json").read_text(encoding="utf-8"))["rows"]
    fates: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        reason = row.get("words", "").removeprefix("infinity.errors.ConfigError: ").split(". ")[0]
        fates.setdefault((row["verdict"], reason), []).append(f"`{row['name']}`")
    lines = ["", "| `optim` | with offload | why |", "|---|---|---|"]
    order = ("trains", "refused", "plain Trainer refuses")
    for (verdict, reason), names in sorted(fates.items(), key=lambda item: order.index(item[0][0])):
        lines.append(f"| {', '.join(names)} | {verdict} | {reason.replace('|', ' ')} |")
    return "\n".join([*lines, "", ""])


def refreshed(text: str) -> str:
    """The page with the tables that the results make."""
    lines = ["", "| client | what | ranks | right | largest difference |", "|---|---|---|---|---|"]
    for client, name in CLIENTS.items():
        rows = json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]
        lines += [
            f"| {client} | {row['name']} | {row['ranks']} | {row['right']} of {row['runs']} | "
            f"{row['largest_difference']:.1e} |"
            for row in rows
        ]
    text = _OPTIM.sub(lambda _: optimizers(), text)
    return _TABLE.sub(lambda _: "\n".join([*lines, "", ""]), text)


def main() -> None:
    """Write the page."""
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
