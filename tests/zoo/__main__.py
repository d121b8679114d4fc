"""Train families of transformers against plain torch and print how far apart the weights are.

    python -m tests.zoo [--ranks 1 2] [--families NAME ...] [--compile none|aot_eager|inductor] [--json PATH]

Every family is made small, trained for a few steps of AdamW in fp32 at stage 3 with parameters and optimizer states on
NVMe, and compared with plain torch, which sees the data of all ranks. Exit code 1 where a family fails or differs by
more than the limit.

With --compile, plain torch compiles the same modules. "rounding" is how far the back end takes plain torch from plain
torch that runs eagerly.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.support.spawn import RankError, RankPool
from tests.zoo.families import FAMILIES, ON_SEVERAL_RANKS
from tests.zoo.train import ERROR_MAX, NOT_COMPILED, STEPS, run

TIMEOUT_SECONDS = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and perhaps write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--families", nargs="+", choices=sorted(FAMILIES), metavar="NAME", help="default: all on 1 rank, some on more"
    )
    parser.add_argument("--compile", choices=(NOT_COMPILED, "aot_eager", "inductor"), default=NOT_COMPILED)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'family':<20} ranks {'numel':>8} {'max error':>10} {'rounding':>9}  seconds  bits")
    for ranks in options.ranks:
        with RankPool(ranks) as pool:
            for name in options.families or (FAMILIES if ranks == 1 else ON_SEVERAL_RANKS):
                rows.append(_row(pool, name, options.compile, options.steps))
                print(_text(rows[-1]), flush=True)
    bad = [row["family"] for row in rows if not row["ok"]]
    equal = sum(row.get("bits", False) for row in rows)
    print(f"{len(rows)} runs, {equal} equal to the last bit, {len(bad)} beyond {ERROR_MAX:g} or failed {bad or ''}")
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**_head(options), "rows": rows}, indent=1) + "\n")
    return int(bool(bad))


def _head(options: argparse.Namespace) -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout
    families = f" --families {shlex.join(options.families)}" if options.families else ""
    ranks = " ".join(map(str, options.ranks))
    return {
        "command": f"python -m tests.zoo --ranks {ranks} --compile {options.compile}{families}",
        "commit": commit.strip(), "date": time.strftime("%Y-%m-%d"), "machine": platform.machine(),
        "cores": os.cpu_count(), "torch": torch.__version__, "transformers": transformers.__version__,
        "steps": options.steps, "error_max": ERROR_MAX, "stage": 3,
        "parameters": "nvme", "optimizer": "nvme", "dtype": "fp32", "compile": options.compile,
    }  # fmt: skip


def _row(pool: RankPool, name: str, compiler: str, steps: int) -> dict[str, Any]:
    row = {"family": name, "ranks": pool.world_size, "ok": False}
    try:
        found = pool.run(run, name, compiler, steps, timeout=TIMEOUT_SECONDS)[0]
    except RankError as error:
        return {**row, "failure": str(error)}
    return {**row, **found, "ok": found["error"] <= ERROR_MAX and found["moved"] > 0}


def _text(row: dict[str, Any]) -> str:
    """A row's line; below it the whole traceback of a run that failed."""
    head = f"{row['family']:<20} {row['ranks']:>5}"
    if "failure" in row:
        return f"{head} FAILED\n{textwrap.indent(row['failure'].strip(), '    ')}"
    bits = "equal" if row["bits"] else f"differ: {row['why']}"
    verdict = "" if row["ok"] else f"  BEYOND {ERROR_MAX:g}"
    rounding = f"{row['rounding']:.1e}" if "rounding" in row else ""
    return f"{head} {row['numel']:>8} {row['error']:>10.1e} {rounding:>9} {row['seconds']:>8.2f}  {bits}{verdict}"


if __name__ == "__main__":
    sys.exit(main())
