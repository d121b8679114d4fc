"""Native libraries are built once, found again, and done without where there is no compiler."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from infinity.ops import build
from tests.support.compilers import standing_in

_ROOT = Path(__file__).parents[2]
_STEP = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import torch
from infinity.ops import adam, aio, build, rules
one = [torch.ones(5) for _ in range(4)]
hyper = rules.AdamHyper(0.1, 0.9, 0.999, 1e-8, 0.0, adamw=True)
adam.adam_step([rules.Piece(*one, hyper=hyper)], step=1, grad_scale=1.0)
queue = aio.Queue()
print(adam.simd(), queue.backend, float(one[0][0]))
print(build.native_report())
queue.close()
"""

needs_compiler = pytest.mark.skipif(build._compiler() is None, reason="needs a C++ compiler")


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    settings = {**os.environ, "PYTHONPATH": str(_ROOT), **environment}
    return subprocess.run(command, capture_output=True, text=True, env=settings, timeout=220, check=False)


def test_without_native_code_the_fallbacks_run() -> None:
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
    script = "from infinity.ops import build; build.require('aio'); print(build.native_report()['aio'])"
    settings = {**os.environ, "PYTHONPATH": str(_ROOT), "XDG_CACHE_HOME": str(tmp_path), **standing_in(tmp_path)}
    command = [sys.executable, "-c", script]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=settings) for _ in range(3)]
    replies = {rank.communicate(timeout=220)[0] for rank in ranks}
    assert len(replies) == 1 and str(tmp_path) in replies.pop()
    files = sorted(path.name for path in (tmp_path / "infinity" / "native").iterdir())
    # describe() builds the other library too; nothing else is left behind.
    assert [name.partition("-")[0] for name in files if name.endswith(".so")] == ["libadam", "libaio"]
    assert len(files) == 4
    assert sorted((tmp_path / "linked").read_text().split()) == ["adam", "aio"]


def _fake_nvcc(folder: Path, body: str) -> str:
    path = folder / "nvcc"
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(0o755)
    return str(path)


@needs_compiler
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.matrix)])
def test_libraries_are_built_and_kernels_that_fail_cost_them_nothing(compiled: bool, tmp_path: Path) -> None:
    nvcc = _fake_nvcc(tmp_path, "echo unsupported GNU version >&2; exit 1\n")
    out = tmp_path / "out"
    cxx = {} if compiled else standing_in(tmp_path)
    reply = _run([sys.executable, "-m", "infinity.ops.build", str(out)], **{**cxx, "NVCC": nvcc})
    assert reply.returncode == 0, reply.stderr
    assert sorted(path.name for path in out.iterdir()) == ["libadam.so", "libaio.so"]


@needs_compiler
@pytest.mark.parametrize("name", build.HOST_NAMES)
def test_the_sources_give_no_warning(name: str) -> None:
    files = sorted((_ROOT / "csrc" / name).glob("*.cpp"))
    command = [*shlex.split(build._compiler() or ""), *build._CXX_FLAGS, "-O0", "-Werror", "-fsyntax-only"]
    reply = _run([*command, *map(str, files)])
    assert reply.returncode == 0, reply.stderr


def test_without_a_device_nvcc_is_never_asked_for_anything(tmp_path: Path) -> None:
    told = tmp_path / "told"
    nvcc = _fake_nvcc(tmp_path, f"echo called >> {told}\n")
    reply = _run([sys.executable, "-c", _STEP], NVCC=nvcc)
    assert reply.returncode == 0 and not told.exists()
    assert "kernels" not in reply.stdout and "CUDA" not in reply.stderr


@needs_compiler
def test_a_device_without_nvcc_gets_the_fallback_and_one_line() -> None:
    script = """
import logging
logging.basicConfig(format="%(levelname)s %(message)s")
import torch
from infinity.ops import build, kernels
device = torch.device("cuda", 0)
print(kernels.available(device), kernels.available(device), build.native_report(cuda=True)["kernels"])
"""
    reply = _run([sys.executable, "-c", script], NVCC="no-such-compiler")
    assert reply.stdout == "False False Python fallback\n", reply.stderr
    assert reply.stderr.count("WARNING") == 1 and "no nvcc: install the CUDA toolkit" in reply.stderr
    silent = _run([sys.executable, "-c", script], NVCC="no-such-compiler", INFINITY_NATIVE="0")
    assert silent.stdout == "False False Python fallback\n" and "WARNING" not in silent.stderr


def test_the_toolkit_that_the_user_names_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    homes = {name: tmp_path / name / "bin" for name in ("named", "home", "path")}
    for folder in homes.values():
        folder.mkdir(parents=True)
    nvcc = {name: _fake_nvcc(folder, "") for name, folder in homes.items()}
    monkeypatch.setenv("PATH", str(homes["path"]))
    for variable in ("NVCC", "CUDA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert build._compiler("kernels") == nvcc["path"]
    monkeypatch.setenv("CUDA_HOME", str(homes["home"].parent))
    assert build._compiler("kernels") == nvcc["home"]
    monkeypatch.setenv("NVCC", nvcc["named"])
    assert build._compiler("kernels") == nvcc["named"]


def test_what_kernels_are_made_of_is_part_of_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic lies in another folder: an edit there must be seen, too."""
    sources = {name: tmp_path / "csrc" / name for name in ("adam", "kernels")}
    for folder in sources.values():
        folder.mkdir(parents=True)
    made: list[str] = []
    monkeypatch.setenv("NVCC", _fake_nvcc(tmp_path, "echo release 1\n"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_compile", lambda name, sources, target, compiler: made.append(target.name))
    for text in ("one", "two", "two"):
        (sources["adam"] / "arithmetic.inl").write_text(text)
        build._cached("kernels", sources["kernels"])
    assert len(set(made)) == 2 and made[1] == made[2]
    (sources["adam"] / "pool.cpp").write_text("what kernels do not include")
    assert build._cached("kernels", sources["kernels"]).name == made[1]


def test_an_unknown_library_is_refused() -> None:
    with pytest.raises(ValueError, match="there are aio, adam, kernels"):
        build.load("gemm")
