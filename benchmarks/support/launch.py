"""Run a task in fresh processes, one a rank, and take its JSON value.

    values = run_ranks("training", {"contender": "torch", ...}, world_size=2)

A task is a module of this package with `run(options: dict) -> dict`. Every measurement has processes of its own: their
kernel counters and their peak memory are theirs alone, and a rival may run in another environment (`python`).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_BENCHMARKS = Path(__file__).resolve().parents[1]
# Marks the line of a task's output that is its value; libraries print to the same stream.
MARK = "BENCHMARK-VALUE "


class TaskError(RuntimeError):
    """A rank failed; the end of what it printed."""


def run_ranks(
    task: str, options: dict[str, Any], *, world_size: int = 1, python: str = sys.executable, timeout: float = 900,
    environment: dict[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """`run(options)` of `support.TASK` in `world_size` processes; their values in rank order.

    Cores are shared equally: each rank gets its part as OMP_NUM_THREADS and is not pinned.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // world_size)
    shared = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join([str(_BENCHMARKS), str(_BENCHMARKS.parent)]), **(environment or {}),
    }  # fmt: skip
    command = [python, "-m", "support.worker", task, json.dumps(options)]
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(world_size)]
        ranks = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as stream:
                    own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    ranks.append(subprocess.Popen(command, env=own, stdout=stream, stderr=subprocess.STDOUT))
            _wait(task, ranks, outputs, timeout)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return [_value(output) for output in outputs]


def _wait(task: str, ranks: list[subprocess.Popen[bytes]], outputs: list[Path], timeout: float) -> None:
    """Wait for all ranks; the first one that fails is the error, since the others then wait for it."""
    left = timeout
    while any(process.poll() is None for process in ranks) and left > 0:
        for process in ranks:
            try:
                process.wait(0.05)
            except subprocess.TimeoutExpired:
                left -= 0.05
        if any(process.poll() for process in ranks):
            break
    for rank, (process, output) in enumerate(zip(ranks, outputs, strict=True)):
        if process.poll():
            tail = output.read_text(errors="replace")[-3000:]
            raise TaskError(f"{task}: rank {rank} ended with {process.returncode}:\n{tail}")
    if left <= 0:
        raise TaskError(f"{task}: no answer within {timeout:g} s")


def _value(output: Path) -> dict[str, Any]:
    lines = [line for line in output.read_text(errors="replace").splitlines() if line.startswith(MARK)]
    if not lines:
        raise TaskError("the task printed no value")
    return json.loads(lines[-1][len(MARK) :])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
