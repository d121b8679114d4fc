"""Scripted divergences of a pipeline: in its second step one rank does something else than the others.

`part(...)` runs one case on this rank; `python -m tests.parallel.pipeline_divergence CASE PP`, under torchrun's
environment, runs one as a program of its own that prints what it was told.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import torch

from infinity.distributed import collectives
from infinity.distributed.consistency import agree_on_numbers
from infinity.distributed.groups import ProcessGroups, detect
from infinity.distributed.links import Boundary, Gradients
from infinity.parallel.executor import PipelineExecutor
from infinity.plan.pipeline import Action, Tables, make_tables
from infinity.plan.types import Topology
from tests.parallel.stages import AffineStages, length_of, links_of

MICRO_BATCHES = 8
LONG, SHORT = 300.0, 2.0
# By case, the kind of action in which the odd rank leaves the others, and with which micro-batch.
LEAVES = {
    "raises in F": ("F", 3), "raises in B": ("B", 2), "sleeps": ("F", 3), "comes late": ("B", 2), "closes": ("F", 3),
    "killed": ("B", 2),
}  # fmt: skip


class OddStages(AffineStages):
    """Stages of the rank that does something else."""

    def __init__(self, case: str, groups: ProcessGroups, *args: Any) -> None:
        super().__init__(*args)
        self.case, self.groups = case, groups

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        self._leave(action)
        return super().forward(action, received)

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        self._leave(action)
        return super().backward(action, grads)

    def _leave(self, action: Action) -> None:
        if (action.kind.value, action.micro_batch) != LEAVES.get(self.case):
            return
        if self.case == "sleeps":
            time.sleep(10_000)
        elif self.case == "comes late":
            time.sleep(5.0)
        elif self.case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case == "closes":
            self.groups.close()
            raise StopIteration("no more data")
        else:
            raise ArithmeticError(f"{action} is broken")


def part(case: str, pp: int, odd: int) -> tuple[str, str, float]:
    """(kind of error, its text, seconds from the parting until this rank was through and closed). odd: the rank."""
    torch.set_num_threads(1)
    topology = Topology(pp=pp, dp=4 // pp, local_size=4)
    groups = ProcessGroups(detect(), topology, timeout_seconds=SHORT if case == "sleeps" else LONG)
    rank = groups.ranks.rank
    executor = PipelineExecutor(links_of(groups), index=groups.pipeline.index)
    tables = make_tables("1f1b", pp, MICRO_BATCHES)
    keys = [length_of(each) for each in range(MICRO_BATCHES)]
    own = [groups.pipeline.index]
    parted, kind, text = time.time(), "none", ""
    try:
        with groups.telling():
            for step in range(3):
                parted = time.time() if step == 1 else parted
                if step == 1 and rank == odd:
                    executor.run(_odd_tables(case, tables), OddStages(case, groups, pp, own), keys)
                else:
                    executor.run(tables, AffineStages(pp, own), keys)
                if groups.reduction.size > 1:
                    collectives.all_reduce(torch.ones(3), groups.reduction, "reduction of stage").wait()
                agree_on_numbers([1.0], groups.world, "exchange of norms")
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    groups.close()
    return kind, text, time.time() - parted


def _odd_tables(case: str, tables: Tables) -> Tables:
    pp = len(tables)
    if case == "another schedule":
        return make_tables("gpipe", pp, MICRO_BATCHES)
    if case == "fewer micro-batches":
        return make_tables("1f1b", pp, MICRO_BATCHES - 1)
    if case == "skips one":
        return tuple(tuple(action for action in actions if action.micro_batch != 3) for actions in tables)
    return tables


if __name__ == "__main__":
    print(json.dumps(part(sys.argv[1], int(sys.argv[2]), 2)), flush=True)
