"""Gradients of which each rank of a tensor group has a part, on replicated parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from infinity.distributed.groups import ProcessGroups, detect
from infinity.plan.types import Key, Kind, Topology
from infinity.zero.gradients import Gradients


def summed(rank: int, world: int) -> tuple[list[Any], int]:
    """The gradients of a unit's parameters after their sum, and how many collectives that took."""
    groups = ProcessGroups(detect(), Topology(tp=world, local_size=world), timeout_seconds=60)
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 2), (5,), (2,))]
    for param in (params[0], params[2]):
        param.grad = torch.full_like(param, 10.0**rank)
    gradients = object.__new__(Gradients)
    gradients._groups = groups
    layout = SimpleNamespace(index=0, name="norms")
    unit = SimpleNamespace(layout=layout, params=params, grad_key=Key(Kind.GRAD, 0))
    gradients._sum_partial(unit)  # type: ignore[arg-type]
    assert groups.data.process_group is None and groups.watchdog is not None
    count = groups.watchdog.log.counts[groups.tensor.channel]
    groups.close()
    return [None if param.grad is None else param.grad.tolist() for param in params], count


def test_partial_gradients_of_a_unit_are_summed_by_one_collective(rank_pools: Any) -> None:
    for grads, count in rank_pools[2].run(summed):
        assert grads == [[[11.0, 11.0]] * 3, None, [11.0, 11.0]]
        assert count == 1
