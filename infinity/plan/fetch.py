"""The fetch schedule: which units to submit ahead at each use, and which to keep gathered for their next use.

A trace is the sequence of units in the order in which modules begin to need them: a forward and its backward. The
schedule is a pure function of the trace, the units' sizes and the budgets, so that every rank submits its collectives in
the same order and the peak is known before the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FetchBudget:
    """Bounds in bytes: of whole units that are gathered at once, of those ahead of use, of a kept unit's reuse distance."""

    live_nbytes_max: int
    prefetch_nbytes_max: int
    reuse_nbytes_max: int
    # Bytes of this rank's partitions read ahead from NVMe into CPU memory.
    fetch_nbytes_max: int


@dataclass(frozen=True, slots=True)
class FetchSchedule:
    """For each position of the trace: units to gather ahead, units to read ahead from NVMe, and whether to keep the unit."""

    trace: tuple[int, ...]
    gather_ahead: tuple[tuple[int, ...], ...]
    fetch_ahead: tuple[tuple[int, ...], ...]
    keep: tuple[bool, ...]
    peak_nbytes: int

    def __len__(self) -> int:
        return len(self.trace)


def make_schedule(
    trace: Sequence[int], *, full_nbytes: Sequence[int], fetch_nbytes: Sequence[int], budget: FetchBudget
) -> FetchSchedule:
    """Simulate the trace once, greedily.

    `full_nbytes` gives each unit's gathered size on the device and `fetch_nbytes` the size of its partition on NVMe (0 when
    it is not there). A unit in use is always live, whatever the budget; prefetching and keeping never exceed it.
    """
    keep = _keep(trace, full_nbytes, budget)
    gather_ahead: list[tuple[int, ...]] = []
    fetch_ahead: list[tuple[int, ...]] = []
    live: dict[int, int] = {}
    fetched: dict[int, int] = {}
    peak = 0
    for position, unit in enumerate(trace):
        live[unit] = full_nbytes[unit]
        fetched.pop(unit, None)
        room = min(budget.live_nbytes_max - sum(live.values()), budget.prefetch_nbytes_max)
        ahead = _ahead(trace, position, full_nbytes, live, room)
        for other in ahead:
            live[other] = full_nbytes[other]
            fetched.pop(other, None)
        room = budget.fetch_nbytes_max - sum(fetched.values())
        reads = [other for other in _ahead(trace, position, fetch_nbytes, {**live, **fetched}, room) if fetch_nbytes[other]]
        fetched.update((other, fetch_nbytes[other]) for other in reads)
        peak = max(peak, sum(live.values()))
        gather_ahead.append(ahead)
        fetch_ahead.append(tuple(reads))
        if not keep[position]:
            del live[unit]
    return FetchSchedule(tuple(trace), tuple(gather_ahead), tuple(fetch_ahead), keep, peak)


def _ahead(
    trace: Sequence[int], position: int, nbytes: Sequence[int], present: dict[int, int], room: int
) -> tuple[int, ...]:
    """Units next in the trace that are not present, as many as fit into `room` bytes, without skipping one."""
    ahead: list[int] = []
    for unit in trace[position + 1 :]:
        if unit in present or unit in ahead:
            continue
        if nbytes[unit] > room:
            break
        room -= nbytes[unit]
        ahead.append(unit)
        if room <= 0:
            break
    return tuple(ahead)


def _keep(trace: Sequence[int], full_nbytes: Sequence[int], budget: FetchBudget) -> tuple[bool, ...]:
    """Whether each use's unit stays gathered until its next use: the shortest reuses first, within the live budget."""
    keep = [False] * len(trace)
    kept = [0] * len(trace)
    spans = []
    latest: dict[int, int] = {}
    for position, unit in enumerate(trace):
        if unit in latest:
            between = {other for other in trace[latest[unit] + 1 : position] if other != unit}
            spans.append((sum(full_nbytes[other] for other in between), latest[unit], position))
        latest[unit] = position
    for distance, first, last in sorted(spans):
        unit = trace[first]
        # A unit in use lies beside what is kept: both must fit at every position between.
        fits = all(
            kept[at] + full_nbytes[unit] + full_nbytes[trace[at]] <= budget.live_nbytes_max for at in range(first + 1, last)
        )
        if distance <= budget.reuse_nbytes_max and fits:
            keep[first] = True
            for at in range(first + 1, last):
                kept[at] += full_nbytes[unit]
    return tuple(keep)
