"""The device memory of gathered units: which units are gathered and in use, and what their bytes add up to.

`UnitMemory` decides which released units retain their bytes for the next gathers. It keeps the totals: no gather
scans all units. This module carries the decisions out: a unit that gives up its bytes leaves their pages as spare pages
to other units.

[Note: refresh] A unit that is whole for good has to follow its partition after a step. Where the states lie on the
device, the device does both in order. Elsewhere the step takes its time, so each unit follows as soon as its own
sub-groups are stepped, while others still are. If that needs other ranks, `step()` gathers unit after unit, in one
order on all ranks. If it does not, `step()` returns before: the unit looks partitioned until its next use, a module's
or the program's own, which waits for this unit's step only and begins to bring those that are stepped by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from infinity.memory.resizable_buffer import SparePages
from infinity.memory.store import TieredStore
from infinity.plan.plan import Plan
from infinity.plan.unit_memory import UnitMemory
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
            unit.start_gather()
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

    def follow_step(self, units: Sequence[Unit]) -> None:
        """The optimizer steps the partitions of these units, in this order, and may still be at it. Collective.
        See [Note: refresh].
        """
        self._outdated.clear()
        at_once: list[Unit] = []
        for unit in units:
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
            unit.start_gather()
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
