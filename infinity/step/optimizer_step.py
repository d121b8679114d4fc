"""The stepper: one pass over the sub-groups of a rank. Prefetch the next, step this one in place, flush the previous.

It knows partitions, layouts and hyper-parameters. The plan says what a sub-group is, where it lives and in which order
sub-groups are stepped.

[Note: step behind the program] Under the plan's policy `step_behind`, a thread (`step_worker`) steps the sub-groups
that the program cannot see, because their units are gathered before use, while the next forward runs. It does so under
a reservation: a gather of a unit that is not stepped yet waits in the store. What the thread steps first is read while
the last gradients are still to come. Units that stay whole are gathered again after such a step: see [Note: refresh] in
`infinity.zero.gather`.

[Note: step in backward] If nothing has to be known about all gradients before the first is used (no clipping, no check
for NaN), the thread begins during backward: it steps a sub-group as soon as the gradients of all its units are there,
each parameter's. (Which parameters have a gradient on some rank is agreed on only at the boundary.) If the drive does
not keep up, the sub-groups that the next forward needs first overtake the others: see `infinity.plan.orders`.

Such a step is a guess: that no more gradients come, that hyper-parameters stay, that `step()` is called at all. It
begins only for sub-groups whose old values stay on NVMe (see [Note: slots]); until `step()` every reader gets those.
`step()` compares the guess with what holds then. If it was right, the new values are committed; else everything is
stepped from the old ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from infinity.errors import StateError
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.transaction import Reservation
from infinity.ops.adam import GradStats
from infinity.optim.update_rules import StepContext, UpdateRule
from infinity.plan.layout import Slot, SubGroup
from infinity.plan.partitions import SOON_UNITS, STEP_READS, first_reads
from infinity.plan.plan import Plan, model_params
from infinity.plan.types import Key, Kind
from infinity.step.norms import Norms
from infinity.step.update import StepPass, SubGroupUpdater, in_memory, prefetch
from infinity.step.worker import StepWorker

# So many times a step may begin in a backward that was not the last of its step; then none does any more.
_HASTY_MAX = 2


class StepperState(enum.Enum):
    """Where the program is between two steps. What goes on behind it is the worker's business."""

    # No gradient has arrived since the last step.
    IDLE = "idle"
    # Gradients arrive; some sub-groups may be stepped already: see [Note: step in backward].
    ACCUMULATING = "accumulating"
    # Inside `step`.
    STEPPING = "stepping"


@dataclass(slots=True)
class _EarlyStep:
    """A step that has begun in backward, and what it assumes: see [Note: step in backward]."""

    behind: StepPass
    hyper: tuple[Any, ...]
    group_of: Mapping[str, int]
    grad_scale: float
    # Units whose gradients are complete.
    complete: set[int] = field(default_factory=set)
    # By unit, the assumed step count of each parameter.
    steps: dict[int, list[int]] = field(default_factory=dict)

    @property
    def begun(self) -> set[int]:
        return self.behind.begun

    @property
    def reservation(self) -> Reservation:
        assert self.behind.reservation is not None
        return self.behind.reservation

    def is_right(self, context: StepContext) -> bool:
        """Whether the step that is taken is the one that was assumed."""
        alike = (self.hyper, self.grad_scale) == (context.hyper, context.grad_scale)
        return alike and self.group_of is context.group_of and all(
            all(context.arrived[unit]) and context.steps[unit] == assumed for unit, assumed in self.steps.items()
        )  # fmt: skip


class Stepper:
    """One optimizer over a plan's sub-groups.

    index: this rank's place among the ranks that share a unit.
    grad_bound: each gradient element is clamped to this magnitude, once scaled.
    """

    def __init__(
        self, plan: Plan, store: TieredStore, *, device: Device, index: int, rule: UpdateRule,
        grad_bound: float = math.inf,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._store = store
        self.rule = rule
        # Steps that each parameter of the model has taken, also of other stages: one without a gradient is not stepped,
        # as in torch.
        params = {name: param for name, param in model_params(plan).items() if param.trainable}
        self.steps: dict[str, int] = dict.fromkeys(params, 0)
        # The parameter group of each one; replaced, never changed.
        self._group_of: Mapping[str, int] = {name: param.group for name, param in params.items()}
        # How often states may have changed: what was read of them before is old.
        self.age = 0
        self._parts = plan.step_parts()
        self._updater = SubGroupUpdater(plan, store, rule, device=device, index=index, grad_bound=grad_bound)
        self._worker = StepWorker(store, device)
        self._norms = Norms(plan, store, index=index)
        self._state = StepperState.IDLE
        # Units whose gradients are still to come before the next step.
        self._expected: set[int] = set()
        # The step that has begun in this backward; how often one was begun in a backward that was not the last.
        self._early: _EarlyStep | None = None
        self._hasty = 0
        # By unit, the sub-groups that may be stepped in backward.
        self._groups_of: dict[int, list[SubGroup]] = {}
        for group in self._parts.in_backward:
            for piece in group.slices:
                self._groups_of.setdefault(piece.unit, []).append(group)
        store.keep(*(Key(Kind.STATES, index) for index in plan.kept()))

    def parameter_scalars(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer keeps of a parameter in one value, by name, for those that this rank steps."""
        if not self.rule.joins:
            # A step that goes on changes them.
            self.finish()
        return self.rule.parameter_scalars(self.steps)

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `parameter_scalars()` of all ranks has returned; `steps` are already those of that time."""
        self.rule.load_parameter_scalars(singles, self.steps)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """From now on step each parameter with the group that is named for it, and none without. The same on every
        rank.
        """
        self._group_of = dict(group_of)

    def _move(self, to: StepperState) -> None:
        """Change the state. StateError inside a step, which only ends."""
        if self._state is StepperState.STEPPING and to is not StepperState.IDLE:
            raise StateError(f"the stepper cannot go from {self._state.value} to {to.value}")
        self._state = to

    # As gradients arrive.

    def start_in_backward(self, groups: Sequence[Mapping[str, Any]], *, grad_scale: float) -> None:
        """Let the step begin in the backward that comes: see [Note: step in backward]. Arguments as of `step`."""
        self._move(StepperState.ACCUMULATING)
        # A unit with a parameter that is in no group is stepped with what has arrived.
        whole = len(self._group_of) == len(self.steps)
        if self._groups_of and whole and self._early is None and self._hasty < _HASTY_MAX:
            behind = StepPass(self._parts.hidden, self._store, self._updater, Reservation(pending=True))
            self._early = _EarlyStep(behind, tuple(map(self.rule.hyper, groups)), self._group_of, grad_scale)

    def on_accumulated(self, unit: int, arrived: Sequence[bool], *, final: bool) -> None:
        """Note that a unit's gradients have been accumulated.

        arrived: which of the unit's parameters have a gradient. final: whether this is probably the last time before
        the step.
        """
        self._move(StepperState.ACCUMULATING)
        self._norms.forget(unit)
        if self._early is not None and final:
            self._norms.measure([unit], None)
            self._step_early(self._early, unit, arrived)
        elif final and self._plan.policy.step_behind:
            self._read_ahead(unit)
            if units := self._norms.batch(unit):
                reservation = Reservation()
                self._store.access.reserve(reservation, *(Key(Kind.GRAD, each) for each in units))
                self._worker.submit(reservation, self._norms.measure, units, reservation)

    def before_more(self, unit: int) -> None:
        """Note that a unit's gradients are about to change: do not begin to measure them."""
        self._norms.unqueue(unit)

    def forget(self) -> None:
        """Drop the accumulated gradients, and what was stepped with them."""
        self._move(StepperState.IDLE)
        self._forget_early()

    def reset(self) -> None:
        """Finish what has begun, before all values are replaced."""
        self.age += 1
        self.forget()
        self.finish()

    def grad_stats(self) -> dict[int, GradStats]:
        """Return the sum of squares (fp64) of this rank's accumulated gradients, and their non-finite elements' number,
        for each trained unit, in the plan's order.

        Waits for what goes on behind the program, except for a step that has begun in backward.
        """
        if self._early is None:
            self.finish()
        return self._norms.by_unit()

    def parameter_stats(self) -> dict[tuple[int, Slot], GradStats]:
        """Return the same of each parameter, by (unit, slot): of the latest step's gradients, until the next backward.

        Counts only this rank's elements.
        """
        return self._norms.by_parameter(self._worker.latest)

    def _read_ahead(self, unit: int) -> None:
        """Begin to read what the step needs first once backward has only a few units' gradients to deliver."""
        self._expected = self._expected or {piece.unit for group in self._parts.hidden for piece in group.slices}
        self._expected.discard(unit)
        if len(self._expected) == SOON_UNITS:
            for group in first_reads(self._parts.hidden, partial(in_memory, self._store)):
                if not prefetch(self._store, None, group):
                    break

    def _step_early(self, early: _EarlyStep, unit: int, arrived: Sequence[bool]) -> None:
        """Step the sub-groups that have all gradients now."""
        if any(group.index in early.begun for group in self._groups_of.get(unit, ())):
            # That was not the last backward of the step: a program that does so once will again.
            self._hasty += 1
            self._forget_early()
            return
        if early.reservation.forgotten or not all(arrived):
            # Another rank may have the others: that is known at the boundary.
            return
        early.complete.add(unit)
        for group in self._groups_of.get(unit, ()):
            units = {piece.unit for piece in group.slices}
            if units <= early.complete:
                steps = {index: [self.steps[slot.name] + 1 for slot in self._slots(index)] for index in units}
                flags = {index: [True] * len(self._slots(index)) for index in units}
                early.steps.update(steps)
                with self._worker.failing(early.reservation):
                    early.behind.reserve([group])
                    context = StepContext(early.hyper, early.group_of, early.grad_scale, flags, steps)
                    self._let_step(early.behind, context, [group])

    def _forget_early(self) -> None:
        early, self._early = self._early, None
        if early is not None:
            self._store.access.forget(early.reservation)

    # Steps.

    def step(
        self, groups: Sequence[Mapping[str, Any]], *, grad_scale: float, arrived: Mapping[int, Sequence[bool]]
    ) -> None:
        """Step every parameter that has a gradient; the visible ones are stepped on return, the others reserved.

        groups: the live parameter groups (lr, betas, eps, weight_decay).
        grad_scale: multiplies every gradient (unscaling, averaging and clipping in one).
        arrived: by unit, which of its parameters have had a gradient on any rank.
        """
        self._move(StepperState.STEPPING)
        try:
            self.age += 1
            hyper = tuple(map(self.rule.hyper, groups))
            steps = self._count(arrived)
            self._step(StepContext(hyper, self._group_of, grad_scale, arrived, steps, self._updater.mark()))
        finally:
            self._move(StepperState.IDLE)

    def count_elsewhere(self, names: Iterable[str]) -> None:
        """Count the step that was taken for parameters that ranks of other stages step."""
        for name in self._group_of.keys() & names:
            self.steps[name] += 1

    def _count(self, arrived: Mapping[int, Sequence[bool]]) -> dict[int, list[int]]:
        """Count this step for every parameter that takes it; return all step counts, by unit."""
        for index, flags in arrived.items():
            for slot, flag in zip(self._slots(index), flags, strict=True):
                # A parameter in tiles counts once: its tiles have their gradients together.
                self.steps[slot.name] += flag and slot.ends and slot.name in self._group_of
        return {index: [self.steps[slot.name] for slot in self._slots(index)] for index in arrived}

    def _step(self, context: StepContext) -> None:
        behind = self._commit_early(context)
        if behind is None:
            self.finish()
            behind = StepPass(self._parts.hidden, self._store, self._updater, Reservation())
        self._expected = set()
        rest = [group for group in self._parts.hidden if group.index not in behind.begun]
        assert behind.reservation is not None
        with self._worker.failing(behind.reservation):
            # Reserved before anything is stepped: if that fails, readers of the rest must not get the old values.
            behind.reserve(rest)
            # The drive has something to do while the visible ones are stepped.
            for group in rest[: STEP_READS - 1]:
                prefetch(self._store, behind.reservation, group)
            visible = StepPass(self._parts.visible, self._store, self._updater, None)
            visible.add(self._parts.visible, context)
            visible.run(len(self._parts.visible), self._worker.stopping)
            self._let_step(behind, context, rest)

    def _commit_early(self, context: StepContext) -> StepPass | None:
        """Return the step that has begun in backward if it was begun as this one; else forget it."""
        early = self._early
        if early is not None and early.is_right(context) and self._store.access.commit(early.reservation):
            self._early = None
            return early.behind
        self._forget_early()
        return None

    def _let_step(self, behind: StepPass, context: StepContext, groups: Sequence[SubGroup]) -> None:
        """Make these sub-groups ready, and let the worker step as many: those whose turn it is."""
        behind.add(groups, context)
        behind.fetch_next()
        if groups:
            assert behind.reservation is not None
            self._worker.submit(behind.reservation, behind.run, len(groups), self._worker.stopping)

    def finish(self) -> None:
        """Wait for everything that goes on behind the program; raise what went wrong with it."""
        self._worker.finish()

    def check(self) -> None:
        """Raise what has gone wrong behind the program; does not wait."""
        self._worker.check()

    def close(self, *, at_once: bool = False) -> None:
        """Finish what has begun (with `at_once`, only the sub-group in work) and end the thread.

        Raises what went wrong, unless it has been raised before.
        """
        self._worker.close(at_once=at_once)

    def _slots(self, unit: int) -> Sequence[Slot]:
        return self._plan.layouts[unit].slots
