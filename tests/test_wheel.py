"""The wheel carries the native libraries, their sources and a platform tag, and can be built without a compiler."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from infinity.ops import build as build_module

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "infinity", "estimators", "csrc")
# Those of an accelerator where nvcc is at hand.
NAMES = build_module.NAMES if build_module._compiler("kernels") else build_module.HOST_NAMES
LIBRARIES = {f"infinity/_native/lib{name}.so" for name in NAMES}

pytestmark = pytest.mark.slow


def build(folder: Path, **environment: str) -> Path:
    """The wheel of a copy of the sources, so that nothing is written into this checkout."""
    checkout = folder / "checkout"
    checkout.mkdir()
    for name in SOURCES:
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "_native"))
        else:
            shutil.copy(origin, checkout / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(checkout)], check=True, env={**os.environ, **environment}, timeout=110)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build(tmp_path_factory.mktemp("wheel"))


def test_a_wheel_is_for_every_python_of_one_platform(wheel):
    assert wheel.name.startswith("infinity-0.1.0-py3-none-")
    assert not wheel.name.endswith("-any.whl")


def test_a_wheel_carries_libraries_sources_and_packages_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"infinity/_csrc/{file.relative_to(ROOT / 'csrc')}" for file in (ROOT / "csrc").rglob("*.c*")}
    assert names >= LIBRARIES | sources | {"infinity/py.typed", "infinity/api.py", "estimators/cli.py"}
    assert {name.partition("/")[0] for name in names} == {"infinity", "estimators", "infinity-0.1.0.dist-info"}


def test_an_installed_wheel_uses_the_libraries_that_it_carries(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from infinity.ops import build\n"
        "assert build.__file__.startswith(sys.argv[1])\n"
        "for name, told in build.describe().items():\n"
        "    if name in build.NAMES: assert told.endswith('(wheel)'), told\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, cwd=tmp_path, timeout=60)


def test_a_wheel_can_be_built_without_a_compiler(tmp_path):
    names = set(zipfile.ZipFile(build(tmp_path, CXX="no-such-compiler")).namelist())
    assert not any(name.startswith("infinity/_native") for name in names)
    assert "infinity/_csrc/adam/abi.cpp" in names
