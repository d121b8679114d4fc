"""Which module calls are open in forward and in backward, and which wait for their backward.

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
from itertools import takewhile

import torch

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import on_any_rank
from infinity.errors import StateError
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
    """

    __slots__ = ("__weakref__", "_generations", "held", "in_backward", "looked_up", "number", "units")

    def __init__(self, units: Sequence[Unit], *, lookup: bool = False) -> None:
        self.units = list(units)
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
        self._group = group
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
            anywhere = on_any_rank(mine, self._group, "forwards that wait for their backward")
            needed = {unit for unit, flag in zip(self._units, anywhere, strict=True) if flag}
        for number, (_, units, _) in calls.items():
            if needed.isdisjoint(units):
                self._stop_waiting(number)
