"""The fetch schedule: which units to submit ahead at each use, and which to keep gathered for their next use.

A trace is the sequence of units in the order in which modules begin to need them: a forward and its backward. Backward
of a lookup (an embedding) needs the unit's place in that order, where its gradient comes, but not its weights. The
schedule is a pure function of the trace, the units' sizes and the budgets, so that every rank submits its collectives
in the same order and the peak is known before the first step.

Until times are known everything is submitted as early as the budgets allow. Once they have been measured it is
submitted as late as it may be, with a margin: what arrives early only takes memory, and the drive's time from more
urgent requests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

# A transfer is planned to take so much longer than it did when it was measured.
_MARGIN = 2.0
_LATENCY_S = 1e-3

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class FetchBudget:
    """Bounds in bytes: of units gathered at once, of those gathered ahead of use, of a kept unit's reuse distance."""

    live_nbytes_max: int
    prefetch_nbytes_max: int
    reuse_nbytes_max: int
    # Bytes of this rank's partitions in CPU memory that were read from NVMe ahead of use, gathered ahead or not.
    fetch_nbytes_max: int


@dataclass(frozen=True, slots=True)
class Timing:
    """What was measured of a trace: seconds of computation from each use to the next; transfers in bytes a second."""

    use_seconds: tuple[float, ...]
    # From NVMe to CPU memory.
    fetch_rate: float
    # From CPU memory (and the other ranks) to whole units on the device.
    gather_rate: float
    # Seconds that a read waits for what the drive has begun before it, while a step reads and writes there.
    fetch_latency: float = 0.0


class UnitAccess(NamedTuple):
    """A module begins with a unit, in forward or in backward. `needed`: with its weights."""

    unit: int
    needed: bool = True


@dataclass(frozen=True, slots=True)
class FetchSchedule:
    """For each use: units to gather ahead, units to read ahead from NVMe, whether to keep its own."""

    uses: tuple[UnitAccess, ...]
    gather_ahead: tuple[tuple[int, ...], ...]
    fetch_ahead: tuple[tuple[int, ...], ...]
    keep: tuple[bool, ...]
    peak_nbytes: int

    def __len__(self) -> int:
        return len(self.uses)

    @property
    def trace(self) -> tuple[int, ...]:
        return tuple(use.unit for use in self.uses)


def make_schedule(
    uses: Sequence[UnitAccess], *, full_nbytes: Sequence[int], fetch_nbytes: Sequence[int], budget: FetchBudget,
    timing: Timing | None = None,
) -> FetchSchedule:  # fmt: skip
    """Simulate the uses once, greedily.

    `full_nbytes` gives each unit's gathered size on the device and `fetch_nbytes` the size of its partition on NVMe (0
    when it is not there). A unit in use is always live, whatever the budget; prefetching and keeping never exceed it.
    With `timing`, which must be the same on every rank, nothing is submitted earlier than it has to be.
    """
    at = [position for position, use in enumerate(uses) if use.needed]
    if timing is not None and len(at) < len(uses):
        timing = replace(timing, use_seconds=_until_next(timing.use_seconds, at))
    trace = [uses[position].unit for position in at]
    ahead, reads, keep, peak = _simulate(trace, full_nbytes, fetch_nbytes, budget, timing)
    none: tuple[int, ...] = ()
    return FetchSchedule(
        uses=tuple(uses), gather_ahead=_spread(ahead, at, len(uses), none),
        fetch_ahead=_spread(reads, at, len(uses), none), keep=_spread(keep, at, len(uses), False), peak_nbytes=peak,
    )  # fmt: skip


def _until_next(seconds: Sequence[float], at: Sequence[int]) -> tuple[float, ...]:
    """Seconds from each of these positions to the next of them."""
    sums = [0.0, *accumulate(seconds)]
    return tuple(sums[end] - sums[begin] for begin, end in pairwise([*at, len(seconds)]))


def _spread(values: Sequence[_Value], at: Sequence[int], count: int, otherwise: _Value) -> tuple[_Value, ...]:
    """`count` values: those given at their positions, another one elsewhere."""
    spread = [otherwise] * count
    for position, value in zip(at, values, strict=True):
        spread[position] = value
    return tuple(spread)


def _simulate(
    trace: Sequence[int], full_nbytes: Sequence[int], fetch_nbytes: Sequence[int], budget: FetchBudget,
    timing: Timing | None,
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], tuple[bool, ...], int]:  # fmt: skip
    """By position: units to gather ahead, to read ahead, whether to keep the one in use; and the peak in bytes."""
    gather_due, fetch_due = _due(trace, full_nbytes, fetch_nbytes, timing)
    keep = _keep(trace, full_nbytes, budget)
    gather_ahead: list[tuple[int, ...]] = []
    fetch_ahead: list[tuple[int, ...]] = []
    live: dict[int, int] = {}
    # Gathered ahead, and read ahead from NVMe, and not used since. A unit gathered ahead may hold its partition's
    # buffer until it is used, so it counts there too.
    gathered: dict[int, int] = {}
    fetched: dict[int, int] = {}
    peak = 0
    units = len(set(trace))
    reading = any(fetch_nbytes)
    for position, unit in enumerate(trace):
        live[unit] = full_nbytes[unit]
        gathered.pop(unit, None)
        fetched.pop(unit, None)
        reads = []
        room = min(budget.live_nbytes_max - sum(live.values()), budget.prefetch_nbytes_max - sum(gathered.values()))
        fetch_room = budget.fetch_nbytes_max - sum(fetched.values())
        ahead = []
        for other in _ahead(trace, position, full_nbytes, live, room, units, gather_due):
            read_nbytes = 0 if other in fetched else fetch_nbytes[other]
            if read_nbytes > fetch_room:
                break
            fetch_room -= read_nbytes
            fetched[other] = fetch_nbytes[other]
            gathered[other] = live[other] = full_nbytes[other]
            ahead.append(other)
        present = {**live, **fetched} if reading else live
        for other in _ahead(trace, position, fetch_nbytes, present, fetch_room, units, fetch_due) if reading else ():
            fetched[other] = fetch_nbytes[other]
            if fetch_nbytes[other]:
                reads.append(other)
        peak = max(peak, sum(live.values()))
        gather_ahead.append(tuple(ahead))
        fetch_ahead.append(tuple(reads))
        if not keep[position]:
            del live[unit]
    return gather_ahead, fetch_ahead, keep, peak


def _ahead(
    trace: Sequence[int], position: int, nbytes: Sequence[int], present: Mapping[int, int], room: int, units: int,
    due: Sequence[int],
) -> tuple[int, ...]:  # fmt: skip
    """Units next in the trace that are not present, as many as are due and fit into `room` bytes, without skipping
    one.
    """
    ahead: list[int] = []
    for at in range(position + 1, len(trace)):
        unit = trace[at]
        if unit in present or unit in ahead:
            # All units of the trace are present: a long one need not be walked to its end.
            if len(present) + len(ahead) >= units:
                break
            continue
        if nbytes[unit] > room or due[at] > position:
            break
        room -= nbytes[unit]
        ahead.append(unit)
        if room <= 0:
            break
    return tuple(ahead)


def _due(
    trace: Sequence[int], full_nbytes: Sequence[int], fetch_nbytes: Sequence[int], timing: Timing | None
) -> tuple[Sequence[int], Sequence[int]]:
    """The positions from which a gather, and a fetch, for each use may be submitted: the latest at which each still
    arrives in time, all of them going over one link one after the other.
    """
    if timing is None:
        at_once = [0] * len(trace)
        return at_once, at_once
    begins = [0.0, *accumulate(timing.use_seconds)][: len(trace)]
    gathers = _latest_starts(begins, [full_nbytes[unit] for unit in trace], timing.gather_rate)
    # A gather can begin when its fetch has ended.
    wanted = [start - _MARGIN * timing.fetch_latency for start in gathers]
    fetches = _latest_starts(wanted, [fetch_nbytes[unit] for unit in trace], timing.fetch_rate)
    gather_due, fetch_due = ([bisect_right(begins, start) - 1 for start in starts] for starts in (gathers, fetches))
    return gather_due, fetch_due


def _latest_starts(deadlines: Sequence[float], nbytes: Sequence[int], rate: float) -> list[float]:
    starts: list[float] = []
    next_start = float("inf")
    for deadline, size in zip(reversed(deadlines), reversed(nbytes), strict=True):
        next_start = min(deadline, next_start)
        if size:
            next_start -= _MARGIN * size / rate + _LATENCY_S
        starts.append(next_start)
    return starts[::-1]


def _keep(trace: Sequence[int], full_nbytes: Sequence[int], budget: FetchBudget) -> tuple[bool, ...]:
    """Whether each use's unit stays gathered until its next use: the shortest reuses first, within the live budget."""
    keep = [False] * len(trace)
    if sum(full_nbytes[unit] for unit in set(trace)) <= min(budget.live_nbytes_max, budget.reuse_nbytes_max):
        # Everything may stay until its next use.
        final = {unit: position for position, unit in enumerate(trace)}
        return tuple(position < final[unit] for position, unit in enumerate(trace))
    kept = [0] * len(trace)
    spans = []
    latest: dict[int, int] = {}
    for position, unit in enumerate(trace):
        if unit in latest:
            distance = _distance(trace, latest[unit], position, full_nbytes, budget.reuse_nbytes_max)
            if distance is not None:
                spans.append((distance, latest[unit], position))
        latest[unit] = position
    for _, first, last in sorted(spans):
        unit = trace[first]
        # A unit in use lies beside what is kept: both must fit at every position between.
        fits = all(
            kept[at] + full_nbytes[unit] + full_nbytes[trace[at]] <= budget.live_nbytes_max
            for at in range(first + 1, last)
        )
        if fits:
            keep[first] = True
            for at in range(first + 1, last):
                kept[at] += full_nbytes[unit]
    return tuple(keep)


def _distance(
    trace: Sequence[int], first: int, last: int, full_nbytes: Sequence[int], nbytes_max: int
) -> int | None:  # fmt: skip
    """Bytes of the other units used between two uses of one; None when they are more than `nbytes_max`."""
    seen = {trace[first]}
    nbytes = 0
    for at in range(first + 1, last):
        other = trace[at]
        if other not in seen:
            seen.add(other)
            nbytes += full_nbytes[other]
            if nbytes > nbytes_max:
                return None
    return nbytes
