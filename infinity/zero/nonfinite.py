"""Finds where a gradient that is not finite appeared first. Runs for skipped steps only, so it may read everything."""

from __future__ import annotations

import math

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange
from infinity.zero.gradients import Gradients

# What is said where every gradient is finite.
NOWHERE = "of no parameter"
_NOWHERE = math.inf


def first_nonfinite(gradients: Gradients, group: AxisGroup, *, loss_is_finite: bool) -> str:
    """Return, in words, the first parameter in the order of backward whose gradient is not finite, and its rank.
    Collective. The rank is known if gradients are whole until the boundary, and otherwise by its loss.
    """
    at, slot_at, name = _NOWHERE, -1, ""
    for index, unit in enumerate(gradients.order):
        found = gradients.nonfinite_slot(unit)
        if found is not None:
            at, slot_at, name = index, found, unit.layout.slots[found].name
            break
    rows = exchange(
        [float(at), float(slot_at), float(not loss_is_finite)], group,
        "search for what is not finite",
    )  # fmt: skip
    place = min(row[0] for row in rows)
    if place == _NOWHERE:
        return NOWHERE
    slot_at = int(max(row[1] for row in rows if row[0] == place))
    name = gradients.order[int(place)].layout.slots[slot_at].name
    if group.size == 1:
        return name
    losses = [rank for rank, row in zip(group.members, rows, strict=True) if row[2]]
    if losses:
        return f"{name}, on rank {_listed(losses)}, where the loss is not finite"
    if gradients.whole:
        there = [rank for rank, row in zip(group.members, rows, strict=True) if row[0] == place]
        return f"{name}, on rank {_listed(there)}"
    return f"{name}, in the sum over ranks (every loss is finite)"


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
