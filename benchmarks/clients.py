"""Claim: through transformers' Trainer a step takes at most 1/0.97 of the same loop written by hand with infinity.

    python benchmarks/clients.py [--pairs 5] [--steps 6] [--folder DIR]

One process, by turns: Trainer with a DeepSpeed configuration, unchanged, and a loop over the same batches with the same
optimizer, schedule and clipping; stage 3 with everything in CPU memory, or on NVMe. A step of each is at least a
second; the first two are left out. On a machine without CUDA the clients' three questions for it are answered by
tests/support/clients_without_cuda.py. Writes results/clients.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from support.machine import describe
from support.table import Table

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "clients.json"
LIMIT = 0.97
COMMAND = "python benchmarks/clients.py"


def measure(options: argparse.Namespace, tier: str, folder: str) -> list[tuple[float, float]]:
    """Return the seconds of a step of each pair: by hand, by Trainer."""
    reply = subprocess.run(
        [sys.executable, "-m", "infinity", "run", "--as-deepspeed", "--no_local_rank", "--nproc", "1", "-m",
         "tests.support.clients_without_cuda", str(ROOT / "benchmarks" / "support" / "with_trainer.py"),
         str(options.pairs), str(options.steps), tier, folder],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    if reply.returncode:
        raise SystemExit(reply.stderr[-4000:])
    return [tuple(pair) for line in reply.stdout.splitlines() if line.startswith("[[") for pair in json.loads(line)]


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="of a run; the first two are not counted")
    parser.add_argument("--folder", help="folder on the drive")
    options = parser.parse_args()
    print(describe())
    table, rows = Table("by hand:.3f", "Trainer:.3f", "throughput:.3f"), {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for tier in ("cpu", "nvme"):
            pairs = measure(options, tier, folder)
            hand, trainer = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(first / second for first, second in pairs)
            rows[tier] = {"pairs": pairs, "by_hand_seconds": hand, "trainer_seconds": trainer, "throughput": ratio}
            table.row(tier, hand, trainer, ratio, note=f"claim >= {LIMIT}: {'holds' if ratio >= LIMIT else 'NO'}")
    found = {"command": COMMAND, "machine": describe(), "limit": LIMIT, "tiers": rows}
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
