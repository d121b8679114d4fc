"""A drive that fails, moves too little, hangs or is full: a TransferError that says so, and the process can end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.backends import WORKING

_ROOT = Path(__file__).parents[2]
_COMPILER = next(filter(None, map(shutil.which, ("g++", "clang++"))), None)
_NBYTES = 1 << 20
_OFFSET = 4096

pytestmark = pytest.mark.skipif(_COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("shim") / "fault_shim.so"
    source = _ROOT / "tests" / "support" / "fault_shim.cpp"
    assert _COMPILER is not None
    subprocess.run([_COMPILER, "-O1", "-fPIC", "-shared", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """csrc/aio, with the hook that lets the shim decide what a completion says."""
    folder = tmp_path_factory.mktemp("library")
    flags = ["-std=c++17", "-O0", "-fPIC", "-pthread", "-DINFINITY_AIO_FAULTS"]
    sources = sorted((_ROOT / "csrc" / "aio").glob("*.cpp"))
    assert _COMPILER is not None
    running = [subprocess.Popen([_COMPILER, *flags, "-c", file], cwd=folder) for file in sources]
    assert [process.wait() for process in running] == [0] * len(sources)
    path = folder / "libaio_faults.so"
    objects = [f"{file.stem}.o" for file in sources]
    subprocess.run([_COMPILER, "-shared", "-pthread", "-o", path, *objects], cwd=folder, check=True)
    return path


class FaultyProcess:
    """A process whose files called faulty.bin misbehave as told."""

    backend: str

    def __init__(self, shim: Path, library: Path) -> None:
        environment = {**os.environ, "LD_PRELOAD": str(shim), "FAULT_PATH": "faulty.bin", "PYTHONPATH": str(_ROOT)}
        command = [sys.executable, str(_ROOT / "tests" / "ops" / "fault_process.py"), str(library)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, **request: object) -> dict:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"backend": self.backend, **request}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self, seconds: float) -> int:
        """The exit status; subprocess.TimeoutExpired where the process does not end in time."""
        try:
            self._process.communicate(timeout=seconds)
        finally:
            self._process.kill()
            self._process.wait()
        return self._process.returncode


@pytest.fixture(scope="module")
def faults(shim: Path, library: Path) -> Iterator[FaultyProcess]:
    process = FaultyProcess(shim, library)
    yield process
    # Threads still hang in some of the tests' transfers: the interpreter does not wait for them.
    assert process.end(seconds=10) == 0


@pytest.fixture(params=WORKING)
def faulty(faults: FaultyProcess, request: pytest.FixtureRequest) -> FaultyProcess:
    """That process on each back end."""
    faults.backend = request.param
    return faults


def _transfer(faulty: FaultyProcess, folder: Path, operation: str, mode: str, after: int = 0, depth: int = 1) -> dict:
    path = folder / "faulty.bin"
    path.write_bytes(b"\5" * (_OFFSET + _NBYTES))
    outcome = faulty.ask(path=str(path), operation=operation, mode=mode, after=after, depth=depth)
    error = outcome["error"]
    if error is None:
        expected = 7 if operation == "write" else 5
        assert path.read_bytes()[_OFFSET:] == bytes([expected]) * _NBYTES
        assert outcome["sum"] == expected * _NBYTES
        assert outcome["intact"]
    else:
        named = (error["operation"], error["path"], error["offset"], error["nbytes"])
        assert named == (operation, str(path), _OFFSET, _NBYTES)
        assert str(path) in error["text"] and str(_NBYTES) in error["text"]
    return outcome


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize(("mode", "errno", "words"), [
    ("eio", 5, "Input/output error after 524288 of 1048576 bytes"),
    ("enospc", 28, "No space left on device after 524288 of 1048576 bytes"),
    ("eof", 5, "got 524288 of 1048576 bytes, then the file ended"),
])  # fmt: skip
def test_a_failure_names_path_offset_bytes_and_cause(
    faulty: FaultyProcess, tmp_path: Path, operation: str, mode: str, errno: int, words: str
) -> None:
    outcome = _transfer(faulty, tmp_path, operation, mode, after=2)
    assert outcome["error"]["errno"] == errno
    assert words in outcome["error"]["text"]
    assert outcome["seconds"] < 5
    assert outcome["fds"] == 0


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_drive_that_hangs_is_given_up_in_time(faulty: FaultyProcess, tmp_path: Path, operation: str) -> None:
    # With all blocks in flight, so that some end while others hang.
    outcome = _transfer(faulty, tmp_path, operation, "hang", after=2, depth=8)
    assert outcome["error"]["errno"] == 110
    assert "not complete after " in outcome["error"]["text"]
    assert outcome["seconds"] < 8


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("mode", ["short", "ragged", "eintr", "eagain"])
@pytest.mark.parametrize("depth", [1, 8])
def test_what_a_call_leaves_is_asked_for_again(
    faulty: FaultyProcess, tmp_path: Path, operation: str, mode: str, depth: int
) -> None:
    assert _transfer(faulty, tmp_path, operation, mode, depth=depth)["error"] is None


def test_no_space_at_creation_leaves_no_file(faulty: FaultyProcess, tmp_path: Path) -> None:
    path = tmp_path / "faulty.bin"
    outcome = faulty.ask(path=str(path), operation="create")
    assert outcome["errno"] == 28
    assert str(path) in outcome["text"] and f"{_NBYTES} are needed" in outcome["text"]
    assert not path.exists()
