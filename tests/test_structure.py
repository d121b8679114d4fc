"""The numbers of the structure hold: a change that makes the code harder to live in says so here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import astray, mutants
from tests.structure import PAIRS, fan_out, foreign, largest, named_twice, old_names, sources
from tests.support.syntax import parsed

ROOT = Path(__file__).resolve().parents[1]
# Only `__init__`, `__main__`, `errors` and `log`.
# Four, and the door to DeepSpeed's names.
LOOSE_MAX = 5
ATTRIBUTES_MAX = 15
FAN_OUT_MAX = 30


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return {path: parsed(path) for path in sources(ROOT)}


def test_the_package_has_no_loose_modules() -> None:
    assert len(list(ROOT.glob("infinity/*.py"))) <= LOOSE_MAX


def test_no_class_has_too_many_attributes(trees: dict[Path, ast.Module]) -> None:
    assert [(n, name) for n, name in largest(trees) if n > ATTRIBUTES_MAX] == []


def test_no_module_imports_too_many_others(trees: dict[Path, ast.Module]) -> None:
    found = {str(path.relative_to(ROOT)): fan_out(tree) for path, tree in trees.items()}
    assert {name: n for name, n in found.items() if n > FAN_OUT_MAX} == {}


def test_objects_assign_their_own_attributes(trees: dict[Path, ast.Module]) -> None:
    found = [f"{path.relative_to(ROOT)}:{where}" for path, tree in trees.items() for where in foreign(tree)]
    assert found == []


def test_a_public_name_has_one_meaning(trees: dict[Path, ast.Module]) -> None:
    assert named_twice(trees) == []
    defined = [node.name for tree in trees.values() for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [name for name in PAIRS if defined.count(name) < 2] == [], "no pair any more"


def test_no_name_of_the_old_vocabulary_comes_back() -> None:
    named = (old_names(str(path.relative_to(ROOT)), path.read_text()) for path in sources(ROOT))
    assert [where for wheres in named for where in wheres] == []


def test_every_planted_fault_has_its_place_and_its_tests() -> None:
    """A row of tests/data/mutants.tsv moves with its text: widen or mend what no longer stands there exactly once."""
    assert list(astray(mutants())) == []
