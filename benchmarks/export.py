"""Claim: an export takes at most 256 MB of memory beside the engine's own, and so does one from a checkpoint.

    python benchmarks/export.py [--folder DIR] [--numel N] [--axes 1x1x1,1x2x1,2x2x2] [--tiers nvme,cpu]

A Llama of 700 M parameters in bf16, parameters and optimizer states on NVMe or in CPU memory, after one step. Axes are
ranks of pipeline x data x tensor. Extra memory of a rank is what is resident at the peak of the verb beyond what was
before it; the rank with the most counts. The rate is that of the files' bytes, synced. From a checkpoint the same is
written by a process that has no engine.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.launch import run_ranks
from support.machine import MIB, describe
from support.table import Table, claim

MEMORY_MAX = 256 * MIB
ROOT = Path(__file__).resolve().parents[1]
EXTRACT = """
import sys, time
from pathlib import Path
from support.machine import reset_peak, resident_nbytes
from infinity.checkpoint.extract import extract
from infinity.checkpoint.format import find, read_manifest
folder = find(sys.argv[1])
reset_peak()
before, began = resident_nbytes(), time.perf_counter()
extract(folder, read_manifest(folder), Path(sys.argv[2]), dtype=sys.argv[3])
print(time.perf_counter() - began, resident_nbytes(peak=True) - before)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="folder on the drive")
    parser.add_argument("--numel", type=int, default=700_000_000)
    parser.add_argument("--axes", default="1x1x1,1x2x1,2x2x2")
    parser.add_argument("--tiers", default="nvme,cpu")
    given = parser.parse_args()
    print(describe())
    table = Table("M parameters:.0f", "GB:.2f", "s:.1f", "GB/s:.2f", "extra MB:.0f", name_width=34)
    worst = 0.0
    for axes in given.axes.split(","):
        pipeline, data, tensor = map(int, axes.split("x"))
        parallel = {"pipeline": pipeline, "tensor": tensor}
        for tier in given.tiers.split(","):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                options = {"folder": folder, "numel": given.numel, "tier": tier, "parallel": parallel}
                found = run_ranks("exports", options, world_size=pipeline * data * tensor)
                for dtype in ("bf16", "fp32"):
                    rows = [each[dtype] for each in found]
                    live = max(row["seconds"] for row in rows), max(row["extra"] for row in rows)
                    saved = _extract(folder, dtype)
                    nbytes = _nbytes(Path(folder) / dtype)
                    names = (f"{axes}, {tier}, {dtype}", "  its checkpoint")
                    for name, (seconds, extra) in zip(names, (live, saved), strict=True):
                        rate = nbytes / seconds / 1e9
                        table.row(name, found[0]["numel"] / 1e6, nbytes / 1e9, seconds, rate, extra / MIB)
                        worst = max(worst, extra)
                    shutil.rmtree(Path(folder) / dtype)
    claim(f"extra memory at most {worst / MIB:.0f} MB <= 256", worst <= MEMORY_MAX)
    if worst > MEMORY_MAX:
        raise SystemExit(1)


def _extract(folder: str, dtype: str) -> tuple[float, float]:
    """Seconds and bytes of extra memory of an export from the checkpoint; its files must be those of the engine."""
    target = Path(folder) / f"{dtype}-again"
    command = [sys.executable, "-c", EXTRACT, f"{folder}/saved", str(target), dtype]
    path = os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT)])
    reply = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": path})
    for live in (Path(folder) / dtype).glob("*.safetensors"):
        subprocess.run(["cmp", live, target / live.name], check=True)
    shutil.rmtree(target)
    seconds, extra = map(float, reply.stdout.split())
    return seconds, extra


def _nbytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


if __name__ == "__main__":
    main()
