"""A drive that fails under a training: an exception that says what, where and why. No abort, no hang, no rank stuck."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cells import covered, kept

ROOT = Path(__file__).parents[2]
PROCESS = ROOT / "tests" / "engine" / "fault_process.py"
# errno of each way to fail, where retrying does not help.
ERRNO = {"eio": 5, "enospc": 28, "eof": 5, "hang": 110}
WATCHDOG = 2


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None, "the faults need a C++ compiler"
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = ROOT / "tests" / "support" / "fault_shim.cpp"
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
    return library


def environment(shim: Path, **more: str) -> dict[str, str]:
    """A process in which the files of one rank go wrong as told."""
    shared = {"LD_PRELOAD": str(shim), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, **shared, **more}


class FaultyProcess:
    """Trains under faults, case by case."""

    def __init__(self, shim: Path) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            [sys.executable, str(PROCESS)], stdin=pipe, stdout=pipe, text=True, env=environment(shim, FAULT_PATH="swap")
        )

    def ask(self, **case: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"watchdog": WATCHDOG, **case}) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, f"the process died with exit code {self._process.wait(5)}"
        return json.loads(reply)

    def end(self, seconds: float) -> int:
        """The exit status; subprocess.TimeoutExpired where the process does not end in time."""
        try:
            self._process.communicate(timeout=seconds)
        finally:
            self._process.kill()
            self._process.wait()
        return self._process.returncode


@pytest.fixture(scope="module")
def faulty(shim: Path) -> Iterator[FaultyProcess]:
    process = FaultyProcess(shim)
    yield process
    # Threads still hang in some of the tests' transfers: the interpreter must not wait for them.
    assert process.end(seconds=20) == 0


def check_error(reply: dict[str, Any], mode: str, folder: Path) -> None:
    error = reply["error"]
    assert error is not None, reply
    assert error["type"] == "TransferError", error
    assert error["errno"] == ERRNO[mode]
    assert error["operation"] in ("read", "write", "create")
    assert error["nbytes"] > 0 and error["offset"] >= 0
    assert Path(error["path"]).parent == folder and error["path"].endswith("-rank0.bin")
    for part in (error["path"], f"{error['nbytes']} bytes", f"offset {error['offset']}", f"errno {ERRNO[mode]}"):
        assert part in error["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    *covered(
        mode=list(ERRNO), where=["initialize", "forward", "backward", "step", "flush"], overlap=[True, False],
        gradients=["cpu", "nvme"],
    )  # fmt: skip
)
def test_a_failure_is_an_exception_and_the_engine_can_be_closed(faulty, tmp_path, mode, where, overlap, gradients):
    told = {"mode": mode, "overlap": overlap, "gradients": gradients, "watchdog": 1 if mode == "hang" else WATCHDOG}
    watchdog = told["watchdog"]
    reply = faulty.ask(folder=str(tmp_path), where=where, **told)
    check_error(reply, mode, tmp_path)
    # The watchdog is allowed once for the transfer, and closing may wait for it once more.
    bound = 3 * watchdog if mode == "hang" else 5
    assert reply["seconds"] < bound + 3
    assert reply["close_seconds"] < bound
    assert reply["close_error"] is None
    assert reply["files"] == []


@pytest.mark.slow
@pytest.mark.parametrize("after", [1, 3])
def test_a_failure_in_the_middle(faulty, tmp_path, after):
    """Some transfers of the step have gone through."""
    reply = faulty.ask(folder=str(tmp_path), where="step", mode="eio", after=after)
    check_error(reply, "eio", tmp_path)
    assert reply["files"] == [] and reply["close_error"] is None


@pytest.mark.slow
@pytest.mark.parametrize("where", ["initialize", "forward", "step"])
def test_short_reads_and_writes_change_nothing(faulty, tmp_path, where):
    """What a system call leaves is asked for again; so is what a signal or a busy drive interrupts."""
    expected = faulty.ask(folder=str(tmp_path), where="never", mode="eio")["digest"]
    assert expected is not None
    for mode in ("short", "eintr", "eagain"):
        reply = faulty.ask(folder=str(tmp_path), where=where, mode=mode)
        assert (reply["error"], reply["digest"]) == (None, expected), mode


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(("where", "mode"), kept(
    [("initialize", "eio"), ("initialize", "hang"), ("forward", "hang"), ("step", "enospc"), ("flush", "eio")],
    [("step", "enospc")],
))  # fmt: skip
def test_the_other_rank_ends(shim, tmp_path, where, mode):
    """Each rank is a program of its own that does nothing about errors; only rank 1's drive fails."""
    case = json.dumps({"folder": str(tmp_path / "nvme"), "where": where, "mode": mode, "watchdog": 10})
    port = free_port()
    ranks = []
    for rank in range(2):
        own = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "FAULT_PATH": "-rank1.bin",
        }  # fmt: skip
        command = [sys.executable, str(PROCESS), case]
        ranks.append(subprocess.Popen(command, env=environment(shim, **own), text=True, stderr=subprocess.PIPE))
    try:
        texts = [""] * 2
        _, texts[1] = ranks[1].communicate(timeout=60)
        failed = time.monotonic()
        _, texts[0] = ranks[0].communicate(timeout=40)
        assert time.monotonic() - failed < 30, "the healthy rank waited too long"
    finally:
        for process in ranks:
            process.kill()
            with process:
                # Waits, and closes the pipes.
                pass
    assert ranks[1].returncode == 1, texts[1]
    assert "TransferError" in texts[1] and f"errno {ERRNO[mode]}" in texts[1], texts[1]
    # What fails in the background may show at the end of the last step, when the other rank has all it needs.
    assert ranks[0].returncode in ((0, 1) if where == "flush" else (1,)), texts[0]
