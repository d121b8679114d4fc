"""What is too long for the suite: run before a release, and for what a change touches.

    python -m tests.matrix [NAME ...] [--for PATH ...] [--list] [--json FILE]

A row is a folder of tests, of which those marked `matrix` run, or a module of tests that runs by itself. Without names
and paths all rows run. --for names the rows for changed files and does not run them. The exit status is 1 if a row
failed. FILE keeps the rows of earlier runs that this one does not have.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_LINES_SHOWN = 30
_TRAINING = (
    "infinity/engine", "infinity/zero", "infinity/step", "infinity/memory", "infinity/optim", "infinity/ops", "csrc",
)  # fmt: skip
_AXES = ("infinity/parallel", "infinity/distributed", "infinity/plan")


@dataclass(frozen=True)
class Row:
    """A folder of tests, or a module with its words, and the folders whose change it is for."""

    name: str
    of: tuple[str, ...]
    words: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """Of this interpreter."""
        if (ROOT / self.name).exists():
            return [sys.executable, "-m", "pytest", "-q", "-m", "matrix", "-n", "2", "--dist", "worksteal", self.name]
        return [sys.executable, "-m", self.name, *self.words]


ROWS = [
    Row("tests/checkpoint", ("infinity/checkpoint", "infinity/engine", "infinity/memory")),
    Row("tests/cli", ("infinity/cli",)),
    Row("tests/config", ("infinity/config",)),
    Row("tests/clients", ("infinity/integrations", "infinity/engine")),
    Row("tests/distributed", ("infinity/distributed",)),
    Row("tests/engine", (*_TRAINING, "infinity/plan", "infinity/config", "infinity/observability")),
    Row("tests/estimators", ("estimators", "infinity/plan")),
    Row("tests/ops", ("infinity/ops", "csrc")),
    Row("tests/parallel", (*_AXES, "infinity/engine", "infinity/zero", "infinity/integrations")),
    Row("tests/plan", ("infinity/plan",)),
    Row("tests/simulator", ("estimators", "infinity/plan")),
    Row("tests/tiling", ("infinity/tiling",)),
    Row("tests/zero", ("infinity/zero", "infinity/memory", "infinity/tiling")),
    Row("tests/zoo", ("infinity/zero", "infinity/engine")),
    # The files beside the folders: wheels, benchmarks, examples, more than the memory holds.
    *(
        Row(f"tests/test_{name}.py", of)
        for name, of in {
            "accelerator_matrix": (*_TRAINING, "infinity/plan"),
            "benchmarks": ("benchmarks",),
            "bigger_than_memory": (*_TRAINING, "infinity/plan"),
            "deepspeed_names": ("infinity/integrations",),
            "dependencies": ("pyproject.toml", "infinity"),
            "examples": ("examples",),
            "finetune": ("examples",),
            "first_run": ("csrc/kernels",),
            "wheel": ("pyproject.toml", "setup.py", "csrc"),
        }.items()
    ),
    Row("tests.bit_hashes", (*_TRAINING, "infinity/plan")),
    Row("tests.mutants", ("infinity", "csrc", "tests")),
    Row("tests.accelerator_matrix", (*_TRAINING, "infinity/plan"), ("--full", "--delays")),
    Row("tests.accelerator_memory", ("infinity/zero", "infinity/plan")),
    Row("tests.checkpoint.elastic_matrix", ("infinity/checkpoint",)),
    Row("tests.checkpoint.resume_matrix", ("infinity/checkpoint", "infinity/engine")),
    Row("tests.clients.accelerate_matrix", ("infinity/integrations", "infinity/engine")),
    Row("tests.clients.optim_matrix", ("infinity/integrations", "infinity/optim")),
    Row("tests.clients.trainer_matrix", ("infinity/integrations", "infinity/engine")),
    Row("tests.clients.trl_matrix", ("infinity/integrations", "infinity/engine")),
    Row("tests.compile_matrix", ("infinity/zero",)),
    Row("tests.engine.interrupt_matrix", ("infinity/engine", "infinity/memory")),
    Row("tests.engine.nonfinite_matrix", ("infinity/engine", "infinity/optim")),
    Row("tests.gradient_matrix", (*_TRAINING, "infinity/plan")),
    Row("tests.hostile_doors", ("infinity/checkpoint", "estimators"), ("2000",)),
    Row("tests.init_from_pretrained", ("infinity/zero",)),
    Row("tests.load_shards", ("infinity/zero", "infinity/parallel")),
    Row("tests.long_sequences", ("infinity/tiling",)),
    Row("tests.memory_cases", ("infinity/plan", "infinity/engine")),
    Row("tests.pipeline_checkpoints", _AXES),
    Row("tests.pipeline_divergences", _AXES),
    Row("tests.pipeline_families", _AXES),
    Row("tests.pipeline_loops", _AXES),
    Row("tests.pipeline_matrix", (*_AXES, "infinity/engine")),
    Row("tests.pipeline_tables", ("infinity/plan",)),
    Row("tests.record_cuts", ("infinity/checkpoint", "infinity/memory")),
    Row("tests.record_kills", ("infinity/checkpoint", "infinity/memory", "infinity/engine")),
    Row("tests.soak", ("infinity/memory",), ("--steps", "12000")),
    Row("tests.stream_books", ("infinity/zero", "infinity/memory")),
    Row("tests.speculation_matrix", (*_TRAINING, "infinity/plan")),
    Row("tests.tensor_matrix", (*_AXES, "infinity/zero")),
    Row("tests.zoo", ("infinity/zero", "infinity/engine")),
]


def rows_for(paths: list[str]) -> list[Row]:
    """Return the rows for changed files, whose paths begin at the checkout."""
    return [row for row in ROWS if any(f"{path}/".startswith(f"{of}/") for path in paths for of in row.of)]


def run(row: Row) -> dict[str, object]:
    """Run a row and return what became of it; what it printed last is shown."""
    began = time.monotonic()
    pipe = subprocess.PIPE
    reply = subprocess.run(row.command, cwd=ROOT, stdout=pipe, stderr=subprocess.STDOUT, text=True, check=False)
    passed = reply.returncode == 0
    lines = reply.stdout.splitlines()
    print("\n".join(lines[-(1 if passed else _LINES_SHOWN) :]))
    return {
        "passed": passed, "seconds": round(time.monotonic() - began), "date": date.today().isoformat(),
        "last": lines[-1] if lines else "",
    }  # fmt: skip


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--for", dest="paths", nargs="+", metavar="PATH", help="print the rows for these files")
    parser.add_argument("--list", action="store_true", help="print all rows")
    parser.add_argument("--json", type=Path, metavar="FILE", help="record the results here")
    given = parser.parse_args()
    if unknown := {*given.names} - {row.name for row in ROWS}:
        parser.error(f"{', '.join(sorted(unknown))}: no such row; --list prints them")
    if given.list or given.paths:
        print("\n".join(row.name for row in (ROWS if given.list else rows_for(given.paths))))
        return 0
    found = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    failed = 0
    for row in ROWS:
        if given.names and row.name not in given.names:
            continue
        print(f"{row.name}: {' '.join(row.command[1:])}", flush=True)
        found[row.name] = run(row)
        failed += not found[row.name]["passed"]
        print(f"{row.name}: {'passed' if found[row.name]['passed'] else 'FAILED'}", flush=True)
        if given.json:
            given.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
