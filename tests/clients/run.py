"""Start a client's script in real processes under `infinity run --as-deepspeed`; read the lines of JSON it prints.

`python -m tests.clients.run CELLS` is such a script: CELLS has lists of cells by the name of their module here.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_client(module: str, ranks: int, *words: str, timeout: float = 300) -> list[dict[str, Any]]:
    """Return what `module` prints on rank 0, an object a line; AssertionError with its output if it fails.

    Behind the replacements of `tests.support.clients_without_cuda`, offline.
    """
    command = [
        sys.executable, "-m", "infinity", "run", "--as-deepspeed", "--no_local_rank", "--nproc", str(ranks),
        "-m", "tests.support.clients_without_cuda", "-m", module, *words,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return _run(command, ranks, folder, timeout)


def _run(command: list[str], ranks: int, folder: str, timeout: float) -> list[dict[str, Any]]:
    """folder: where all ranks write together."""
    env = {
        **os.environ, "CLIENT_FOLDER": folder,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }  # fmt: skip
    reply = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=timeout, check=False)
    found = [json.loads(line) for line in reply.stdout.splitlines() if line.startswith('{"')]
    assert reply.returncode == 0, f"{reply.stdout[-2000:]}\n{reply.stderr[-6000:]}"
    return found


def run_together(ranks: int, cells: dict[str, list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Return what the cells of several modules give, a list a module, in one start of the ranks."""
    found = iter(run_client("tests.clients.run", ranks, json.dumps(cells)))
    return [[next(found) for _ in each] for each in cells.values()]


if __name__ == "__main__":
    for _name, _cells in json.loads(sys.argv[1]).items():
        sys.argv[1] = json.dumps(_cells)
        importlib.import_module(f"tests.clients.{_name}").main()
