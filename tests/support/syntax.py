"""Syntax trees of our own modules, and their statements."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

_HOLDERS = (ast.stmt, ast.ExceptHandler, ast.match_case)


@functools.cache
def parsed(file: Path) -> ast.Module:
    """The tree of a file of the package: rules of several modules of tests ask for it, and none changes it."""
    return ast.parse(file.read_text(), str(file))


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Every statement below a node, the outer ones first. Of expressions a module has ten times as many."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, _HOLDERS):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)
