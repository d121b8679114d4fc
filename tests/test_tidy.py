"""The house rules that a reader feels: short files and functions, docstrings, no left-overs.

Each rule is a function from a root folder to violations, and a planted violation shows that the rule bites.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.syntax import parsed, statements

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("infinity", "estimators")
PYTHON = (*PACKAGES, "examples", "benchmarks", "tests")
NATIVE = (".cpp", ".h", ".inl", ".cu", ".cuh")
TEXT = (".py", ".toml", ".txt", ".md", ".json", *NATIVE)

FUNCTION_LINES = 60
# Functions that are longer for a reason that is written here.
LONG_FUNCTIONS: dict[str, str] = {}
# Packages within packages, which the architecture names.
DEEP = ("infinity/memory/tiers/", "infinity/checkpoint/deepspeed/")
# Laid out and named as another project is.
FOREIGN = ("infinity/integrations/deepspeed/", "infinity/integrations/as_deepspeed/")
# Modules that print because they are command lines.
PRINTING = ("infinity/ops/build.py", "infinity/cli/terminal.py")

_BANNER = re.compile(r"^\s*(#|//)\s*([-=*#~_─]\s*){4,}|([-=*#~─])\3{5,}\s*$")
# Written in two parts, so that this file does not report itself.
_LEFT_OVER = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b")
# An absolute path of two parts, unless it begins with a folder (or a control group) that every machine may have.
_MACHINE_PATH = re.compile(r"(?<![\w./~:>)}*-])/(?!(?:bin|dev|docker|etc|proc|sys|tmp|usr)/)[A-Za-z]\w*/\w")
# What comments are that may be code. Most files have none, and are not read any further for them.
_CODE = r"(?:import |from |return |del |self\.|[\w.]+\(.*\)\s*$|[\w.]+ [-+*/]?= )"
_COMMENTED = re.compile(rf"#[^\S\n]*{_CODE}", re.M)
_RELATIVE = re.compile(r"\bfrom[\s\\]*\.")


def files(root: Path, folders: tuple[str, ...], suffixes: tuple[str, ...] = (".py",)) -> Iterator[tuple[str, Path]]:
    """Files below the folders, with their names relative to the root."""
    for folder in folders:
        for file in sorted((root / folder).rglob("*")):
            # What programs have written (checkpoints of old versions) is no text of ours.
            written = file.is_relative_to(root / "tests" / "data" / "checkpoints")
            if file.suffix in suffixes and file.is_file() and "__pycache__" not in file.parts and not written:
                yield file.relative_to(root).as_posix(), file


def long_functions(root: Path) -> Iterator[str]:
    """Functions that do not fit a screen."""
    for name, file in files(root, PYTHON):
        for node in statements(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = (node.end_lineno or node.lineno) - node.lineno + 1
                if count >= FUNCTION_LINES and f"{name}:{node.name}" not in LONG_FUNCTIONS:
                    yield f"{name}:{node.name}: {count} lines"


def drawers(root: Path) -> Iterator[str]:
    """Modules whose name says nothing, and folders that are too deep."""
    for name, file in files(root, PACKAGES):
        if name.startswith(FOREIGN):
            continue
        if file.stem in ("utils", "util", "misc", "common"):
            yield f"{name}: the name says nothing"
        deep = 4 if name.startswith(DEEP) else 3
        if len(Path(name).parts) > deep:
            yield f"{name}: more than {deep - 1} levels deep"


def banners(root: Path) -> Iterator[str]:
    """Comments that are drawn instead of written."""
    for name, file in files(root, (*PYTHON, "csrc"), (".py", *NATIVE)):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            comment = line.lstrip().startswith(("#", "//"))
            if comment and _BANNER.search(line):
                yield f"{name}:{number}: {line.strip()}"


def left_overs(root: Path) -> Iterator[str]:
    """Notes to oneself."""
    for name, file in files(root, (*PYTHON, "csrc", "docs"), TEXT):
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if _LEFT_OVER.search(line):
                yield f"{name}:{number}: {line.strip()}"


def machine_paths(root: Path) -> Iterator[str]:
    """Absolute paths that exist on one machine only."""
    top = [(file.name, file) for file in sorted(root.glob("*")) if file.suffix in TEXT or file.name == "Makefile"]
    for name, file in [*top, *files(root, (*PYTHON, "csrc", "docs"), TEXT)]:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            if _MACHINE_PATH.search(line):
                yield f"{name}:{number}: {line.strip()}"


def prints(root: Path) -> Iterator[str]:
    """Calls of print in the engine, which has a logger."""
    for name, file in files(root, ("infinity",)):
        if name in PRINTING or file.name in ("__main__.py", "cli.py"):
            continue
        for node in ast.walk(parsed(file)) if "print" in file.read_text() else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{name}:{node.lineno}: print"


def undocumented(root: Path) -> Iterator[str]:
    """Modules, and public classes and functions of a module, without a docstring."""
    for name, file in files(root, PACKAGES):
        tree = parsed(file)
        if not ast.get_docstring(tree):
            yield f"{name}: the module"
        for node in tree.body:
            public = isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
            if public and not ast.get_docstring(node):
                yield f"{name}:{node.lineno}: {node.name}"


def relative_imports(root: Path) -> Iterator[str]:
    """Imports that depend on where a file lies."""
    for name, file in files(root, PYTHON):
        text = file.read_text()
        for node in statements(ast.parse(text)) if _RELATIVE.search(text) else ():
            if isinstance(node, ast.ImportFrom) and node.level:
                yield f"{name}:{node.lineno}: relative import"


def dead_code(root: Path) -> Iterator[str]:
    """Commented-out Python: a comment that parses as an assignment, a call, an import or a definition."""
    for name, file in files(root, PYTHON):
        text = file.read_text()
        for token in tokenize.generate_tokens(io.StringIO(text).readline) if _COMMENTED.search(text) else ():
            if token.type == tokenize.COMMENT and _is_code(token.string.lstrip("#").strip()):
                yield f"{name}:{token.start[0]}: {token.string}"


def _is_code(text: str) -> bool:
    if not re.match(_CODE, text):
        return False
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


RULES: tuple[Callable[[Path], Iterator[str]], ...] = (
    long_functions, drawers, banners, left_overs, machine_paths, prints, undocumented, relative_imports,
    dead_code,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_is_tidy(rule):
    assert list(rule(ROOT)) == []


DOCUMENTED = '"""A module."""\n'
PLANTED = {
    "a long function": (long_functions, "infinity/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES),
    "a drawer": (drawers, "infinity/plan/utils.py", DOCUMENTED),
    "too deep": (drawers, "infinity/plan/tree/a.py", DOCUMENTED),
    "too deep in a package of one": (drawers, "infinity/memory/tiers/tree/a.py", DOCUMENTED),
    "a banner": (banners, "infinity/a.py", "# ---- setup ----\n"),
    "a ruler": (banners, "infinity/a.py", "#" * 60 + "\n"),
    "a banner in C++": (banners, "csrc/adam/a.cpp", "// ======\n"),
    "a note to oneself": (left_overs, "infinity/a.py", "# TO" + "DO: later\n"),
    "a path of one machine": (machine_paths, "docs/a.md", "see /ho" + "me/me/model\n"),
    "a path in a configuration": (machine_paths, "examples/a.json", '{"nvme_path": "/mn' + 't/drive"}\n'),
    "a print": (prints, "infinity/a.py", "print('x')\n"),
    "a module without a docstring": (undocumented, "infinity/a.py", "x = 1\n"),
    "a class without a docstring": (undocumented, "estimators/a.py", DOCUMENTED + "class A:\n    x = 1\n"),
    "a function without a docstring": (undocumented, "infinity/a.py", DOCUMENTED + "def f():\n    return 1\n"),
    "a relative import": (relative_imports, "tests/a.py", "from . import b\n"),
    "dead code": (dead_code, "infinity/a.py", "# x = compute(1)\n"),
    "a dead import": (dead_code, "infinity/a.py", "y = 1  # import os\n"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_violation_is_found(case, tmp_path):
    rule, name, text = PLANTED[case]
    file = tmp_path / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    assert list(rule(tmp_path))


def test_a_tidy_file_is_not_reported(tmp_path):
    file = tmp_path / "infinity" / "plan" / "a.py"
    file.parent.mkdir(parents=True)
    function = 'def f() -> int:\n    """One."""\n    # Why: a - b == c (see above).\n    return 1\n'
    file.write_text(DOCUMENTED + "\n\n" + function)
    assert [found for rule in RULES for found in rule(tmp_path)] == []
