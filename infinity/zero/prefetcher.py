"""The prefetcher: walks the plan's fetch schedule as units are used, and submits what it has ahead of each use.

A cursor follows the schedule. When the model does something else (a conditional layer, evaluation in between, a module
called twice), the cursor finds its place again or the unit is fetched on demand, and at the end of the pass the plan
makes a schedule of what really happened. Schedules are remembered by trace: alternating between traces costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.plan import Plan
from infinity.plan.prefetch import FetchSchedule, Timing, UnitAccess
from infinity.zero.gathered_memory import GatheredMemory
from infinity.zero.prefetch_timing import PrefetchTimer
from infinity.zero.unit import Unit

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
        self._known: dict[tuple[UnitAccess, ...], FetchSchedule] = {plan.schedule.uses: plan.schedule}
        self._schedules: dict[str, FetchSchedule] = {"train": plan.schedule, "eval": plan.schedule}
        self._pass: _Pass | None = None
        # Units that a pass of one rank was to gather ahead, had their partitions been there.
        self._late: list[Unit] = []
        # The position of each unit's latest use in the schedule; a unit used off the schedule has no entry.
        self._positions: dict[Unit, int] = {}
        # The timer of the pass under way or of the next one, and the latest training pass that was timed in full.
        self._timer: PrefetchTimer | None = None
        self._timed: tuple[tuple[UnitAccess, ...], PrefetchTimer] | None = None
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

    def watch(self, device: Device) -> None:
        """Time the next training pass."""
        self._timer = PrefetchTimer(device)

    def use_times(self) -> tuple[tuple[UnitAccess, ...], tuple[float, ...]] | None:
        """(trace, seconds of computation from each use to the next) of the pass that was timed; None without one."""
        if self._timed is None:
            return None
        trace, timer = self._timed
        return trace, timer.use_seconds()

    def retime(self, trace: tuple[UnitAccess, ...], timing: Timing) -> None:
        """Submit for this trace as late as `timing` allows. The arguments must be the same on every rank."""
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
