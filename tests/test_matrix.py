"""The table of matrices misses nothing: tests that are marked, modules that run by themselves, packages."""

from __future__ import annotations

import re

import pytest

from tests.matrix import ROOT, ROWS, main, rows_for

# Modules that a row or a test starts, and tools that print.
OTHERS = ("_process", "_cells", "run", "structure", "first_run", "watched", "deepspeed_pipeline", "pipeline_divergence")


def test_every_marked_test_has_a_row_and_every_row_marked_tests() -> None:
    marked = re.compile(r"mark\.matrix|\bkept\(|\bcovered\(")
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if marked.search(path.read_text())]
    folders = {str(path.relative_to(ROOT).parent) for path in files if path.parent.name not in ("tests", "support")}
    beside = {str(path.relative_to(ROOT)) for path in files if path.parent.name == "tests"} - {"tests/test_matrix.py"}
    assert {row.name for row in ROWS if "/" in row.name} == folders | beside


def test_every_module_that_runs_by_itself_has_a_row() -> None:
    modules = {
        str(path.relative_to(ROOT).with_suffix("")).replace("/", ".").removesuffix(".__main__")
        for path in (ROOT / "tests").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text() and not {"support", "data"} & {*path.parts}
        if not path.name.startswith(("test_", "matrix")) and not path.stem.endswith(OTHERS)
    }
    assert {row.name for row in ROWS if "/" not in row.name} == modules


def test_a_change_of_any_package_leads_to_a_matrix() -> None:
    for package in (ROOT / "infinity").glob("*/__init__.py"):
        assert rows_for([str(package.relative_to(ROOT))]), package


def test_the_rows_of_a_file_are_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["matrix", "--for", "infinity/tiling/losses.py"])
    assert main() == 0
    assert capsys.readouterr().out.split()[:2] == ["tests/tiling", "tests/zero"]
    monkeypatch.setattr("sys.argv", ["matrix", "tests.sooak"])
    with pytest.raises(SystemExit):
        main()
    assert "tests.sooak: no such row" in capsys.readouterr().err
