"""The engine on the simulated accelerator: cells of `tests.accelerator_matrix`, and engines with a missing wait.

A cell holds that the hash is the CPU's, that no two accesses to memory are without an edge, and that the host does not
touch device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import infinity
from infinity.base.transfer import Completed
from infinity.memory.tiers.device import Accelerator, StreamTransfer
from infinity.zero.unit import PartitionCopy
from tests.accelerator_matrix import Cell, Matrix, PlainCase, product, run_on_accelerator
from tests.support import accelerator
from tests.support.accelerator.process import require
from tests.support.cells import kept
from tests.support.oracle import CLIP, Access

DELAYS = accelerator.Delays(copy=0.002, event=0.002, operator=0.00002)
CELLS = (
    Cell("fp32", 1, 0.0, 1, 0, "gpu", "gpu", seed=1),
    Cell("bf16", 2, CLIP, 1, 1, "gpu", "nvme", 0.5, seed=2),
    Cell("fp16", 1, CLIP, 1, 2, "gpu", "cpu", 0.5, seed=3),
    Cell("fp32", 2, CLIP, 1, 3, "gpu", "nvme", gradients="nvme", seed=4),
    Cell("bf16", 1, CLIP, 1, 3, "cpu", "cpu", 0.5, seed=5),
    Cell("fp16", 2, 0.0, 1, 3, "nvme", "gpu", seed=6),
    Cell("fp32", 1, 0.0, 1, 3, "nvme", "nvme", gradients="nvme", seed=7),
    Cell("bf16", 2, 0.0, 2, 0, "gpu", "cpu", seed=8),
    Cell("fp16", 1, 0.0, 2, 1, "gpu", "gpu", seed=9),
    Cell("fp32", 2, CLIP, 2, 2, "gpu", "nvme", gradients="nvme", seed=10, own_collectives=True),
    Cell("bf16", 2, CLIP, 2, 3, "cpu", "nvme", seed=11),
    Cell("fp16", 1, 0.0, 2, 3, "nvme", "cpu", 0.5, seed=12),
)
DELAYED = [replace(cell, delays=DELAYS) for cell in CELLS]


@pytest.fixture(scope="module")
def matrix() -> Iterator[Matrix]:
    """The processes of this file's tests."""
    require()
    with Matrix() as matrix:
        yield matrix


@pytest.mark.parametrize("cell", kept(DELAYED, DELAYED[1::2]), ids=str)
def test_a_cell_has_the_hash_of_the_cpu_and_no_race(matrix: Matrix, cell: Cell) -> None:
    assert matrix.run(cell).why == ""


class ReadsStates(PlainCase):
    """Reads every weight while copies to the device still hold partitions."""

    def before_step(self, call: Any, micro: int, access: Access) -> list[Tensor]:
        return [infinity.state(param).master for param in call.module.parameters()]


def test_weights_are_read_between_backward_and_step(matrix: Matrix) -> None:
    cell = Cell("bf16", 1, CLIP, 1, 3, "nvme", "nvme", seed=6, delays=replace(DELAYS, copy=0.02))
    assert matrix.run(cell, partial(run_on_accelerator, case=ReadsStates())).why == ""


def _does_nothing(*_: object) -> None:
    pass


def _is_over(_: object) -> Completed:
    return Completed()


def _returns_early(self: PartitionCopy, *, wait: bool) -> bool:
    self.close()
    return True


# Engines by what they do wrong: what of them is replaced by what, and a placement (parameters, optimizer) to show it.
MUTANTS: dict[str, tuple[type, str, Callable[..., Any], tuple[str, str]]] = {
    "does not wait for gradients to arrive in CPU memory": (Accelerator, "arrived", _does_nothing, ("cpu", "cpu")),
    "does not wait for parameters to arrive on the device": (StreamTransfer, "wait", _does_nothing, ("cpu", "gpu")),
    "uses whole parameters that are being stepped": (PartitionCopy, "await_step", _is_over, ("gpu", "cpu")),
    "returns partitions that are still copied from": (PartitionCopy, "release_lease", _returns_early, ("nvme", "cpu")),
}


def run_mutant(rank: int, world: int, cell: Cell, *, name: str) -> tuple[str, list[str]]:
    """Run a cell by a broken engine."""
    owner, attribute, broken, _ = MUTANTS[name]
    with mock.patch.object(owner, attribute, broken):
        return run_on_accelerator(rank, world, cell)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_checker_names_what_a_missing_wait_leaves_unordered(matrix: Matrix, name: str) -> None:
    param, optimizer = MUTANTS[name][-1]
    cell = Cell("bf16", 1, CLIP, 1, 3, param, optimizer, seed=3, delays=replace(DELAYS, copy=0.005))
    assert matrix.run(cell, partial(run_mutant, name=name)).races > 0


def test_the_product_has_every_placement_of_every_setting() -> None:
    cells = product()
    settings = {cell.setting for cell in cells}
    assert len(cells) == len(set(cells)) == 1008 and len(settings) == 4 * 3 * 2 * 2 * 2
    for setting in settings:
        own = [cell for cell in cells if cell.setting == setting and cell.ratio == 1 and cell.gradients == "cpu"]
        placements = [cell.placement for cell in own]
        assert len(placements) == (9 if setting[0] == 3 else 3)
