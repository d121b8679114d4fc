"""The coordinator: what happens to a unit when a module begins or ends its use in forward and in backward.

Hooks tell it about module calls. It composes four parts, and calls them downwards only: `ModuleCalls` knows which calls
are open, `GatheredMemory` gathers and releases, the `Prefetcher` follows the plan's schedule, and `Gradients` collects
what backward has left on the parameters.

Which module calls are open in forward and in backward, and which wait for their backward.

[Note: waiting] A unit's gradients are collected when no forward call of it waits for its backward any more. Calls are
held by weak reference, so a freed graph (a loss computed only for logging) never blocks collection. A graph may be
freed at any moment and on any thread, also by the garbage collector, so nothing happens then: the next backward
forgets such calls as it begins. Ranks that gather must be ready with the same units at the same time, not only in the
same order: otherwise one rank waits for a reduction that another starts after a gather, and that gather waits for the
first rank. So the ranks agree on what is forgotten, and whether they exchange this follows from the program alone. The
same holds for passes: they begin and end by what the program calls, never by which graphs are still alive.

[Note: overlapping micro-batches] In a step of a pipeline forwards of later micro-batches run before the backward of an
earlier one. A unit's gradients are collected when the calls of *one micro-batch* are through: with one count for all,
the gradients of a whole stage would lie on its parameters. The schedule says which backwards come, so that no graph is
dropped meanwhile and none is looked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import torch
from torch import nn

from infinity.base import trace
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import Veto, on_any_rank
from infinity.errors import StateError
from infinity.memory.resizable_buffer import SparePages
from infinity.memory.store import TieredStore
from infinity.plan.plan import Plan
from infinity.zero.gather import GatheredMemory, Prefetcher
from infinity.zero.gradients import Gradients
from infinity.zero.parameter import WHOLE_MODEL_USES, is_released, name_of
from infinity.zero.unit import Unit

# Waiting calls above which those whose graph is gone are looked for before the next backward.
_WAITING_MAX = 10_000


def refuse_transform(name: str) -> None:
    """Raise StateError where a transform of torch.func would go through weights that are released before its backward.

    No hook of ours is told of that backward. A pass without gradients needs none.
    """
    if torch._C._are_functorch_transforms_active() and torch.is_grad_enabled():
        raise StateError(
            f"a transform of torch.func (grad, jacrev, vmap, ...) goes through {name}, whose weights are released "
            "before its backward: call it inside `with torch.no_grad(), infinity.read(model):`, which keeps them (the "
            "result is no part of a graph then); call vmap without gradients inside torch.no_grad(); or use "
            "zero_optimization.stage 2"
        )


class ModuleCall:
    """One call of a hooked module: the units it needs, in forward and again in its backward.

    lookup: the call only looks rows up in the weights of `units` (an embedding), so its backward does not need them.
    before, after: of a call that data has decided on, the units of those next to it, which forward and backward will
    need next; None at the ends.
    """

    __slots__ = (
        "__weakref__", "_generations", "after", "before", "held", "in_backward", "looked_up", "number", "units",
    )  # fmt: skip

    def __init__(
        self, units: Sequence[Unit], *, lookup: bool = False, before: Unit | None = None, after: Unit | None = None
    ) -> None:
        self.units = list(units)
        self.before, self.after = before, after
        # How many of the first units are only looked up in.
        self.looked_up = len(units) if lookup else 0
        # Position among the calls that wait for their backward, from 1; 0 for a call that does not wait.
        self.number = 0
        # Generation of each unit's values at the end of forward.
        self._generations: list[int] = []
        # Between the first gradient of its outputs and the last gradient of its inputs.
        self.in_backward = False
        # Kept gathered from its forward to its backward: recomputation inside a backward pass.
        self.held = False

    def wait(self, number: int) -> None:
        """The call's forward is over, and its backward may come."""
        self.number = number
        self._generations = [unit.versions.generation for unit in self.units]

    def hold(self) -> None:
        """Keep the units gathered until the backward, which comes at once."""
        self.held = True

    def begin_backward(self) -> None:
        """The first gradient of the outputs has arrived. StateError if the weights have changed since the forward."""
        for index, (unit, generation) in enumerate(zip(self.units, self._generations, strict=False)):
            if unit.versions.generation != generation and index >= self.looked_up:
                raise StateError(
                    f"the weights of {unit.layout.name} have changed (by engine.step() or infinity.modify()) since the "
                    "forward whose backward runs now, and its gradients need those of that time: run that forward again"
                )
        self.in_backward = True

    def end_backward(self) -> None:
        """All gradients of the inputs have arrived, or the backward pass is over."""
        self.in_backward = self.held = False


class ModuleCalls:
    """The open and the waiting module calls of one engine. It gathers and releases nothing itself."""

    def __init__(self, units: Sequence[Unit], group: AxisGroup) -> None:
        self._units = list(units)
        self.group = group
        # Units that all ranks gather together in each forward and backward.
        self._cut = {unit for unit in units if unit.placed.parts > 1 and not unit.placed.whole}
        self._open: list[ModuleCall] = []
        self._backward: list[ModuleCall] = []
        self.in_backward = False
        # Calls whose backward may come, with their units, by number. See [Note: waiting].
        self._waiting: dict[int, tuple[weakref.ref[ModuleCall], list[Unit], int | None]] = {}
        # How many of those calls each unit has, by micro-batch; a unit without one has no entry.
        self._pending: dict[tuple[Unit, int | None], int] = {}
        # The micro-batch at hand where several overlap; None elsewhere. See [Note: overlapping micro-batches].
        self.micro_batch: int | None = None
        # The number of the latest waiting call, and what it was when the latest forward of the model began.
        self._numbers = 0
        self._latest_forward = 0

    @property
    def innermost(self) -> ModuleCall | None:
        """The open call that was opened last."""
        return self._open[-1] if self._open else None

    @property
    def together(self) -> bool:
        """Whether ranks gather units together."""
        return self.group.size > 1 and bool(self._cut)

    def awaits(self, unit: Unit) -> bool:
        """Whether a call that has the unit waits for its backward."""
        return (unit, self.micro_batch) in self._pending

    def is_open(self, unit: Unit) -> bool:
        """Whether an open call has the unit among its own."""
        return any(unit in call.units for call in self._open)

    def use_micro_batch(self, micro_batch: int | None) -> None:
        """The next forward or backward is of this micro-batch. See [Note: overlapping micro-batches]."""
        self.micro_batch = micro_batch

    # Forward.

    def begin_forward(self) -> None:
        """A forward of the whole model begins."""
        if len(self._waiting) > _WAITING_MAX and self.micro_batch is None:
            self._forget_dropped()
        self._latest_forward = self._numbers

    def open(self, call: ModuleCall) -> None:
        """The call's module is about to run."""
        self._open.append(call)

    def close(self, call: ModuleCall) -> Iterator[ModuleCall]:
        """The call's module has run. Yields inner calls that an exception has left open; they are closed, too."""
        while self._open and self._open[-1] is not call:
            yield self._open.pop()
        if self._open:
            self._open.pop()

    def await_backward(self, call: ModuleCall) -> None:
        """The gradients of the call's units are incomplete until its backward has run. See [Note: waiting]."""
        self._numbers += 1
        call.wait(self._numbers)
        self._waiting[call.number] = weakref.ref(call), call.units, self.micro_batch
        for unit in call.units:
            key = unit, self.micro_batch
            self._pending[key] = self._pending.get(key, 0) + 1

    # Backward.

    def begin_backward(self) -> bool:
        """A backward pass begins or goes on. True if it begins; calls whose graph is gone are forgotten then."""
        if self.in_backward:
            return False
        self.in_backward = True
        if self.micro_batch is None:
            self._forget_dropped()
        return True

    def hold(self, call: ModuleCall) -> None:
        """Count a recomputed call, whose backward comes at once, as entered with its units gathered."""
        call.hold()
        self._backward.append(call)

    def enter_backward(self, call: ModuleCall) -> bool:
        """The call's backward begins. Returns whether its units must be gathered for it."""
        call.begin_backward()
        if not call.held:
            self._backward.append(call)
        return not call.held

    def leave_backward(self, call: ModuleCall) -> list[Unit]:
        """The call's backward is over. Returns the units that no waiting call needs any more."""
        call.end_backward()
        self._backward.remove(call)
        return self._stop_waiting(call.number)

    def waits(self, call: ModuleCall) -> bool:
        """Whether the call's backward is still to come."""
        return call.number in self._waiting

    def stop_waiting(self, call: ModuleCall) -> list[Unit]:
        """The gradients of a call are there. Returns the units that no waiting call needs any more."""
        return self._stop_waiting(call.number)

    def entered(self) -> list[ModuleCall]:
        """The calls that are in their backward, the latest first."""
        return self._backward[::-1]

    def end_backward(self) -> None:
        """The backward pass is over."""
        self.in_backward = False

    # Both.

    def next_step(self) -> None:
        """The optimizer is about to change parameters: no forward waits for its backward any more."""
        self._waiting.clear()
        self._pending.clear()

    def abandon(self) -> None:
        """Forward or backward has raised: forget all calls."""
        self.next_step()
        self._open.clear()
        self._backward.clear()
        self.in_backward = False
        self.micro_batch = None

    def _stop_waiting(self, number: int) -> list[Unit]:
        """Forget a waiting call. Returns the units that no other one needs."""
        _, units, micro_batch = self._waiting.pop(number, (None, (), None))
        done = []
        for unit in units:
            key = unit, micro_batch
            self._pending[key] -= 1
            if not self._pending[key]:
                del self._pending[key]
                done.append(unit)
        return done

    def _forget_dropped(self) -> None:
        """Forget the calls before the latest forward whose graph is gone. Collective where units are cut."""
        # Numbers grow: in a plain loop the first one belongs to the latest forward already.
        calls = dict(takewhile(lambda call: call[0] <= self._latest_forward, self._waiting.items()))
        needed = {unit for call, units, _ in calls.values() if call() is not None for unit in units}
        if any(unit in self._cut for _, units, _ in calls.values() for unit in units):
            mine = [unit in needed for unit in self._units]
            anywhere = on_any_rank(mine, self.group, "forwards that wait for their backward")
            needed = {unit for unit, flag in zip(self._units, anywhere, strict=True) if flag}
        for number, (_, units, _) in calls.items():
            if needed.isdisjoint(units):
                self._stop_waiting(number)


# Lanes of a recording.
FORWARD, BACKWARD = "modules, forward", "modules, backward"


class Coordinator:
    """Gathers, releases and collects as modules run. Called from the training thread or, in backward, autograd's."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, gradients: Gradients, group: AxisGroup,
        spare: SparePages | None,
    ) -> None:  # fmt: skip
        """spare: as in `GatheredMemory`."""
        self.calls = ModuleCalls(units, group)
        self.memory = GatheredMemory(units, plan=plan, store=store, spare=spare)
        self.prefetcher = Prefetcher(units, plan=plan, store=store, memory=self.memory)
        self._gradients = gradients
        self._whole = [unit for unit in units if unit.placed.whole]
        self._unit_of: dict[int, Unit] = {id(param): unit for unit in units for param in unit.params}
        # Whether a whole step is one pass: see `pass_of_step`.
        self._overlapping = False
        self.closed = False
        # Asked in front of each gather: see `heeding`.
        self._veto: Veto | None = None

    def unit_of(self, param: nn.Parameter) -> Unit:
        """The unit that has a parameter, which is not in tiles: those lie in several units."""
        return self._unit_of[id(param)]

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass is under way."""
        return self.calls.in_backward

    @property
    def mismatches(self) -> int:
        """How many passes did not go as scheduled."""
        return self.prefetcher.mismatches

    # A step of several micro-batches.

    @contextmanager
    def pass_of_step(self, mode: str) -> Iterator[None]:
        """A block in which forwards and backwards of several micro-batches are one pass, in an order that the plan's
        schedule has. Before each, `use_micro_batch` says whose it is. An error abandons the pass, as elsewhere.
        """
        if not self.in_backward:
            self.end_pass()
        self.prefetcher.begin_pass(mode)
        self._overlapping = True
        try:
            yield
        finally:
            self._overlapping = False
            self.calls.use_micro_batch(None)
        self.end_pass()

    def use_micro_batch(self, micro_batch: int) -> None:
        """The next forward or backward is of this micro-batch."""
        self.calls.use_micro_batch(micro_batch)

    # Forward.

    @contextmanager
    def heeding(self, veto: Veto | None) -> Iterator[None]:
        """A block in which the ranks ask `veto`, if there is one, in front of each gather; Vetoed is raised there."""
        self._veto = veto
        try:
            yield
        finally:
            self._veto = None

    def begin_pass(self, mode: str) -> None:
        """A forward of the whole model begins ("train" or "eval"). A training pass ends with its backward, or with its
        forward if that has no gradient; a pass in evaluation at the latest when the next one begins.
        """
        idle = self.calls.innermost is None
        if self.prefetcher.mode == "eval" and idle and not self.in_backward and not self._overlapping:
            self.end_pass()
        self.calls.begin_forward()
        for unit in self._whole if idle else ():
            if unit.vacant:
                # On all ranks alike. One that is only outdated waits for its own step when a module uses it.
                self.memory.gather(unit)
                unit.finish_gather()
            unit.begin_use()
        self.prefetcher.begin_pass(mode)

    def end_forward(self) -> None:
        """The forward is over. StateError if it has changed in place what is whole for good; `close_scope` looks after
        the other units.
        """
        for unit in self._whole:
            if (changed := unit.end_use()) is not None:
                raise changed

    def open_scope(
        self, units: Sequence[Unit], *, lookup: bool = False, before: Unit | None = None, after: Unit | None = None
    ) -> ModuleCall:
        """A hooked module is about to run: gather its units. lookup, before, after: as in `ModuleCall`."""
        self.check_transform(units)
        call = ModuleCall(units, lookup=lookup, before=before, after=after)
        self.calls.open(call)
        for unit in call.units:
            self._use(unit, ahead=after)
        trace.begin_async(FORWARD, call)
        return call

    def close_scope(self, call: ModuleCall, *, will_return: bool, may_hold: bool = True) -> None:
        """The module has run. will_return: its outputs carry gradients, so that its backward will come through here.
        may_hold: whether its units may stay gathered until a backward that comes at once.
        """
        trace.end_async(FORWARD, call)
        for inner in self.calls.close(call):
            self._leave(inner)
        if will_return:
            self.calls.await_backward(call)
        if will_return and self.in_backward and may_hold:
            # Recomputed inside backward: releasing the units now would mean to gather them twice.
            self.calls.hold(call)
        else:
            self._leave(call)

    @property
    def gathers_on_use(self) -> bool:
        """Whether an operation gathers the parameters that it uses: during a forward or a backward."""
        return not self.closed and (self.calls.innermost is not None or self.in_backward)

    def materialize(self, params: Sequence[nn.Parameter], use: str) -> None:
        """Gather partitioned parameters whose data is used. Inside a forward their units join the innermost call's."""
        for param in params:
            if not is_released(param):
                continue
            unit = self.unit_of(param)
            if self.closed:
                raise StateError(
                    f"{name_of(param)} was left on its tier when the engine was closed, and {use} needs its data: keep "
                    "the weights with engine.close(keep_weights=True), or read it before with infinity.read(param)"
                )
            if unit.placed.whole and not unit.vacant:
                # No use of the innermost call's: it would have its gradients collected at another time.
                self._update(unit)
            elif (call := self.calls.innermost) is not None:
                self.check_transform([unit])
                call.units.append(unit)
                self._use(unit)
            elif self.in_backward:
                self._use(unit)
                # Released with everything idle when backward ends.
                self.memory.end_use(unit)
            else:
                raise StateError(f"{name_of(param)} is partitioned, and {use} needs its data: {_instead(use)}")

    def check_transform(self, units: Sequence[Unit]) -> None:
        """StateError if a transform of torch.func is about to use units that nothing keeps until its backward."""
        if torch._C._are_functorch_transforms_active():
            for unit in units:
                if not unit.placed.whole and not self.memory.in_use(unit):
                    refuse_transform(unit.layout.name)

    # Backward.

    def begin_backward(self, *, scaled: bool = False, chunk: int = 0, collects: bool = True) -> bool:
        """Begin a backward pass, unless one is under way. True for the caller that began it and must see to it that
        `end_backward` is called. scaled: the engine runs this backward, and has scaled the loss. chunk, collects: as in
        `Gradients.begin_backward`.
        """
        first = self.calls.begin_backward()
        if first or scaled:
            self._gradients.begin_backward(scaled=scaled, chunk=chunk, collects=collects)
        return first

    def join_backward(self) -> None:
        """Called inside a backward. A plain loss.backward(), without engine.backward(), ends where autograd says."""
        if self.begin_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self.end_backward)

    def enter_backward(self, call: ModuleCall) -> None:
        """The first gradient of the module's outputs has arrived: gather again what its backward needs."""
        if call.in_backward:
            return
        if self.calls.enter_backward(call):
            for index, unit in enumerate(call.units):
                self._use(unit, needed=index >= call.looked_up, ahead=call.before)
        trace.begin_async(BACKWARD, call)

    def leave_backward(self, call: ModuleCall) -> None:
        """All gradients of the module's inputs are there, or backward is over: its units are done with this call."""
        if not call.in_backward and not call.held:
            return
        trace.end_async(BACKWARD, call)
        for unit in self.calls.leave_backward(call):
            self._gradients.ready(unit)
        self._leave(call)

    def pass_by(self, units: Sequence[Unit]) -> None:
        """Backward has come by units that no forward of it has used: experts that nobody has chosen."""
        for unit in units:
            if not self.calls.awaits(unit):
                self._gradients.ready(unit)

    def on_any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Whether a flag is set on one of the ranks that gather together. Collective where there are several."""
        return on_any_rank(flags, self.calls.group, "which experts are used") if self.calls.together else [*flags]

    def collect(self, call: ModuleCall) -> None:
        """The gradients of a waiting call are there, which enters no backward of its own."""
        for unit in self.calls.stop_waiting(call):
            self._gradients.ready(unit)

    def end_backward(self) -> None:
        """Backward is over: close the calls without an input to announce it, collect all gradients, release what is
        idle.
        """
        for call in self.calls.entered():
            self.leave_backward(call)
        self.calls.end_backward()
        self._gradients.end_backward()
        if self.calls.innermost is None:
            self.end_pass()

    # Between passes.

    def end_pass(self, mode: str | None = None) -> None:
        """The pass is over, if it is one of this mode: remember its trace, and release what is idle."""
        if not self._overlapping and (mode is None or self.prefetcher.mode in (None, mode)):
            self.prefetcher.end_pass()
            self.memory.release_idle()

    def check_unchanged(self) -> None:
        """StateError if the program has changed a parameter in place that the next step would set back."""
        for unit in self._whole:
            if (changed := unit.changed_beside()) is not None:
                raise changed

    def next_step(self) -> None:
        """The optimizer is about to change parameters: nothing stays gathered, no forward waits for its backward."""
        self.prefetcher.leave_pass()
        self.calls.next_step()
        self.memory.next_step()

    def abandon(self) -> None:
        """Forward or backward has raised: forget all calls and release every unit."""
        self._overlapping = False
        self.calls.abandon()
        self.prefetcher.abandon()
        self._gradients.abandon_backward()
        self.memory.abandon()

    def close(self) -> None:
        """Release everything; a released parameter that is used from now on raises StateError."""
        self.abandon()
        self.memory.close()
        self.closed = True

    # Use of one unit.

    def _use(self, unit: Unit, *, needed: bool = True, ahead: Unit | None = None) -> None:
        first = self.memory.begin_use(unit)
        if unit.placed.whole:
            self._update(unit)
            return
        # A use inside another one is no event of the trace: how often a module is called inside one that has its
        # weights (a tile of tokens each time) may differ from rank to rank, and schedules may not.
        if first or not unit.visible:
            if self._veto is not None:
                self._veto.ask(unit.layout.name)
            with trace.span(trace.ENGINE, "use", unit.key):
                if unit.layout.routed:
                    self.prefetcher.bring_routed(unit, ahead)
                else:
                    self.prefetcher.bring(unit, needed=needed)
        if first:
            unit.begin_use()

    def _update(self, unit: Unit) -> None:
        """Bring a unit that is whole for good up to date with the latest step, before its use."""
        if not unit.visible:
            with trace.span(trace.ENGINE, "use", unit.key):
                self.memory.update(unit)
            unit.begin_use()

    def _leave(self, call: ModuleCall) -> None:
        """The call does not use its units any more. StateError if it has changed one of them in place."""
        changed: StateError | None = None
        for unit in call.units:
            if self.memory.end_use(unit) and not unit.placed.whole:
                changed = changed or unit.end_use()
                if self.prefetcher.keeps(unit):
                    unit.set_placeholders()
                else:
                    self.memory.release(unit)
        if changed is not None:
            raise changed


def _instead(use: str) -> str:
    """What to call in place of a use of partitioned data."""
    if use not in WHOLE_MODEL_USES:
        return "use `with infinity.read(param):` to read it or `with infinity.modify(param):` to change it"
    return (
        "call engine.export(folder) for a Hugging Face folder, engine.save_checkpoint(folder) to go on from, or "
        "engine.state_dict() for full tensors on rank 0's CPU, each on every rank; or do it inside infinity.read(model)"
    )
