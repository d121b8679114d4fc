"""The coordinator: at each use of a unit, submit what comes next, wait for this one, release as planned.

It follows the plan's fetch schedule with a cursor. When the model does something else (a conditional layer,
evaluation in between, a module called twice) it finds its place again or fetches on demand, and at the end of the
pass asks the plan for a schedule of what really happened. Schedules of traces seen before are kept, so that
alternating between them costs nothing.

[Note: waiting] A unit's gradients are collected when no forward call of it waits for its backward any more. Those calls
are held weakly: one whose graph was dropped, a loss that was only looked at, is not waited for without end. A graph may
go at any moment and on any thread, with the collector too, so nothing happens then: the next backward forgets such
calls as it begins. Ranks that gather have to be ready with the same units at the same time, not only in the same order:
one would wait for a reduction that another starts after a gather, for which it waits in its turn. So they agree on what
is forgotten, and whether they ask each other follows from the program alone. The same holds for passes: they begin and
end by what the program calls, never by what is still alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import nn

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import on_any_rank
from infinity.errors import StateError
from infinity.memory.resizable_buffer import SparePages
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.plan.plan import Plan
from infinity.plan.prefetch import FetchSchedule, Timing, UnitAccess
from infinity.zero.gradients import Gradients
from infinity.zero.parameter import WHOLE_MODEL_USES, is_released, name_of
from infinity.zero.prefetch_timing import PrefetchTimer
from infinity.zero.unit import GatherState, Unit

# Traces whose schedules are remembered, and the length after which a trace is no longer recorded.
_SCHEDULES_MAX = 16
_TRACE_MAX = 100_000
# Calls that wait for their backward before those are looked for whose graph is gone.
_WAITING_MAX = 10_000
# Lanes of a recording.
FORWARD, BACKWARD = "modules, forward", "modules, backward"


class ModuleCall:
    """One call of a hooked module: the units it needs, in forward and again in its backward. lookup: the weights of
    those given are not needed there.
    """

    __slots__ = ("__weakref__", "generations", "held", "in_backward", "looked_up", "number", "units")

    def __init__(self, units: Sequence[Unit], *, lookup: bool = False) -> None:
        self.units = list(units)
        # The first so many of them are a lookup's.
        self.looked_up = len(units) if lookup else 0
        # Among the calls that wait for their backward; 0 for others.
        self.number = 0
        # Of its units' values, as its forward has seen them.
        self.generations: list[int] = []
        # Between the first gradient of its outputs and the last gradient of its inputs.
        self.in_backward = False
        # Kept gathered from its forward to its backward: recomputation inside a backward pass.
        self.held = False


class Coordinator:
    """Runs the fetch schedule over a rank's units. See the module's text."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, gradients: Gradients, group: AxisGroup,
        spare: SparePages | None,
    ) -> None:  # fmt: skip
        self._units = list(units)
        self._plan = plan
        self._store = store
        self._gradients = gradients
        self._group = group
        # Memory of released units is left to the next gathers, as far as the plan has it: for a device whose allocator
        # gives memory back to the system, which is slow to take again. Such a device has spare pages.
        self._spare = spare
        self._retained: dict[Unit, None] = {}
        # Gathered in each forward and backward by all ranks together.
        self._cut = {unit for unit in units if unit.placed.parts > 1 and not unit.placed.whole}
        self._unit_of: dict[int, Unit] = {id(param): unit for unit in units for param in unit.params}
        self._known: dict[tuple[UnitAccess, ...], FetchSchedule] = {plan.schedule.uses: plan.schedule}
        self._schedules: dict[str, FetchSchedule] = {"train": plan.schedule, "eval": plan.schedule}
        self._mode: str | None = None
        self._trace: list[UnitAccess] = []
        self._cursor = -1
        self._strayed = False
        # Units whose copy to the device may still read their partition.
        self._landing: list[Unit] = []
        self._open: list[ModuleCall] = []
        # Calls whose backward may come, with their units, by number; the last number before the latest forward of the
        # whole model. See [Note: waiting].
        self._waiting: dict[int, tuple[weakref.ref[ModuleCall], list[Unit]]] = {}
        self._numbers = 0
        self._latest_forward = 0
        self._backward: list[ModuleCall] = []
        self.in_backward = False
        self.closed = False
        # The latest training pass in full, when it was timed: see `use_times`.
        self._watch: PrefetchTimer | None = None
        self._watched: tuple[tuple[UnitAccess, ...], PrefetchTimer] | None = None
        # How often a pass did not go as scheduled: a figure, not a flood of warnings.
        self.mismatches = 0

    def unit_of(self, param: nn.Parameter) -> Unit:
        """The unit that has a parameter."""
        return self._unit_of[id(param)]

    # Forward.

    def begin_pass(self, mode: str) -> None:
        """A forward of the whole model begins ("train" or "eval"). A training pass ends with its backward, or where its
        forward ends without a gradient, one in evaluation at the latest when the next one begins.
        """
        if self._mode == "eval" and not self._open and not self.in_backward:
            self.end_pass()
        if len(self._waiting) > _WAITING_MAX:
            self._forget_dropped()
        self._latest_forward = self._numbers
        if not self._open:
            for unit in self._units:
                if unit.placed.whole:
                    unit.begin_use()
        if self._mode is None:
            self._mode, self._trace, self._cursor, self._strayed = mode, [], -1, False

    def end_forward(self) -> None:
        """It is over. StateError where it has changed in place what is whole for good; other units tell themselves."""
        for unit in self._units:
            if unit.placed.whole and (changed := unit.end_use()) is not None:
                raise changed

    def watch(self, device: Device) -> None:
        """Time the next training pass."""
        self._watch = PrefetchTimer(device)

    def use_times(self) -> tuple[tuple[UnitAccess, ...], tuple[float, ...]] | None:
        """(trace, seconds of computation from each use to the next) of the pass that `watch` timed, if it was whole."""
        if self._watched is None:
            return None
        trace, watch = self._watched
        return trace, watch.use_seconds()

    def retime(self, trace: tuple[UnitAccess, ...], timing: Timing) -> None:
        """Follow a schedule that submits nothing earlier than it has to. Must be the same on every rank."""
        self._known[trace] = self._plan.reschedule(trace, timing)
        if self._schedules["train"].uses == trace:
            self._schedules["train"] = self._known[trace]

    @contextmanager
    def gathered(self, unit: Unit) -> Iterator[None]:
        """A block in which a unit is whole that nobody uses, within the plan's bytes. Collective."""
        self._gather(unit)
        unit.finish_gather()
        yield
        self._release(unit)

    def open_scope(self, units: Sequence[Unit], *, lookup: bool = False) -> ModuleCall:
        """A hooked module is about to run: gather its units. lookup: their weights are not needed in its backward."""
        scope = ModuleCall(units, lookup=lookup)
        self._open.append(scope)
        for unit in scope.units:
            self._use(unit)
        trace.begin_async(FORWARD, scope)
        return scope

    def close_scope(self, scope: ModuleCall, *, will_return: bool, may_hold: bool = True) -> None:
        """The module has run. `will_return`: its outputs carry gradients, so that its backward will come through
        here. `may_hold`: whether its units may stay gathered until a backward that comes at once.
        """
        trace.end_async(FORWARD, scope)
        while self._open and self._open[-1] is not scope:
            # A forward that was left by an exception did not close its inner scopes.
            self._leave(self._open.pop())
        if self._open:
            self._open.pop()
        if will_return:
            self.await_backward(scope)
        if will_return and self.in_backward and may_hold:
            # Recomputed inside backward, with a backward of its own to come at once: releasing now would gather twice.
            scope.held = True
            self._backward.append(scope)
            return
        self._leave(scope)

    def await_backward(self, scope: ModuleCall) -> None:
        """Gradients of the scope's units are not complete before its backward has run: see [Note: waiting]."""
        self._numbers += 1
        scope.number = self._numbers
        self._waiting[scope.number] = weakref.ref(scope), scope.units
        scope.generations = [unit.generation for unit in scope.units]
        for unit in scope.units:
            unit.pending += 1

    def opened(self, unit: Unit) -> bool:
        """Whether a module call that runs now has the unit among its own."""
        return any(unit in scope.units for scope in self._open)

    def materialize(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Partitioned parameters' data is needed: inside a forward their units join the innermost module's units."""
        for param in params:
            if not is_released(param):
                continue
            unit = self._unit_of[id(param)]
            if self.closed:
                raise StateError(
                    f"{name_of(param)} was left on its tier when the engine was closed, and {use} needs its data: read "
                    "it before close() with infinity.read(param)"
                )
            if self._open:
                self._open[-1].units.append(unit)
                self._use(unit)
            elif self.in_backward:
                self._use(unit)
                unit.users -= 1
            else:
                raise StateError(f"{name_of(param)} is partitioned, and {use} needs its data: {_instead(use)}")

    # Backward.

    def begin_backward(self, *, scaled: bool = False) -> bool:
        """True for the first caller of a backward pass, who must see to it that `end_backward` is called.

        `scaled`: the engine runs it, and has scaled the loss.
        """
        first = not self.in_backward
        self.in_backward = True
        if first or scaled:
            self._gradients.scaled = scaled
        if first:
            self._forget_dropped()
        return first

    def join_backward(self) -> None:
        """Called inside a backward: when nobody called engine.backward, a plain loss.backward() ends where autograd
        says so.
        """
        if self.begin_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def enter_backward(self, scope: ModuleCall) -> None:
        """The first gradient of the module's outputs has arrived: gather again what its backward needs."""
        if scope.in_backward:
            return
        for index, (unit, generation) in enumerate(zip(scope.units, scope.generations, strict=False)):
            if unit.generation != generation and index >= scope.looked_up:
                raise StateError(
                    f"the weights of {unit.layout.name} have changed (by engine.step() or infinity.modify()) since the "
                    "forward whose backward runs now, and its gradients need those of that time: run that forward again"
                )
        scope.in_backward = True
        if not scope.held:
            self._backward.append(scope)
            for index, unit in enumerate(scope.units):
                self._use(unit, needed=index >= scope.looked_up)
        trace.begin_async(BACKWARD, scope)

    def leave_backward(self, scope: ModuleCall) -> None:
        """All gradients of the module's inputs are there, or backward is over: its units are done with this call."""
        if not scope.in_backward and not scope.held:
            return
        trace.end_async(BACKWARD, scope)
        scope.in_backward = scope.held = False
        self._backward.remove(scope)
        if self._waiting.pop(scope.number, None) is not None:
            for unit in scope.units:
                unit.pending -= 1
                if unit.pending == 0:
                    self._gradients.ready(unit)
        self._leave(scope)

    def end_backward(self) -> None:
        """Backward is over: close what had no input to announce it, collect all gradients, release everything idle."""
        for scope in reversed(self._backward[:]):
            self.leave_backward(scope)
        self.in_backward = False
        self._gradients.end_backward()
        if not self._open:
            self.end_pass()

    def abandon(self) -> None:
        """Forward or backward raised: forget all open scopes and release every unit."""
        self._open.clear()
        self._backward.clear()
        self._waiting.clear()
        self.in_backward = False
        self._mode = self._watch = None
        self._gradients.abandon_backward()
        self._retained.clear()
        if self._spare is not None:
            self._spare.trim(0)
        for unit in self._units:
            unit.users = unit.pending = 0
            unit.abandon()
            unit.free()

    def end_pass(self, mode: str | None = None) -> None:
        """The pass is over, if it is one of this mode: learn its trace if it was not the scheduled one, and release
        what nobody uses.
        """
        if mode is not None and self._mode not in (None, mode):
            return
        mode, self._mode = self._mode, None
        if self._watch is not None and mode == "train" and self._trace:
            self._watch.stop()
            self._watched, self._watch = (tuple(self._trace), self._watch), None
        if mode is not None and self._trace and len(self._trace) < _TRACE_MAX:
            schedule = self._schedules[mode]
            if self._strayed or self._cursor + 1 != len(schedule):
                self.mismatches += 1
                self._schedules[mode] = self._schedule(tuple(self._trace))
        self._release_idle()

    def close(self) -> None:
        """Drop the pass under way; from here on weights that are left on their tiers cannot be made whole."""
        self.abandon()
        self.closed = True

    def check_unchanged(self) -> None:
        """StateError where the program has changed a parameter in place that the next step would set back."""
        for unit in self._units:
            if (changed := unit.changed_beside()) is not None:
                raise changed

    def next_step(self) -> None:
        """The optimizer is about to change parameters: nothing stays gathered, no forward waits for its backward."""
        self._mode = None
        self._waiting.clear()
        for unit in self._units:
            unit.pending = 0
        self._release_idle()
        for unit in self._units:
            unit.release_lease(wait=True)
        self._landing.clear()

    def _forget_dropped(self) -> None:
        """Wait no longer for calls before the latest forward whose graph is gone: see [Note: waiting]."""
        # Numbers grow: in a plain loop the first is of the latest forward already.
        calls = dict(takewhile(lambda call: call[0] <= self._latest_forward, self._waiting.items()))
        needed = {unit for scope, units in calls.values() if scope() is not None for unit in units}
        if any(unit in self._cut for _, units in calls.values() for unit in units):
            mine = [unit in needed for unit in self._units]
            anywhere = on_any_rank(mine, self._group, "forwards that wait for their backward")
            needed = {unit for unit, flag in zip(self._units, anywhere, strict=True) if flag}
        for number, (_, units) in calls.items():
            if needed.isdisjoint(units):
                del self._waiting[number]
                for unit in units:
                    unit.pending -= 1

    # Use of one unit.

    def _use(self, unit: Unit, *, needed: bool = True) -> None:
        unit.users += 1
        if unit.placed.whole:
            return
        # While it is in use another use is no event of the trace: how often a module is called inside one that has its
        # weights (a tile of tokens each time) may differ from rank to rank, and schedules may not.
        if unit.users == 1 or not unit.visible:
            with trace.span(trace.ENGINE, "use", unit.key):
                self._bring(unit, needed=needed)
        if unit.users == 1:
            unit.begin_use()

    def _bring(self, unit: Unit, *, needed: bool) -> None:
        self._advance(UnitAccess(unit.layout.index, needed), unit)
        watch = self._watch if self._mode == "train" else None
        if watch is not None:
            watch.begin_use()
        if needed:
            self._gather(unit)
            self._submit_ahead()
            unit.finish_gather()
        if watch is not None:
            watch.arrived()

    def _gather(self, unit: Unit) -> None:
        """Start a gather. It may have to wait for the optimizer: what that might need is returned before."""
        if unit.state is not GatherState.PARTITIONED:
            return
        if self._landing:
            waits = self._store.access.reserved(unit.key)
            self._landing = [other for other in self._landing if not other.release_lease(wait=waits)]
        if self._spare is not None:
            self._make_room(unit, self._spare)
        unit.start_gather()
        if unit.leasing:
            self._landing.append(unit)

    def _make_room(self, unit: Unit, spare: SparePages) -> None:
        """Free what released units have retained, oldest first, until the unit's bytes are within the plan. Its pages
        are those that they leave; of what is spare beyond that, so much stays as the plan has room for.
        """
        self._retained.pop(unit, None)
        if unit.has_bytes:
            return
        held = self._live_nbytes() + sum(other.layout.nbytes for other in self._retained if other.has_bytes)
        while self._retained and held + unit.layout.nbytes > self._plan.pools.gathered_nbytes:
            oldest = next(iter(self._retained))
            del self._retained[oldest]
            held -= oldest.layout.nbytes
            oldest.free(to_spare=True)
        spare.trim(max(self._plan.pools.gathered_nbytes - held, unit.layout.nbytes))

    def _release(self, unit: Unit) -> None:
        if unit.state is not GatherState.PARTITIONED:
            unit.release(keep_bytes=self._spare is not None)
            if self._spare is not None:
                self._retained[unit] = None

    def _leave(self, scope: ModuleCall) -> None:
        changed: StateError | None = None
        for unit in scope.units:
            unit.users -= 1
            if unit.users <= 0 and not unit.placed.whole:
                changed = changed or unit.end_use()
                if self._keep(unit):
                    unit.set_placeholders()
                else:
                    self._release(unit)
        if changed is not None:
            raise changed

    def _advance(self, use: UnitAccess, unit: Unit) -> None:
        """Move the cursor to this use in the scheduled trace, or find the next place that fits."""
        if self._mode is None:
            unit.position = None
            return
        if len(self._trace) < _TRACE_MAX:
            self._trace.append(use)
        schedule = self._schedules[self._mode]
        expected = self._cursor + 1
        if expected < len(schedule) and schedule.uses[expected] == use:
            self._cursor = unit.position = expected
            return
        self._strayed = True
        try:
            self._cursor = unit.position = schedule.trace.index(use.unit, expected)
        except ValueError:
            unit.position = None

    def _submit_ahead(self) -> None:
        if self._mode is None or self._cursor < 0:
            return
        schedule = self._schedules[self._mode]
        if self._strayed and self._live_nbytes() > self._plan.budget.live_nbytes_max:
            # Off the schedule, what was kept for later uses may be in the way.
            self._release_idle()
        # The nearest first: what comes later waits when there is no room for both.
        for index in schedule.gather_ahead[self._cursor]:
            if self._plan.policy.gather_ahead:
                self._gather(self._units[index])
            else:
                self._store.prefetch(self._units[index].key)
        self._store.prefetch(*(self._units[index].key for index in schedule.fetch_ahead[self._cursor]))

    def _keep(self, unit: Unit) -> bool:
        if self._mode is None or unit.position is None:
            return False
        schedule = self._schedules[self._mode]
        # What a later use needs may lie there when one comes that does not.
        return schedule.keep[unit.position] or not schedule.uses[unit.position].needed

    def _live_nbytes(self) -> int:
        return sum(
            unit.layout.nbytes
            for unit in self._units
            if not unit.placed.whole and unit.state is not GatherState.PARTITIONED
        )

    def _release_idle(self) -> None:
        for unit in self._units:
            if unit.users <= 0 and not unit.placed.whole:
                self._release(unit)

    def _schedule(self, trace: tuple[UnitAccess, ...]) -> FetchSchedule:
        if trace not in self._known:
            if len(self._known) >= _SCHEDULES_MAX:
                self._known.pop(next(iter(self._known)))
            self._known[trace] = self._plan.reschedule(trace)
        return self._known[trace]


def _instead(use: str) -> str:
    """What to call in place of a use of partitioned data."""
    if use not in WHOLE_MODEL_USES:
        return "use `with infinity.read(param):` to read it or `with infinity.modify(param):` to change it"
    return (
        "call engine.export(folder) for a Hugging Face folder, engine.save_checkpoint(folder) to go on from, or "
        "engine.state_dict() for full tensors on rank 0's CPU, each on every rank; or do it inside infinity.read(model)"
    )
