"""A step by any table has the bits of a sequential one, its messages have the forms that were sent, and its bubble is
the planned one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.process_groups import ProcessGroups, detect
from infinity.errors import ConfigError, StateError
from infinity.parallel.executor import PipelineExecutor
from infinity.plan.pipeline import Action, Tables, forward_tables, make_tables
from infinity.plan.topology import Topology
from tests.parallel.stages import AffineStages, in_sequence, length_of, links_of
from tests.pipeline_tables import Cell, cells


def all_tables(pp: int) -> Iterator[tuple[Cell, Tables]]:
    for cell in cells((pp,), range(1, 10), (1, 2, 3)):
        try:
            yield cell, make_tables(*cell)
        except ConfigError:
            continue
    for m in (1, 4, 9):
        for virtual in (1, 2, 3):
            yield ("forward", pp, m, virtual), forward_tables(pp, m, virtual)


def run_all(rank: int, world: int, keyed: bool) -> list[tuple[Cell, str]]:
    """The cells in which this rank's losses, gradients or order of actions are not the expected ones."""
    torch.set_num_threads(1)
    groups = ProcessGroups(detect(), Topology(pp=world, local_size=world), timeout_seconds=60)
    links = links_of(groups)
    executor, wrong = PipelineExecutor(links, index=groups.pipeline.index), []
    for cell, tables in all_tables(world):
        schedule, _, m, virtual = cell
        if not keyed and m not in (2, 9):
            continue
        own = range(rank, world * virtual, world)
        trains = schedule != "forward"
        stages = AffineStages(world * virtual, own, split=schedule == "zero_bubble", trains=trains)
        links.forget()
        executor.run(tables, stages, [length_of(each) for each in range(m)] if keyed else ())
        wrong += [(cell, what) for what in _differences(stages, in_sequence(world * virtual, m), tables[rank])]
        agree_on_numbers([1.0], groups.world, "exchange of norms")
    groups.close()
    return wrong


def _differences(stages: AffineStages, whole: AffineStages, actions: tuple[Action, ...]) -> Iterator[str]:
    if tuple(stages.order) != actions:
        yield "order"
    if stages.last in stages.weights:
        if {each: loss.item() for each, loss in stages.losses.items()} != {
            each: loss.item() for each, loss in whole.losses.items()
        }:
            yield "losses"
    if not stages.trains:
        return
    if any(
        not torch.equal(mine, theirs)
        for stage in stages.weights
        for mine, theirs in zip(stages.sums[stage], whole.sums[stage], strict=True)
    ):
        yield "weights"
    if 0 in stages.weights and any(not torch.equal(grad, whole.inputs[each]) for each, grad in stages.inputs.items()):
        yield "inputs"


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("keyed", [True, False], ids=["keys", "headers"])
def test_every_table_has_the_bits_of_a_sequential_step(rank_pools: Any, ranks: int, keyed: bool) -> None:
    assert rank_pools[ranks].run(run_all, keyed, timeout=200) == [[]] * ranks


def test_one_rank_runs_all_its_stages_without_a_process_group() -> None:
    groups = ProcessGroups(detect(), timeout_seconds=5)
    for cell, tables in all_tables(1):
        schedule, _, m, virtual = cell
        stages = AffineStages(virtual, range(virtual), split=schedule == "zero_bubble", trains=schedule != "forward")
        PipelineExecutor(links_of(groups), index=0).run(tables, stages)
        assert not list(_differences(stages, in_sequence(virtual, m), tables[0])), cell
