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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
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
    # Whether the next unit of experts is gathered while one is computed with.
    gather_routed_ahead: bool = False


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
        # From each of these positions to the next of them.
        sums = [0.0, *accumulate(timing.use_seconds)]
        seconds = tuple(sums[end] - sums[begin] for begin, end in pairwise([*at, len(timing.use_seconds)]))
        timing = replace(timing, use_seconds=seconds)
    trace = [uses[position].unit for position in at]
    ahead, reads, keep, peak = _simulate(trace, full_nbytes, fetch_nbytes, budget, timing)
    none: tuple[int, ...] = ()
    return FetchSchedule(
        uses=tuple(uses), gather_ahead=_spread(ahead, at, len(uses), none),
        fetch_ahead=_spread(reads, at, len(uses), none), keep=_spread(keep, at, len(uses), False), peak_nbytes=peak,
    )  # fmt: skip


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
    following = _next_uses(trace)
    gather_ahead: list[tuple[int, ...]] = []
    fetch_ahead: list[tuple[int, ...]] = []
    live, gathered, fetched = _Present(full_nbytes), _Present(full_nbytes), _Present(fetch_nbytes)
    # Units that are neither live nor fetched, by next use. A unit gathered ahead may hold its partition's buffer until
    # it is used, so it counts as fetched, too.
    to_gather, to_fetch = _Absent(trace), _Absent(trace if any(fetch_nbytes) else ())
    peak = 0
    for position, unit in enumerate(trace):
        live.add(unit)
        gathered.discard(unit)
        fetched.discard(unit)
        room = min(budget.live_nbytes_max - live.nbytes, budget.prefetch_nbytes_max - gathered.nbytes)
        fetch_room = budget.fetch_nbytes_max - fetched.nbytes
        ahead: list[int] = []
        for at in to_gather.after(position, live):
            other = trace[at]
            read_nbytes = 0 if other in fetched else fetch_nbytes[other]
            if full_nbytes[other] > room or gather_due[at] > position or read_nbytes > fetch_room:
                break
            for present in (live, gathered, fetched):
                present.add(other)
            ahead.append(other)
            room -= full_nbytes[other]
            fetch_room -= read_nbytes
            if room <= 0:
                break
        reads: list[int] = []
        for at in to_fetch.after(position, live, fetched):
            other = trace[at]
            if fetch_nbytes[other] > fetch_room or fetch_due[at] > position:
                break
            fetched.add(other)
            reads += [other] if fetch_nbytes[other] else []
            fetch_room -= fetch_nbytes[other]
            if fetch_room <= 0:
                break
        peak = max(peak, live.nbytes)
        gather_ahead.append(tuple(ahead))
        fetch_ahead.append(tuple(reads))
        if not keep[position]:
            live.discard(unit)
            if (again := following[position]) is not None:
                to_gather.add(again)
                to_fetch.add(again)
    return gather_ahead, fetch_ahead, keep, peak


def _next_uses(trace: Sequence[int]) -> list[int | None]:
    """For each position, that of the same unit's next use."""
    following: list[int | None] = [None] * len(trace)
    later: dict[int, int] = {}
    for position in range(len(trace) - 1, -1, -1):
        following[position] = later.get(trace[position])
        later[trace[position]] = position
    return following


class _Present:
    """A set of units and the sum of their bytes."""

    def __init__(self, nbytes_of: Sequence[int]) -> None:
        self._nbytes_of = nbytes_of
        self._units: set[int] = set()
        self.nbytes = 0

    def __contains__(self, unit: int) -> bool:
        return unit in self._units

    def add(self, unit: int) -> None:
        if unit not in self._units:
            self._units.add(unit)
            self.nbytes += self._nbytes_of[unit]

    def discard(self, unit: int) -> None:
        if unit in self._units:
            self._units.remove(unit)
            self.nbytes -= self._nbytes_of[unit]


class _Absent:
    """Positions of the next uses of absent units in a heap, so that no use walks over the units that are present."""

    def __init__(self, trace: Sequence[int]) -> None:
        self._trace = trace
        first: dict[int, int] = {}
        for position, unit in enumerate(trace):
            first.setdefault(unit, position)
        # In ascending order, which is a heap.
        self._positions = [*first.values()]

    def add(self, position: int) -> None:
        """A unit is absent from now on, and its next use is at `position`."""
        if self._trace:
            heappush(self._positions, position)

    def after(self, position: int, *present: _Present) -> Iterator[int]:
        """Next uses after `position` of units that are in none of `present`, in order. The caller adds the unit of each
        use to one of them before it asks for the next one.
        """
        while self._positions:
            at = self._positions[0]
            if at > position and not any(self._trace[at] in units for units in present):
                yield at
            else:
                heappop(self._positions)


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
    # What lies on the device at each position: the unit in use beside what is kept, both of which must fit.
    held = _RangeMaximum([full_nbytes[unit] for unit in trace])
    for _, first, last in sorted(_reuses(trace, full_nbytes, budget.reuse_nbytes_max)):
        nbytes = full_nbytes[trace[first]]
        if last == first + 1 or held.maximum(first + 1, last) + nbytes <= budget.live_nbytes_max:
            keep[first] = True
            held.add(first + 1, last, nbytes)
    return tuple(keep)


def _reuses(
    trace: Sequence[int], full_nbytes: Sequence[int], nbytes_max: int
) -> Iterator[tuple[int, int, int]]:  # fmt: skip
    """(distance, position, next position) of every reuse of a unit at a distance of at most `nbytes_max`: bytes of the
    other units that are used in between, each once.
    """
    # A Fenwick tree over positions, in which every unit counts at its latest use alone.
    sums = [0] * (len(trace) + 1)
    latest: dict[int, int] = {}

    def add(position: int, nbytes: int) -> None:
        position += 1
        while position < len(sums):
            sums[position] += nbytes
            position += position & -position

    def before(position: int) -> int:
        total = 0
        while position:
            total += sums[position]
            position &= position - 1
        return total

    for position, unit in enumerate(trace):
        if unit in latest:
            distance = before(position) - before(latest[unit] + 1)
            if distance <= nbytes_max:
                yield distance, latest[unit], position
            add(latest[unit], -full_nbytes[unit])
        add(position, full_nbytes[unit])
        latest[unit] = position


class _RangeMaximum:
    """Numbers by position: adds to a range and tells the largest of a range, each in O(log count)."""

    def __init__(self, values: Sequence[int]) -> None:
        self._count = len(values)
        # A binary tree over positions: node i has the children 2 i and 2 i + 1. The largest value below each node
        # without what was added to whole ranges above it, and what was added to the whole of its own.
        self._largest = [0] * self._count + [*values]
        self._added = [0] * (2 * self._count)
        for node in range(self._count - 1, 0, -1):
            self._largest[node] = max(self._largest[2 * node], self._largest[2 * node + 1])

    def add(self, begin: int, end: int, value: int) -> None:
        """Add `value` at the positions from `begin` up to `end`."""
        for node in self._cover(begin, end):
            self._largest[node] += value
            self._added[node] += value
        for leaf in {begin, end - 1} if begin < end else ():
            node = (leaf + self._count) >> 1
            while node:
                below = max(self._largest[2 * node], self._largest[2 * node + 1])
                self._largest[node] = below + self._added[node]
                node >>= 1

    def maximum(self, begin: int, end: int) -> int:
        """The largest value from `begin` up to `end`, at least one position."""
        return max(self._largest[node] + self._above(node) for node in self._cover(begin, end))

    def _above(self, node: int) -> int:
        """What was added to the ranges of all nodes above."""
        total = 0
        while node := node >> 1:
            total += self._added[node]
        return total

    def _cover(self, begin: int, end: int) -> Iterator[int]:
        """The nodes that together have exactly these positions."""
        begin, end = begin + self._count, end + self._count
        while begin < end:
            if begin & 1:
                yield begin
                begin += 1
            if end & 1:
                end -= 1
                yield end
            begin >>= 1
            end >>= 1
