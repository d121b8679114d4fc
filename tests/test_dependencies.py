"""What infinity imports is what pyproject.toml declares, and nothing more is needed to train, save, load and export."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tests.support import bare
from tests.support.bare import EXTRA, check_told
from tests.support.syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("infinity", "estimators", "examples", "benchmarks", "tests", "docs")
# Programs that are run beside ours for comparison, in an environment of their own.
RIVALS = {"deepspeed"}


def run_bare(folder: Path, *words: str, extras: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    options = [word for extra in extras for word in ("--extra", extra)]
    return subprocess.run(
        [sys.executable, "-m", "tests.support.bare", *options, *words], capture_output=True, text=True, cwd=ROOT,
        timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT), "MPLCONFIGDIR": str(folder)}, check=False,
    )  # fmt: skip


@pytest.mark.matrix
def test_declared_dependencies_are_enough_for_everything_without_an_extra(tmp_path):
    """As test_wheel.py shows of a wheel in a fresh environment, here of the checkout beside distributions that hide."""
    told = check_told(run_bare(tmp_path, "tests/support/bare_run.py", str(tmp_path)))
    assert told["from"] == str(ROOT / "infinity" / "__init__.py")
    # It bites: transformers is installed where tests run, and no declared dependency.
    assert set(told["refusals"]) == {"infinity.integrations.huggingface"}


@pytest.mark.matrix
def test_the_demo_needs_only_what_its_extra_declares(tmp_path):
    small = "--dim 32 --layers 2 --heads 2 --seq 32 --steps 3".split()
    words = ["examples/train_lm.py", *small, "--run-dir", str(tmp_path / "run"), "--nvme-path", str(tmp_path / "drive")]
    reply = run_bare(tmp_path, *words, extras=("examples",))
    assert reply.returncode == 0, reply.stderr[-3000:]
    assert (tmp_path / "run" / "loss_and_memory.png").stat().st_size > 10_000


@pytest.mark.matrix
def test_a_distribution_that_is_not_declared_is_not_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib.util, importlib.metadata as metadata\n"
        "assert importlib.util.find_spec('pytest') is None\n"
        "assert 'pytest' not in {each.metadata['Name'] for each in metadata.distributions()}\n"
        "import numpy\n"
        "import pytest\n"
    )
    reply = run_bare(tmp_path, str(script))
    assert reply.returncode == 1
    assert reply.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'pytest'"


def imports(file: Path) -> Iterator[str]:
    """Top-level names that a file imports, wherever it does, by `importlib.import_module` as well."""
    walk = ast.walk if "import_module" in file.read_text() else statements
    for node in walk(parsed(file) if file.is_relative_to(ROOT / "infinity") else ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            (name, *_) = node.args
            if isinstance(name, ast.Constant):
                yield str(name.value).partition(".")[0]


@functools.cache
def provided(*extras: str) -> set[str]:
    """Top-level modules of the requirements themselves: what they depend on is nobody's to import."""
    names = set()
    for requirement in bare.declared(*extras, everywhere=True):
        try:
            names |= bare.modules_of(metadata.distribution(requirement.name))
        except metadata.PackageNotFoundError:
            # An extra that is not installed here; most are imported by their own name.
            names.add(bare.canonical(requirement.name).replace("-", "_"))
    return names


def undeclared(folder: str) -> Iterator[str]:
    """Imports of a folder that nothing declares for it."""
    extras = {
        "examples": ("examples",), "benchmarks": ("dev", "examples"), "docs": ("docs",),
        "tests": ("dev", "examples", "tensorboard", "liger"),
    }  # fmt: skip
    known = {*sys.stdlib_module_names, *FOLDERS, *provided(*extras.get(folder, ()))}
    if folder in ("benchmarks", "examples"):
        # Scripts, which find what lies beside them; an example may be written for DeepSpeed.
        known |= RIVALS | {each.stem for each in (ROOT / folder).glob("*")}
    if folder == "tests":
        # What makes a rival's files, in an environment of its own; and the names that a client's script imports.
        known |= RIVALS
    for file in sorted((ROOT / folder).rglob("*.py")):
        named = provided(*EXTRA.findall(file.read_text())) if folder == "infinity" else set()
        yield from (f"{file.relative_to(ROOT)}: {name}" for name in imports(file) if name not in known | named)


@pytest.mark.parametrize("folder", FOLDERS)
def test_every_import_is_declared_or_beside_an_error_that_names_its_extra(folder):
    assert list(undeclared(folder)) == []


def test_every_extra_that_an_error_names_exists():
    extras = bare.project()["optional-dependencies"]
    files = [file for folder in ("infinity", "estimators") for file in (ROOT / folder).rglob("*.py")]
    named = {extra for file in files for extra in EXTRA.findall(file.read_text())}
    assert named
    assert named <= set(extras)
