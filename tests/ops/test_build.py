"""Native libraries are built once, found again, and done without where there is no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.ops import build

_ROOT = Path(__file__).parents[2]
_STEP = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import torch
from infinity.ops import aio, adam, build
one = [torch.ones(5) for _ in range(4)]
hyper = adam.AdamHyper(0.1, 0.9, 0.999, 1e-8, 0.0, adamw=True)
adam.adam_step([adam.Piece(*one, hyper=hyper)], step=1, grad_scale=1.0)
queue = aio.Queue()
print(adam.simd(), queue.backend, float(one[0][0]))
print(build.describe())
queue.close()
"""

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="needs a C++ compiler")


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=110, check=False)


def test_without_native_code_the_twins_run() -> None:
    reply = _run([sys.executable, "-c", _STEP], INFINITY_NATIVE="0")
    assert reply.stdout.startswith("reference python 0.96837"), reply.stderr
    assert "WARNING" not in reply.stderr


def test_without_a_compiler_one_warning_says_so(tmp_path: Path) -> None:
    reply = _run([sys.executable, "-c", _STEP], CXX="no-such-compiler", XDG_CACHE_HOME=str(tmp_path))
    assert reply.stdout.startswith("reference python 0.96837"), reply.stderr
    assert reply.stderr.count("WARNING") == 1
    assert "Install a C++17 compiler" in reply.stderr


@needs_compiler
def test_ranks_that_start_together_build_once(tmp_path: Path) -> None:
    script = "from infinity.ops import build; build.require('aio'); print(build.describe()['aio'])"
    settings = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", script]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) for _ in range(3)]
    replies = {rank.communicate(timeout=110)[0] for rank in ranks}
    assert len(replies) == 1 and str(tmp_path) in replies.pop()
    files = sorted(path.name for path in (tmp_path / "infinity" / "native").iterdir())
    # describe() builds the other library too; nothing else is left behind.
    assert [name.partition("-")[0] for name in files if name.endswith(".so")] == ["libadam", "libaio"]
    assert len(files) == 4


@needs_compiler
def test_every_library_is_built_into_a_folder_without_warnings(tmp_path: Path) -> None:
    reply = _run([sys.executable, "-m", "infinity.ops.build", str(tmp_path)])
    assert reply.returncode == 0 and "warning" not in reply.stdout + reply.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["libadam.so", "libaio.so"]


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ValueError, match="there are aio, adam"):
        build.load("kernels")
