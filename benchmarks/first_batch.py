"""Claim: once a batch is known, what the engine says that the process takes is within 10 % of what it takes.

    python benchmarks/first_batch.py [--models NAME,...] [--ranks 1,2] [--dtypes fp32,bf16] [--recompute 0,1]
        [--tiers cpu,nvme] [--folder DIR] [--json FILE]

On an accelerator a row is also the most that torch's allocator has had of it, against the plan's bytes there
and the activations: its share is that one, since the driver's own CPU memory is nobody's plan.

A row is a process for each rank. What counts is the most anonymous memory (RssAnon, every 4 ms), from the start of the
process on. "before" is what the engine says without a batch. Rows that FILE has stay there, and rows of the same name
are replaced: the claim is about all of them. OMP_WAIT_POLICY=passive makes it faster on a machine that does other work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from support.launch import run_ranks
from support.machine import MIB, describe
from support.table import Table, claim

LEAST, MOST = 0.9, 1.1
NAMES = ("own LM", "ResNet-50", "Llama", "Whisper", "BERT", "T5", "ViT", "Mixtral", "U-Net")


class Watch:
    """The most anonymous memory of this process's children."""

    def __init__(self) -> None:
        self.peaks: dict[int, int] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        me, children, looked = psutil.Process(), [], 0.0
        while not self._over.wait(0.004):
            if time.monotonic() - looked > 0.3:
                children, looked = [child.pid for child in me.children()], time.monotonic()
            for pid in children:
                try:
                    text = Path(f"/proc/{pid}/status").read_text()
                    nbytes = int(text.split("RssAnon:")[1].split()[0]) * 1024
                except (OSError, IndexError):
                    continue
                self.peaks[pid] = max(self.peaks.get(pid, 0), nbytes)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--dtypes", default="fp32,bf16")
    parser.add_argument("--recompute", default="0,1")
    parser.add_argument("--tiers", default="cpu,nvme")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--json", help="file for the rows, as benchmarks/results/first_batch.json")
    given = parser.parse_args()
    print(describe())
    table = Table("peak MiB:.0f", "before:.0f", "with a batch:.0f", "share:.2f", "s:.0f", name_width=40)
    file = Path(given.json) if given.json else None
    rows: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file is not None and file.exists() else {}
    axes = [each.split(",") for each in (given.models, given.ranks, given.dtypes, given.recompute, given.tiers)]
    for model, ranks, dtype, recompute, tier in itertools.product(*axes):
        if recompute == "1" and model in ("ResNet-50", "U-Net"):
            continue
        began = time.monotonic()
        with tempfile.TemporaryDirectory(dir=given.folder) as folder, Watch() as watch:
            options = {"model": model, "bf16": dtype == "bf16", "recompute": recompute == "1", "tier": tier,
                       "folder": folder, "steps": given.steps}
            values = run_ranks("first_batch", options, world_size=int(ranks))
        peak, value = max(watch.peaks.values()), max(values, key=lambda v: v["predicted"])
        name = f"{model}, {ranks} rank, {dtype}, {tier}" + (", recomputed" if recompute == "1" else "")
        share = value["predicted"] / peak
        if "device_planned" in value:
            peak, value["predicted"] = value["device_allocated"], value["device_planned"] + value["activations"]
            share, name = value["predicted"] / peak, f"{name}, on the accelerator"
        rows[name] = {"peak": peak, **value, "steps": given.steps, "share": round(share, 3)}
        table.row(name, peak / MIB, value["before"] / MIB, value["predicted"] / MIB, share, time.monotonic() - began)
        if file is not None:
            file.write_text(json.dumps(rows, indent=1) + "\n")
    wrong = [f"{name}: {row['share']:.2f}" for name, row in rows.items() if not LEAST <= row["share"] <= MOST]
    claim(f"{len(rows) - len(wrong)} of {len(rows)} between {LEAST} and {MOST}: {wrong or 'all'}", not wrong)


if __name__ == "__main__":
    main()
