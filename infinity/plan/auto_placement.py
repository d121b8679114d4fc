"""Which tier each value gets when the budgets decide: the fastest tier is filled first, then the next.

A value is a PARAM partition or a sub-group's states. What it is worth on a fast tier is its traffic: the bytes of it
that move in one step, were it on a slower one. 16-bit parameters are read by forward and by backward, and read and
written by the step: 4 bytes for each byte stored; optimizer states are read and written once: 2. So parameters go
before states, and of equals those nearest the input, whose step is needed first.

`fill_tiers` takes the tiers one after the other. What it puts on a tier carries the greatest traffic that fits there
(`choose`); the tier after that gets the most of the rest, and the last one takes what remains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.capacity import Capacity
from infinity.plan.types import Key, Tier

# Values beside the border between what a tier takes and what it leaves, for which every choice is looked at.
CORE_COUNT = 14

# Bytes that move in one step for each byte stored: forward, backward (not of a lookup), the step's read and write.
PARAM_TRAFFIC = 4
FROZEN_TRAFFIC = 2
STATES_TRAFFIC = 2


@dataclass(frozen=True, slots=True)
class Value:
    """One partition whose home is open. `traffic`: bytes a step that a fast home saves."""

    key: Key
    # Bytes in memory; on the GPU tier the gradients that then lie beside it are counted, too.
    nbytes: int
    gpu_nbytes: int
    traffic: int

    def nbytes_on(self, tier: Tier) -> int:
        return self.gpu_nbytes if tier.on_device else self.nbytes


def fill_tiers(values: Sequence[Value], tiers: Sequence[Tier], room: Capacity) -> dict[Key, Tier]:
    """A home for every value. `values` come in the order of preference of equals; `tiers` from fast to slow, the last
    one taking whatever remains.
    """
    homes: dict[Key, Tier] = {}
    rest = list(values)
    taken = dict.fromkeys(Tier, 0)
    for tier in tiers[:-1]:
        # Sorting keeps the order of equals; a density is rounded so that equals are equal.
        densest = sorted(rest, key=lambda value: -round(value.traffic / max(value.nbytes_on(tier), 1), 9))
        sizes = [value.nbytes_on(tier) for value in densest]
        limit = room.left(taken).of(tier)
        chosen = choose(sizes, [value.traffic for value in densest], sum(sizes) if limit is None else limit)
        homes.update((densest[at].key, tier) for at in chosen)
        taken[tier] = sum(sizes[at] for at in chosen)
        rest = [value for value in rest if value.key not in homes]
    homes.update((value.key, tiers[-1]) for value in rest)
    return homes


def choose(nbytes: Sequence[int], traffic: Sequence[int], room: int) -> set[int]:
    """Indices of the values that fit into `room` bytes and carry the most traffic together.

    The values come densest first, and are taken in that order as they fit. That loses less than the traffic of the
    first one left out: were that one cut so as to fill the room, nothing could be better. Then every choice among the
    `CORE_COUNT` values around that border is looked at, so that the answer is the optimum for so many values, and never
    worse than the first for more. The one that takes what comes first wins among equals.
    """
    taken: set[int] = set()
    left = room
    border = len(nbytes)
    for at, size in enumerate(nbytes):
        if size <= left:
            taken.add(at)
            left -= size
        elif border == len(nbytes):
            border = at
    if border == len(nbytes):
        return taken
    first = max(0, min(border - CORE_COUNT // 2, len(nbytes) - CORE_COUNT))
    core = list(range(first, min(first + CORE_COUNT, len(nbytes))))
    free = left + sum(nbytes[at] for at in core if at in taken)
    best = _best([nbytes[at] for at in core], [traffic[at] for at in core], free)
    return (taken - set(core)) | {core[at] for at in best}


def _best(nbytes: Sequence[int], traffic: Sequence[int], room: int) -> set[int]:
    """The best of all choices, by depth first: take before leave, cut off where what is left cannot win any more."""
    rest = [sum(traffic[at:]) for at in range(len(traffic) + 1)]
    best: tuple[int, tuple[int, ...]] = (-1, ())

    def visit(at: int, left: int, worth: int, chosen: tuple[int, ...]) -> None:
        nonlocal best
        if worth + rest[at] <= best[0]:
            return
        if at == len(nbytes):
            best = worth, chosen
            return
        if nbytes[at] <= left:
            visit(at + 1, left - nbytes[at], worth + traffic[at], (*chosen, at))
        visit(at + 1, left, worth, chosen)

    visit(0, room, 0, ())
    return set(best[1])
