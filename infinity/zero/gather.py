"""Gathering: which units are gathered and in use, and what is fetched ahead of each use.

`GatheredMemory` has the device memory of gathered units. `UnitMemory` decides which released units retain their bytes
for the next gathers. It keeps the totals: no gather scans all units. This module carries the decisions out: a unit that
gives up its bytes leaves their pages as spare pages to other units.

[Note: refresh] A unit that is whole for good has to follow its partition after a step. Where the states lie on the
device, the device does both in order. Elsewhere the step takes its time, so each unit follows as soon as its own
sub-groups are stepped, while others still are. If that needs other ranks, `step()` gathers unit after unit, in one
order on all ranks. If it does not, `step()` returns before: the unit looks partitioned until its next use, a module's
or the program's own, which waits for this unit's step only and begins to bring those that are stepped by then.

`Prefetcher` walks the plan's fetch schedule as units are used, and submits what it has ahead of each use. A cursor
follows the schedule. When the model does something else (a conditional layer, evaluation in between, a module
called twice), the cursor finds its place again or the unit is fetched on demand, and at the end of the pass the plan
makes a schedule of what really happened. Schedules are remembered by trace: alternating between traces costs nothing.

What the schedule is made of (seconds of computation between the uses of units, transfer rates) is measured in one
training pass, after the first ones have warmed everything up, by the device's own clock.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange
from infinity.errors import TierMemoryError
from infinity.memory.resizable_buffer import SparePages
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.plan import Plan
from infinity.plan.pools import UnitMemory
from infinity.plan.prefetch import FetchSchedule, Timing, UnitAccess
from infinity.plan.types import Tier
from infinity.step.optimizer_step import OptimizerStep
from infinity.zero.unit import GatherState, Unit


class GatheredMemory:
    """Gathers and releases the units of one engine, and counts their uses and their bytes.

    Units that are whole for good take part in uses only. spare: the device's spare pages, None on a device that keeps
    freed memory itself.
    """

    def __init__(self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, spare: SparePages | None) -> None:
        self._units = list(units)
        self._store = store
        self._spare = spare
        self._plan = plan
        # Open uses of each unit; a unit without one has no entry.
        self._users: dict[Unit, int] = {}
        self._held = self._nothing_held()
        # Those that are stepped, in the order in which they are.
        self._trained = [self._units[index] for index in plan.refresh_order()]
        # Units whose copy to the device may still read their partition, in the order of the copies.
        self._copying: deque[Unit] = deque()
        # Units that are brought up to date at their next use, in the order of their steps. Some may be already.
        self._outdated: deque[Unit] = deque()

    @property
    def live_nbytes(self) -> int:
        """Bytes of the gathered units that are released after use."""
        return self._held.live_nbytes

    def in_use(self, unit: Unit) -> bool:
        """Whether a module call or a block keeps the unit."""
        return unit in self._users

    def begin_use(self, unit: Unit) -> bool:
        """Count one more use of a unit. Returns whether it is the only one."""
        count = self._users[unit] = self._users.get(unit, 0) + 1
        return count == 1

    def end_use(self, unit: Unit) -> bool:
        """Count one use less. Returns whether no use is left; the unit stays gathered until `release`."""
        count = self._users.pop(unit, 1) - 1
        if count:
            self._users[unit] = count
        return not count

    def gather(self, unit: Unit) -> None:
        """Start to gather a unit, if it is not gathered, within the plan's bytes. Collective.

        The gather may wait for an optimizer step, so partitions that the step may need are returned first.
        """
        if unit.state is not GatherState.PARTITIONED:
            return
        if self._copying:
            waits = self._store.access.reserved(unit.key)
            while self._copying and self._copying[0].release_lease(wait=waits):
                self._copying.popleft()
            self.prefetch(unit)
        if not unit.placed.whole:
            self._make_room(unit)
        try:
            self._start_gather(unit)
        except BaseException:
            self._count_released(unit, retain=False)
            raise
        if unit.leasing:
            self._copying.append(unit)

    def prefetch(self, *units: Unit) -> None:
        """Fetch the partitions of units that will be gathered, in order, as far as there is room. The host may be far
        ahead of the device: partitions that are still copied from fill the pool, so it waits for the oldest of them.
        """
        keys = [unit.key for unit in units]
        while not self._store.prefetch(*keys) and self._copying:
            self._copying.popleft().release_lease(wait=True)

    def _start_gather(self, unit: Unit) -> None:
        """A step in the background may take the room that `prefetch` has found, and wait for more itself: so nobody
        waits for it with partitions that are still copied from. The oldest of these is returned first.
        """
        while self._copying:
            try:
                unit.start_gather(wait=False)
                return
            except TierMemoryError as error:
                if error.tier != Tier.CPU.value:
                    raise
                self._copying.popleft().release_lease(wait=True)
        unit.start_gather()

    def follow_step(self) -> None:
        """The optimizer steps the partitions of units, in the plan's order, and may still be at it. Collective.
        See [Note: refresh].
        """
        self._outdated.clear()
        at_once: list[Unit] = []
        for unit in self._trained:
            unit.stepped()
            if self._plan.refreshed_at_use(unit.layout.index):
                unit.outdate(hide=True)
                self._outdated.append(unit)
            else:
                at_once.append(unit)
        self.refresh(at_once)

    def update(self, unit: Unit) -> None:
        """Bring a unit that is whole for good up to date, and begin to bring those that are stepped by now."""
        self.gather(unit)
        waiting = self._outdated
        while waiting and (waiting[0].state is not GatherState.PARTITIONED or self._store.readable_now(waiting[0].key)):
            self.gather(waiting.popleft())
        unit.finish_gather()

    @property
    def outdated(self) -> bool:
        """Whether a unit that is whole for good is still to be brought up to date."""
        return any(unit.state is GatherState.PARTITIONED for unit in self._outdated)

    def refresh(self, units: Sequence[Unit]) -> None:
        """Bring those of the units that are whole for good up to date with partitions that were written. Collective.

        One gather goes on while the next one waits for its partition. No later gather would return what their copies
        hold of a pool, so the host waits for those out of a pool here.
        """
        latest: Unit | None = None
        for unit in units:
            if not unit.placed.whole:
                continue
            if self._copying:
                self.prefetch(unit)
            unit.outdate(hide=False)
            self._start_gather(unit)
            if latest is not None:
                latest.finish_gather()
            latest = unit
            if unit.leasing and unit.placed.param.on_drive:
                self._copying.append(unit)
        if latest is not None:
            latest.finish_gather()
        self.return_partitions()

    def return_partitions(self) -> None:
        """Return every partition that is still copied from. The host waits for the copies."""
        while self._copying:
            self._copying.popleft().release_lease(wait=True)

    def release(self, unit: Unit, *, retain: bool = True) -> None:
        """Release a gathered unit. With `retain`, its bytes may stay for the next gathers."""
        if unit.layout.index in self._held:
            unit.release(keep_bytes=self._count_released(unit, retain=retain))

    def release_idle(self) -> None:
        """Release every gathered unit that is not in use."""
        for unit in map(self._units.__getitem__, self._held.live):
            if unit not in self._users:
                self.release(unit)

    @contextmanager
    def holding(self, units: Sequence[Unit], *, retain: bool = False) -> Iterator[None]:
        """A block in which `units` are gathered and their partitions are free to be written. Collective.

        A unit that nothing else uses is released at the end; `retain` as in `release`.
        """
        held: list[Unit] = []
        try:
            for unit in units:
                self.begin_use(unit)
                held.append(unit)
                self.gather(unit)
                unit.finish_gather()
                # The block may write the partition or need its buffer's room before the next look at the copy.
                unit.release_lease(wait=True)
            yield
        finally:
            for unit in held:
                if self.end_use(unit):
                    self.release(unit, retain=retain)

    def next_step(self) -> None:
        """The optimizer is about to change parameters: release what is idle and return all leases of partitions."""
        self.release_idle()
        for unit in self._units:
            unit.release_lease(wait=True)
        self._copying.clear()

    def abandon(self) -> None:
        """A pass has raised: release every unit whatever uses it, and free what is retained.

        A unit whose gather is still running stays gathered: waiting for it might fail the same way.
        """
        self._users.clear()
        if self._spare is not None:
            self._spare.trim(0)
        for unit in self._units:
            unit.abandon()
            unit.free()
        self._held = self._nothing_held()
        for unit in self._units:
            if not unit.placed.whole and unit.state is not GatherState.PARTITIONED:
                self._held.gather(unit.layout.index, unit.layout.nbytes)

    def close(self) -> None:
        """Bring what is outdated up to date: the program keeps it. What no step has reached stays partitioned, if that
        has failed with an error, which the optimizer raises.
        """
        for unit in self._outdated:
            with suppress(Exception):
                self.gather(unit)
                unit.finish_gather()
        self._outdated.clear()

    def check(self) -> None:
        """Compare what is tracked with the units: for tests."""
        cut = [unit for unit in self._units if not unit.placed.whole]
        live = [unit for unit in cut if unit.state is not GatherState.PARTITIONED]
        retained = [unit for unit in cut if unit.state is GatherState.PARTITIONED and unit.buffer.has_bytes]
        assert {unit.layout.index for unit in live} == {*self._held.live}, "other units are gathered"
        assert {unit.layout.index for unit in retained} == {*self._held.retained}, "other units retain their bytes"
        assert self._held.live_nbytes == sum(unit.layout.nbytes for unit in live)
        assert self._held.retained_nbytes == sum(unit.layout.nbytes for unit in retained)

    def _nothing_held(self) -> UnitMemory:
        return UnitMemory(self._plan.pools.gathered_nbytes, retain=self._plan.policy.retain_released)

    def _make_room(self, unit: Unit) -> None:
        """Count a unit as gathered, and free what retained and spare bytes the plan has no room for beside it."""
        room = self._held.gather(unit.layout.index, unit.layout.nbytes)
        for index in room.freed:
            self._units[index].free(to_spare=True)
        if self._spare is not None and room.spare_nbytes_max is not None:
            self._spare.trim(room.spare_nbytes_max)

    def _count_released(self, unit: Unit, *, retain: bool) -> bool:
        """Count a unit as released. Returns whether it retains its bytes."""
        return unit.layout.index in self._held and self._held.release(unit.layout.index, retain=retain)


# Bytes read to measure a drive: enough for its rate, too few to delay the step.
_PROBE_NBYTES = 64 << 20


class PrefetchTimer:
    """Marks the uses of one pass: `begin_use` before a use's gather, and `arrived` after it, when computing begins."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._begun: list[Any] = []
        self._arrived: list[Any] = []
        self._end: Any = None

    def begin_use(self) -> None:
        self._begun.append(self._device.mark())

    def arrived(self) -> None:
        self._arrived.append(self._device.mark())

    def stop(self) -> None:
        """Mark the end of the pass."""
        self._end = self._device.mark()

    def use_seconds(self) -> tuple[float, ...]:
        """Wait for the device; return the seconds from each use's arrival to the beginning of the next use."""
        self._device.synchronize()
        ends = [*self._begun[1:], self._end]
        return tuple(
            max(self._device.seconds_between(begin, end), 0.0) for begin, end in zip(self._arrived, ends, strict=True)
        )


def agree(
    measured: tuple[tuple[UnitAccess, ...], tuple[float, ...]] | None, units: Sequence[Unit], store: TieredStore,
    device: Device, group: AxisGroup, memory: GatheredMemory,
) -> tuple[tuple[UnitAccess, ...], Timing] | None:  # fmt: skip
    """(uses, timing) for all ranks: the slowest rates and the shortest computations; None where their passes differ.
    Collective. `measured` is a pass of this rank and its seconds of computation, if it was timed.
    """
    uses, seconds = measured if measured is not None else ((), ())
    rates = [fetch_rate(units, store), gather_rate(units, store, device, memory)]
    # Six bytes, so that a float holds them.
    digest = int.from_bytes(hashlib.sha256(str(uses).encode()).digest()[:6], "big")
    mine = [float(digest), *rates, -store.ahead_nbytes / rates[0]]
    rows = exchange(mine, group, "exchange of rates")
    if not uses or len({row[0] for row in rows}) > 1:
        return None
    _, fetch, gather, latency = (min(column) for column in zip(*rows, strict=True))
    everyone = exchange([*seconds], group, "exchange of times")
    shortest = [min(column) for column in zip(*everyone, strict=True)]
    return uses, Timing(use_seconds=tuple(shortest), fetch_rate=fetch, gather_rate=gather, fetch_latency=-latency)


def fetch_rate(units: Sequence[Unit], store: TieredStore) -> float:
    """Read some partitions again; return bytes a second from NVMe to CPU memory, infinite if none is on NVMe."""
    chosen, nbytes = [], 0
    for unit in units:
        spec = store[unit.key].spec
        if spec.home.on_drive and nbytes + spec.nbytes <= max(_PROBE_NBYTES, spec.nbytes):
            chosen.append(unit.key)
            nbytes += spec.nbytes
    store.drop(*chosen)
    fresh = [key for key in chosen if not store.in_memory(key)]
    began = time.perf_counter()
    store.prefetch(*fresh)
    for key in fresh:
        with store.read(key):
            pass
    seconds = time.perf_counter() - began
    moved = sum(store[key].spec.nbytes for key in fresh)
    return moved / seconds if moved else float("inf")


def gather_rate(units: Sequence[Unit], store: TieredStore, device: Device, memory: GatheredMemory) -> float:
    """Gather the largest unit; return bytes a second from CPU memory and the other ranks to it. Collective."""
    apart = [unit for unit in units if not unit.placed.whole and unit.state is GatherState.PARTITIONED]
    if not apart:
        return float("inf")
    largest = max(apart, key=lambda unit: unit.layout.nbytes)
    with store.read(largest.key):
        began = time.perf_counter()
        with memory.holding([largest], retain=True):
            device.synchronize()
            seconds = time.perf_counter() - began
    return largest.layout.nbytes / seconds


# The step of an engine after which a pass is timed.
_WATCHED_STEP = 2
# Traces whose schedules are remembered.
_SCHEDULES_MAX = 16
# Length after which a trace is no longer recorded.
_TRACE_MAX = 100_000


class _Pass:
    """One forward, with its backward in training: the trace of its uses, and the cursor in the schedule."""

    def __init__(self, mode: str, schedule: FetchSchedule) -> None:
        self.mode = mode
        self.schedule = schedule
        self.trace: list[UnitAccess] = []
        self.cursor = -1
        # Whether a use was not the scheduled one.
        self.off_schedule = False

    def advance(self, use: UnitAccess) -> int | None:
        """Record a use. Returns its position in the schedule; None where the rest of the schedule does not have it."""
        if len(self.trace) < _TRACE_MAX:
            self.trace.append(use)
        expected = self.cursor + 1
        if expected < len(self.schedule) and self.schedule.uses[expected] == use:
            self.cursor = expected
            return expected
        self.off_schedule = True
        try:
            self.cursor = self.schedule.trace.index(use.unit, expected)
        except ValueError:
            return None
        return self.cursor

    @property
    def followed(self) -> bool:
        """Whether the pass went exactly as scheduled."""
        return not self.off_schedule and self.cursor + 1 == len(self.schedule)


class Prefetcher:
    """Executes the fetch schedule of each pass ("train" or "eval")."""

    def __init__(self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, memory: GatheredMemory) -> None:
        self._units = list(units)
        self._plan = plan
        # Whether all ranks must gather in one order.
        self._collective = plan.topology.dp > 1
        self._store = store
        self._memory = memory
        self._known: dict[tuple[UnitAccess, ...], FetchSchedule] = {plan.followed.uses: plan.followed}
        self._schedules: dict[str, FetchSchedule] = {"train": plan.followed, "eval": plan.followed}
        self._pass: _Pass | None = None
        # Units that a pass of one rank was to gather ahead, had their partitions been there.
        self._late: list[Unit] = []
        # The position of each unit's latest use in the schedule; a unit used off the schedule has no entry.
        self._positions: dict[Unit, int] = {}
        # The timer of the pass under way or of the next one, and the latest training pass that was timed in full.
        self._timer: PrefetchTimer | None = None
        self._timed: tuple[tuple[UnitAccess, ...], PrefetchTimer] | None = None
        # Of this engine, not of the run: one that is taken up is timed, too.
        self._steps = 0
        # How many passes did not go as scheduled: a figure instead of a flood of warnings.
        self.mismatches = 0

    @property
    def mode(self) -> str | None:
        """The mode of the pass under way; None between passes."""
        return self._pass.mode if self._pass is not None else None

    def begin_pass(self, mode: str) -> None:
        """Begin a pass, unless one is under way."""
        if self._pass is None:
            self._pass = _Pass(mode, self._schedules[mode])

    def end_pass(self) -> None:
        """End the pass under way; a trace that was not the scheduled one is the next pass's schedule."""
        ended, self._pass = self._pass, None
        self._late.clear()
        if ended is None or not ended.trace:
            return
        trace = tuple(ended.trace)
        if self._timer is not None and ended.mode == "train":
            self._timer.stop()
            self._timed, self._timer = (trace, self._timer), None
        if not ended.followed and len(trace) < _TRACE_MAX:
            self.mismatches += 1
            self._schedules[ended.mode] = self._schedule(trace)

    def leave_pass(self) -> None:
        """Forget the pass under way and its trace."""
        self._pass = None
        self._late.clear()

    def abandon(self) -> None:
        """A pass has raised: forget it, and its times."""
        self._pass = self._timer = None
        self._late.clear()

    def bring_routed(self, unit: Unit, ahead: Unit | None) -> None:
        """Gather a unit whose use data has decided, and fetch the one whose use comes next."""
        self._memory.gather(unit)
        if ahead is not None:
            self._memory.prefetch(ahead)
            wanted = self._plan.policy.gather_ahead and self._plan.budget.gather_routed_ahead
            if wanted and (self._collective or self._store.readable_now(ahead.key)):
                self._memory.gather(ahead)
        unit.finish_gather()

    def bring(self, unit: Unit, *, needed: bool) -> None:
        """Gather a unit whose use begins, if its weights are `needed`, and submit what the schedule has ahead of it."""
        position = self._pass.advance(UnitAccess(unit.layout.index, needed)) if self._pass is not None else None
        if position is None:
            self._positions.pop(unit, None)
        else:
            self._positions[unit] = position
        timer = self._timer if self.mode == "train" else None
        if timer is not None:
            timer.begin_use()
        if needed:
            self._memory.gather(unit)
            if self._pass is not None and self._pass.cursor >= 0:
                self._submit_ahead(self._pass)
            unit.finish_gather()
        if timer is not None:
            timer.arrived()

    def keeps(self, unit: Unit) -> bool:
        """Whether the schedule keeps a unit gathered beyond its latest use."""
        position = self._positions.get(unit)
        if self._pass is None or position is None:
            return False
        schedule = self._pass.schedule
        # A use without weights keeps what lies there for a later use.
        return schedule.keep[position] or not schedule.uses[position].needed

    def count_step(self, step: OptimizerStep, device: Device, group: AxisGroup) -> None:
        """A step is decided: time one warm training pass after it, or take up what was timed and from then on prefetch
        as late as the times allow. Collective.
        """
        count, self._steps = self._steps, self._steps + 1
        if not self._plan.policy.time_prefetch or count not in (_WATCHED_STEP, _WATCHED_STEP + 1):
            return
        if count == _WATCHED_STEP:
            self._timer = PrefetchTimer(device)
            return
        # The drive is measured alone: a step that has begun in backward would share it.
        step.synchronize()
        measured = None if self._timed is None else (self._timed[0], self._timed[1].use_seconds())
        found = agree(measured, self._units, self._store, device, group, self._memory)
        if found is not None:
            trace, timing = found
            self._known[trace] = self._plan.reschedule(trace, timing)
            if self._schedules["train"].uses == trace:
                self._schedules["train"] = self._known[trace]

    def _submit_ahead(self, now: _Pass) -> None:
        if now.off_schedule and self._memory.live_nbytes > self._plan.budget.live_nbytes_max:
            # Off the schedule, units kept for later uses may take the room that is needed now.
            self._memory.release_idle()
        # The nearest use first: a later one waits when there is no room for both.
        late, self._late = self._late, []
        for unit in (*late, *(self._units[index] for index in now.schedule.gather_ahead[now.cursor])):
            if not self._plan.policy.gather_ahead:
                self._memory.prefetch(unit)
            elif self._collective or self._store.readable_now(unit.key):
                self._memory.gather(unit)
            else:
                # Waiting for the drive would keep the unit of this use from being computed with.
                self._memory.prefetch(unit)
                self._late.append(unit)
        self._memory.prefetch(*(self._units[index] for index in now.schedule.fetch_ahead[now.cursor]))

    def _schedule(self, trace: tuple[UnitAccess, ...]) -> FetchSchedule:
        if trace not in self._known:
            if len(self._known) >= _SCHEDULES_MAX:
                self._known.pop(next(iter(self._known)))
            self._known[trace] = self._plan.reschedule(trace)
        return self._known[trace]
