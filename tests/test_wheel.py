"""The wheel: its name and metadata, the native libraries and sources it carries, and a build without a compiler."""

from __future__ import annotations

import email
import email.message
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import infinity
from infinity.ops import build as build_module
from tests.support import bare
from tests.support.bare import check_told
from tests.support.clock import usual_seconds
from tests.support.compilers import standing_in

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "infinity", "estimators", "csrc")
# Those of an accelerator where nvcc is at hand.
NAMES = build_module.NAMES if build_module._compiler("kernels") else build_module.HOST_NAMES
# The distribution's name is not the import name: `infinity` on the package index is another project.
DROP_IN = "deepspeed-0.19.8.dist-info/METADATA"
INFO = f"infinity_engine-{infinity.__version__}.dist-info"
LIBRARIES = {f"infinity/_native/lib{name}.so" for name in NAMES}

# With nvcc at hand and other tests beside it, a slow machine takes minutes.
BUILD_SECONDS_MAX = 400
pytestmark = [pytest.mark.slow, pytest.mark.timeout(BUILD_SECONDS_MAX + 60)]
# Ours promises a build within 15 s on two cores; CPU time does not depend on who else uses them.
BUILD_CPU_SECONDS_MAX = 30.0
# Needs no torch: the door to the libraries is plain Python, and so is everything up to the plan.
WITHOUT_TORCH = """
import ctypes, sys
sys.path.insert(0, sys.argv[1])
from infinity.ops import build
assert build.__file__.startswith(sys.argv[1])
told = build.native_report()
assert all(told[name].endswith("(wheel)") for name in build.HOST_NAMES), told
assert told["simd"] in ("scalar", "avx2", "avx512", "neon"), told
assert "torch" not in sys.modules
print(sys.version_info[:2], told["simd"])
"""
ADAM = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
import torch
from infinity.ops import build
from infinity.ops.adam import adam_step, split
from infinity.ops.rules import AdamHyper, Piece
assert build.__file__.startswith(sys.argv[1])
torch.manual_seed(0)
param, remainder = split(torch.randn(5000))
tensors = param, torch.randn(5000).bfloat16(), torch.zeros(5000), torch.zeros(5000)
hyper = AdamHyper(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, adamw=True)
for step in (1, 2, 3):
    adam_step([Piece(*tensors, remainder=remainder, hyper=hyper)], step=step, grad_scale=0.5)
digest = hashlib.sha256()
for tensor in (param.view(torch.int16), remainder, *tensors[2:]):
    digest.update(tensor.numpy().tobytes())
print(build.native_report()["adam"] == "Python fallback", digest.hexdigest())
"""


def other_pythons() -> list[str]:
    """Interpreters of the supported versions but this one, on the path or installed by pyenv, that really run."""
    wanted = [f"python3.{minor}" for minor in range(10, 14) if minor != sys.version_info.minor]
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = []
    for name in wanted:
        candidates = [shutil.which(name), *map(str, versions.glob(f"{name.removeprefix('python')}*/bin/{name}"))]
        found += [candidate for candidate in candidates if candidate and _runs(candidate)][:1]
    return found


def _runs(python: str) -> bool:
    """Whether an interpreter starts: one on the path may be a shim of a version that is not there."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def words_of(python: str, script: str, folder: Path, **environment: str) -> list[str]:
    """What a script prints that is run outside of the checkout, with an unpacked wheel as its argument."""
    reply = subprocess.run(
        [python, "-c", script, str(folder)], capture_output=True, text=True, cwd=folder, timeout=60, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), **environment},
    )  # fmt: skip
    assert reply.returncode == 0, reply.stderr
    return reply.stdout.split()


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
    subprocess.run([*command, str(checkout)], check=True, env={**os.environ, **environment}, timeout=BUILD_SECONDS_MAX)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module", params=["stand-in", pytest.param("compiler", marks=pytest.mark.matrix)])
def wheel(request, tmp_path_factory):
    """With the libraries that this checkout has; before a release, with newly compiled ones."""
    folder = tmp_path_factory.mktemp("wheel")
    return build(folder, **(standing_in(folder) if request.param == "stand-in" else {}))


@pytest.fixture(scope="module")
def bare_wheel(tmp_path_factory):
    """Built where there is no compiler."""
    return build(tmp_path_factory.mktemp("bare"), CXX="no-such-compiler")


def test_a_wheel_is_for_every_python_of_one_platform(wheel):
    assert wheel.name.startswith("infinity_engine-0.1.0-py3-none-")
    assert not wheel.name.endswith("-any.whl")


def test_a_wheel_carries_libraries_sources_and_packages_only(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {f"infinity/_csrc/{file.relative_to(ROOT / 'csrc')}" for file in (ROOT / "csrc").rglob("*.c*")}
    ours = {"infinity/py.typed", "infinity/observability/timeline.html", "infinity/engine/initialize.py"}
    # What `infinity run --as-deepspeed` puts on the path: clients look for the metadata too.
    drop_in = ("bin/deepspeed", "deepspeed/__init__.py", DROP_IN)
    ours |= {f"infinity/integrations/as_deepspeed/{name}" for name in drop_in}
    assert names >= LIBRARIES | sources | ours
    assert {name.partition("/")[0] for name in names} == {"infinity", "estimators", INFO}


def metadata(wheel: Path) -> email.message.Message:
    return email.message_from_bytes(zipfile.ZipFile(wheel).read(f"{INFO}/METADATA"))


def test_the_metadata_says_what_the_index_shows(wheel):
    told = metadata(wheel)
    assert (told["Name"], told["Version"]) == ("infinity-engine", infinity.__version__)
    assert (told["License-Expression"], told["License-File"]) == ("Apache-2.0", "LICENSE")
    assert told["Author"] == "The infinity authors"
    urls = dict(url.split(", ") for url in told.get_all("Project-URL"))
    assert urls.keys() == {"Source", "Documentation", "Changelog", "Issues"}
    # A checkout is the repository: what a URL names below it must be there.
    for url in urls.values():
        assert url.startswith(urls["Source"])
        assert (ROOT / url.partition("blob/main/")[2]).exists()
    assert {"Typing :: Typed", "Operating System :: POSIX :: Linux"} <= set(told.get_all("Classifier"))
    assert b"Apache License" in zipfile.ZipFile(wheel).read(f"{INFO}/licenses/LICENSE")


def test_the_description_has_absolute_links_to_files_of_the_tree(wheel):
    told = metadata(wheel)
    assert told["Description-Content-Type"] == "text/markdown"
    source = dict(url.split(", ") for url in told.get_all("Project-URL"))["Source"]
    page = str(told.get_payload())
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", page)
    assert len(links) > 10
    for picture, link in links:
        assert link.startswith(f"{source}/{'raw' if picture else 'blob'}/main/"), link
        assert (ROOT / link.split("/main/")[1].partition("#")[0]).is_file(), link
    assert "raw/main/docs/pictures/estimate.svg" in page


def test_an_installed_wheel_uses_the_libraries_that_it_carries(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    assert words_of(sys.executable, WITHOUT_TORCH, tmp_path)


def fresh_environment(folder: Path, requirements: list[Requirement]) -> Path:
    """The interpreter of a new environment that holds what pip would install for some requirements, and no more.

    Links to what is installed here take the place of downloads, which would be gigabytes.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in bare.closure(requirements):
        distribution = importlib.metadata.distribution(name)
        if distribution.files is None:
            pytest.skip(f"{name} does not say which files it has installed")
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return python


def test_a_wheel_without_extras_does_everything_in_a_fresh_environment(wheel, tmp_path):
    """pip finds each declared dependency there; then steps on NVMe, save, load, export and every command."""
    # Asked as a distribution: a search for the module makes setuptools hand distutils back to the
    # standard library in the whole process, and inductor then cannot import setuptools.
    if not list(importlib.metadata.distributions(name="pip")):
        pytest.skip("this Python has no pip")
    python = fresh_environment(tmp_path / "env", bare.declared())
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    outside |= {"PIP_CONFIG_FILE": os.devnull, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    for command in ([*pip, "install", "--quiet", "--no-index", str(wheel)], [*pip, "check"]):
        reply = subprocess.run(command, capture_output=True, text=True, env=outside, timeout=120, check=False)
        if "no such option: --python" in reply.stderr:
            pytest.skip("pip is older than 22.3 and cannot install into another environment")
        assert reply.returncode == 0, reply.stdout + reply.stderr
    script = shutil.copy(ROOT / "tests" / "support" / "bare_run.py", tmp_path)
    reply = subprocess.run(
        [python, script, str(tmp_path)], capture_output=True, text=True, env=outside, cwd=tmp_path, timeout=120,
        check=False,
    )  # fmt: skip
    told = check_told(reply)
    assert Path(told["from"]).is_relative_to(tmp_path / "env")
    # It bites: transformers is installed where tests run, and no declared dependency.
    assert set(told["refusals"]) == {"infinity.integrations.huggingface"}
    for name in ("infinity", "infinity-ckpt", "infinity-estimate", "infinity-export"):
        command = [python.with_name(name), "--help"]
        assert b"usage" in subprocess.run(command, check=True, capture_output=True, env=outside, timeout=60).stdout
    (tmp_path / "client.py").write_text(
        "import deepspeed, importlib.metadata as metadata\n"
        "print('SEES', metadata.version('deepspeed'), deepspeed.__infinity__)\n"
    )
    command = [python.with_name("infinity"), "run", "--as-deepspeed", "--nproc", "1", tmp_path / "client.py"]
    told = subprocess.run(command, check=True, capture_output=True, text=True, env=outside, timeout=120).stdout
    assert "SEES 0.19.8 0.1.0" in told


def test_one_wheel_serves_other_versions_of_python(wheel, tmp_path):
    pythons = other_pythons()
    if not pythons:
        pytest.skip("there is no other Python here")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    told = [words_of(python, WITHOUT_TORCH, tmp_path) for python in pythons]
    assert len({tuple(words[:2]) for words in told}) == len(pythons)


@pytest.mark.matrix
def test_a_wheel_without_libraries_gives_the_same_bits_without_a_compiler(wheel, bare_wheel, tmp_path):
    folders = [tmp_path / "native", tmp_path / "bare"]
    for archive, folder in zip((wheel, bare_wheel), folders, strict=True):
        zipfile.ZipFile(archive).extractall(folder)
    native, digest = words_of(sys.executable, ADAM, folders[0])
    fallback, fallback_digest = words_of(sys.executable, ADAM, folders[1], CXX="no-such-compiler")
    assert (native, fallback) == ("False", "True")
    assert fallback_digest == digest


@pytest.mark.matrix
def test_the_native_build_takes_seconds_without_a_cuda_compiler(tmp_path):
    with usual_seconds(children=True) as taken:
        subprocess.run(
            [sys.executable, "-m", "infinity.ops.build", str(tmp_path)],
            check=True, cwd=ROOT, timeout=BUILD_SECONDS_MAX, env={**os.environ, "NVCC": "no-such-compiler"},
        )  # fmt: skip
    assert taken.seconds <= BUILD_CPU_SECONDS_MAX
    assert {file.name for file in tmp_path.iterdir()} == {f"lib{name}.so" for name in NAMES if name != "kernels"}


@pytest.mark.matrix
def test_a_wheel_can_be_built_without_a_compiler(bare_wheel):
    names = set(zipfile.ZipFile(bare_wheel).namelist())
    assert not any(name.startswith("infinity/_native") for name in names)
    assert "infinity/_csrc/adam/abi.cpp" in names
