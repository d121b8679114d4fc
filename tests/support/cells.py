"""Cells of a matrix: a few of them in the suite, all of them in `python -m tests.matrix`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

Cell = TypeVar("Cell")


def cover(cells: Sequence[Cell], values: Callable[[Cell], Sequence[object]]) -> list[Cell]:
    """Return few of the cells that together have every pair of values that two axes take in any of them."""
    pairs = [set(itertools.combinations(enumerate(values(cell)), 2)) for cell in cells]
    left, chosen = set[object]().union(*pairs), list[Cell]()
    while left:
        best = max(range(len(cells)), key=lambda at: len(pairs[at] & left))
        left -= pairs[best]
        chosen.append(cells[best])
    return chosen


def turns(**axes: Sequence[Any]) -> tuple[str, list[ParameterSet]]:
    """Return the arguments of `parametrize` for all cells of a product. The suite has each value of the longest axis
    once, beside those of the other axes in turn.
    """
    product, count = list(itertools.product(*axes.values())), max(map(len, axes.values()))
    chosen = [tuple(values[at % len(values)] for values in axes.values()) for at in range(count)]
    return ",".join(axes), kept(product, chosen)


def covered(**axes: Sequence[Any]) -> tuple[str, list[ParameterSet]]:
    """Return the arguments of `parametrize` for all cells of a product, of which a cover stays in the suite."""
    product = list(itertools.product(*axes.values()))
    return ",".join(axes), kept(product, cover(product, lambda cell: cell))


def kept(cells: Sequence[Any], suite: Sequence[Any]) -> list[ParameterSet]:
    """Return all cells as parameters of a test; those that are not the suite's are marked `matrix`.

    suite: cells; a single value may stand for a cell of one.
    """
    return [
        pytest.param(
            *(cell if isinstance(cell, tuple) else (cell,)), marks=() if cell in suite else pytest.mark.matrix
        )
        for cell in cells
    ]
