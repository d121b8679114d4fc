"""The device memory of gathered units: which units are gathered and in use, and what their bytes add up to.

Where the device's memory is the process's (the CPU), a released unit leaves its bytes to the next gathers, because the
system is slow to hand out pages again. These retained bytes and the gathered ones together stay within the plan's
`gathered_nbytes`: the unit released longest ago is freed first, and its pages become spare pages for other units.

Totals are tracked where they change, so that no gather scans all units; `check` compares them with the sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from infinity.memory.resizable_buffer import SparePages
from infinity.memory.store import TieredStore
from infinity.plan.plan import Plan
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
        self._nbytes_max = plan.pools.gathered_nbytes
        # Open uses of each unit; a unit without one has no entry.
        self._users: dict[Unit, int] = {}
        # Gathered units, and units that were gathered before and still have their bytes; both oldest first.
        self._live: dict[Unit, None] = {}
        self._retained: dict[Unit, None] = {}
        self.live_nbytes = self._retained_nbytes = 0
        # Units whose copy to the device may still read their partition, in the order of the copies.
        self._copying: deque[Unit] = deque()

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
        if self._spare is not None:
            self._make_room(unit, self._spare)
        unit.start_gather()
        if not unit.placed.whole:
            self._live[unit] = None
            self.live_nbytes += unit.layout.nbytes
        if unit.leasing:
            self._copying.append(unit)

    def release(self, unit: Unit, *, retain: bool = True) -> None:
        """Release a gathered unit. With `retain`, its bytes may stay for the next gathers."""
        if unit not in self._live:
            return
        retain = retain and self._spare is not None
        unit.release(keep_bytes=retain)
        del self._live[unit]
        self.live_nbytes -= unit.layout.nbytes
        if retain:
            self._retained[unit] = None
            self._retained_nbytes += unit.layout.nbytes

    def release_idle(self) -> None:
        """Release every gathered unit that is not in use."""
        for unit in [unit for unit in self._live if unit not in self._users]:
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
        self._retained.clear()
        self._retained_nbytes = 0
        if self._spare is not None:
            self._spare.trim(0)
        for unit in self._units:
            unit.abandon()
            unit.free()
        self._live = dict.fromkeys(unit for unit in self._live if unit.state is not GatherState.PARTITIONED)
        self.live_nbytes = sum(unit.layout.nbytes for unit in self._live)

    def check(self) -> None:
        """Compare what is tracked with the units: for tests."""
        live = {unit for unit in self._units if not unit.placed.whole and unit.state is not GatherState.PARTITIONED}
        assert live == self._live.keys(), "gathered units are not those that are tracked"
        assert self.live_nbytes == sum(unit.layout.nbytes for unit in live)
        kept = [unit for unit in self._units if not unit.placed.whole and unit not in live and unit.buffer.has_bytes]
        assert set(kept) == self._retained.keys(), "released units with bytes are not those that are retained"
        assert self._retained_nbytes == sum(unit.layout.nbytes for unit in kept)

    def _make_room(self, unit: Unit, spare: SparePages) -> None:
        """Free retained bytes until the unit's own fit into the plan, oldest first. Their pages become spare pages, of
        which only as many stay as the plan has room for.
        """
        if unit in self._retained:
            self._forget_retained(unit)
            return
        while self._retained and self._held_nbytes + unit.layout.nbytes > self._nbytes_max:
            oldest = next(iter(self._retained))
            self._forget_retained(oldest)
            oldest.free(to_spare=True)
        spare.trim(max(self._nbytes_max - self._held_nbytes, unit.layout.nbytes))

    @property
    def _held_nbytes(self) -> int:
        return self.live_nbytes + self._retained_nbytes

    def _forget_retained(self, unit: Unit) -> None:
        del self._retained[unit]
        self._retained_nbytes -= unit.layout.nbytes
