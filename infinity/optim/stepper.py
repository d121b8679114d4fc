"""The stepper: one pass over the sub-groups of a rank. Prefetch the next, step this one in place, flush the previous.

It knows partitions, layouts and hyper-parameters; what a sub-group is, where it lives and in which order sub-groups are
stepped is the plan's business.

Under the plan's policy `step_behind`, a thread of its own steps the sub-groups that the program cannot see (their units
are gathered before use) while the next forward runs, under a reservation: a gather of a unit that is not stepped yet
waits in the store.
What it steps first is read while the last gradients are still to come. [Note: step behind the program]

Where nothing has to be known about all gradients before the first is used (no clipping, no check of all for NaN), the
thread begins during backward: a sub-group is stepped as soon as the gradients of its units are there, each parameter's
(which of them have one on some rank is only agreed on at the boundary). Where the drive does not follow, those that the
next forward needs first overtake the others: see `infinity.plan.ready_queue`. Such a step is a guess: that no more
gradients come, that hyper-parameters stay, that `step()` is called at all. So it begins only where the values of before
stay on NVMe (see [Note: slots]), which everybody sees until `step()`. There the guess is compared with what holds then:
where it was right the new values are committed, else all is stepped from those of before. [Note: step in backward]
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from infinity.memory.access_control import Reservation
from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.observability import trace
from infinity.ops.adam import GradStats
from infinity.optim.grad_norm import Norms
from infinity.optim.step_context import Segment, StepContext
from infinity.optim.update_rules import StepSlice, UpdateRule
from infinity.plan.layout import Slot, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.ready_queue import ReadyQueue
from infinity.plan.stepping import SOON_UNITS, STEP_READS, changed_by, first_reads
from infinity.plan.types import Key, Kind

# So many times a step may begin in a backward that was not the last of its step; then none does any more.
_HASTY_MAX = 2
# Gradients are measured behind the program when there are as many bytes of them, or as many units.
_MEASURED_NBYTES_MIN = 1 << 20
_MEASURED_UNITS_MAX = 64


@dataclass(slots=True)
class _Pass:
    """One step that goes on behind the program: what it holds, and which sub-groups still need each partition."""

    hyper: tuple[Any, ...]
    grad_scale: float
    reservation: Reservation
    uses: Counter[Key]
    turns: ReadyQueue[StepContext]
    # Units whose gradients are complete, and sub-groups that have been handed to the thread.
    complete: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    # By unit, the step counts that were assumed in backward.
    assumed: dict[int, list[int]] = field(default_factory=dict)


class Stepper:
    """One optimizer over a plan's sub-groups. `index` is this rank's among the ranks that share a unit; no element of a
    gradient, once scaled, is above `grad_bound`.
    """

    def __init__(
        self, plan: Plan, store: TieredStore, *, index: int, method: UpdateRule,
        grad_bound: float = math.inf,
    ) -> None:
        self._plan = plan
        self._grad_bound = grad_bound
        self._store = store
        self._index = index
        self._method = method
        # Steps that each parameter has taken: one without a gradient is not stepped, as in torch.
        self.steps: dict[str, int] = {
            slot.name: 0 for layout in plan.layouts if layout.trainable for slot in layout.slots
        }
        parts = plan.step_parts()
        self._visible, self._hidden = parts.visible, parts.hidden
        # See [Note: step behind the program].
        self._thread = ThreadPoolExecutor(1, "infinity-step") if plan.policy.step_behind else None
        self._under_way: list[tuple[Future[None], Reservation]] = []
        self._norms = Norms(plan, store, index=index)
        # Units whose gradients are complete and not yet measured, and the bytes of those.
        self._unmeasured: dict[int, int] = {}
        # Units whose gradients are still to come before the next step.
        self._expected: set[int] = set()
        # The step that has begun in this backward; how often one was begun in a backward that was not the last.
        self._early: _Pass | None = None
        self._hasty = 0
        self._stepped_behind = {piece.unit for group in self._hidden for piece in group.slices}
        # Those that may begin in backward, by unit.
        self._groups_of: dict[int, list[SubGroup]] = {}
        for group in parts.in_backward:
            for piece in group.slices:
                self._groups_of.setdefault(piece.unit, []).append(group)
        self._stopping = False
        store.keep(*(Key(Kind.STATES, index) for index in plan.kept()))

    @property
    def guarded(self) -> bool:
        """Whether elements are left alone whose gradient is not finite."""
        return self._method.guarded

    def parameter_scalars(self) -> dict[str, dict[str, Any]]:
        """What the optimizer keeps of a parameter in one value, by name, for those that this rank steps."""
        if not self._method.joins:
            # A step that goes on changes them.
            self.finish()
        return self._method.parameter_scalars(self.steps)

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `parameter_scalars()` of all ranks have given; `steps` are already those of that time."""
        self._method.load_parameter_scalars(singles, self.steps)

    @property
    def start(self) -> float:
        """The first value of what the optimizer keeps of an element."""
        return self._method.start

    # As gradients arrive.

    def start_in_backward(self, groups: Sequence[Mapping[str, Any]], *, grad_scale: float) -> None:
        """The backward before a step begins: see [Note: step in backward]. Arguments as of `step`."""
        if self._groups_of and self._early is None and self._hasty < _HASTY_MAX:
            self._early = self._pass(tuple(map(self._method.hyper, groups)), grad_scale, pending=True)

    def forget(self) -> None:
        """The gradients are not wanted, or others come: nothing is left of a step that has begun with them."""
        early, self._early = self._early, None
        if early is not None:
            self._store.access.forget(early.reservation)

    def reset(self) -> None:
        """All values are about to be replaced: finish what has begun, and leave it at that."""
        self.forget()
        self.finish()

    def on_accumulated(self, unit: int, arrived: Sequence[bool], *, final: bool) -> None:
        """A unit's gradients have been accumulated, those of `arrived` parameters. `final`: probably the last time
        before the step.
        """
        self._norms.forget(unit)
        if self._early is not None:
            self._norms.measure([unit], None)
            self._step_early(self._early, unit, arrived)
        elif final and self._thread is not None:
            self._read_ahead(unit)
            self._unmeasured[unit] = self._store[Key(Kind.GRAD, unit)].spec.nbytes
            # Handing over costs more than measuring a little; what is left at the boundary is measured there.
            if (
                sum(self._unmeasured.values()) >= _MEASURED_NBYTES_MIN
                or len(self._unmeasured) >= _MEASURED_UNITS_MAX
            ):
                units = [*self._unmeasured]
                self._unmeasured.clear()
                reservation = Reservation()
                self._store.access.reserve(reservation, *(Key(Kind.GRAD, each) for each in units))
                self._go_on(reservation, self._norms.measure, units, reservation)

    def _read_ahead(self, unit: int) -> None:
        """Backward has this unit's gradients now, and may be over soon."""
        self._expected = self._expected or {*self._stepped_behind}
        self._expected.discard(unit)
        if len(self._expected) == SOON_UNITS:
            for group in first_reads(self._hidden, self._in_memory):
                if not self._prefetch(None, group):
                    break

    def grad_stats(self) -> tuple[float, int]:
        """Sum of squares (fp64) of this rank's accumulated gradients, and the number of non-finite elements."""
        if self._early is None:
            self.finish()
        self._unmeasured.clear()
        return self._norms.total()

    def parameter_stats(self) -> dict[tuple[int, Slot], GradStats]:
        """By (unit, slot), of what this rank has of the gradients of the latest step, until the next backward."""
        return self._norms.by_parameter(self._under_way[-1][1] if self._under_way else None)

    def _step_early(self, early: _Pass, unit: int, arrived: Sequence[bool]) -> None:
        if any(group.index in early.begun for group in self._groups_of.get(unit, ())):
            # That was not the last backward of the step: a program that does so once will again.
            self._hasty += 1
            self.forget()
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
                early.assumed.update(steps)
                sweep = StepContext(early.hyper, early.grad_scale, flags, steps)
                self._hand_over(early, sweep, [group])

    def _wanted(
        self, hyper: tuple[Any, ...], grad_scale: float, arrived: Mapping[int, Sequence[bool]],
        steps: Mapping[int, Sequence[int]],
    ) -> _Pass | None:  # fmt: skip
        """The step that has begun in backward, where it was begun as this one; else it is forgotten."""
        early = self._early
        if early is None:
            return None
        same = (
            (hyper, grad_scale) == (early.hyper, early.grad_scale)
            and all(all(arrived[unit]) and steps[unit] == assumed for unit, assumed in early.assumed.items())
        )  # fmt: skip
        if same and self._store.access.commit(early.reservation):
            self._early = None
            return early
        self.forget()
        return None

    # Steps.

    def step(
        self, groups: Sequence[Mapping[str, Any]], *, grad_scale: float, arrived: Mapping[int, Sequence[bool]]
    ) -> None:
        """Step every parameter that has a gradient; those that the program can see are stepped on return.

        `groups` are live parameter groups (lr, betas, eps, weight_decay). `arrived` says by unit index which of its
        parameters have had a gradient. `grad_scale` multiplies every gradient (unscaling, averaging and clipping in
        one).
        """
        steps: dict[int, list[int]] = {}
        for index, flags in arrived.items():
            for slot, flag in zip(self._slots(index), flags, strict=True):
                # A parameter in tiles counts once: its tiles have their gradients together.
                self.steps[slot.name] += flag and slot.ends
        for index in arrived:
            steps[index] = [self.steps[slot.name] for slot in self._slots(index)]
        hyper = tuple(map(self._method.hyper, groups))
        behind = self._wanted(hyper, grad_scale, arrived, steps)
        if behind is None:
            self.finish()
            behind = self._pass(hyper, grad_scale)
        self._expected = set()
        sweep = StepContext(hyper, grad_scale, arrived, steps)
        rest = [group for group in self._hidden if group.index not in behind.begun]
        with self._telling(behind.reservation):
            # Reserved before anything is stepped: when that fails, the rest must not look as if nothing had happened.
            self._store.access.reserve(behind.reservation, *_touched(rest))
            # The drive has something to do while the visible ones are stepped.
            for group in rest[: STEP_READS - 1]:
                self._prefetch(behind.reservation, group)
            self._step_visible(sweep)
            self._let_step(behind, sweep, rest)

    def finish(self) -> None:
        """Return when everything begun is done; raises what went wrong with it."""
        for future, reservation in self._under_way:
            _look(future, reservation)
        self._under_way.clear()

    def check(self) -> None:
        """Raise what has gone wrong behind the program; does not wait."""
        for future, reservation in self._under_way:
            if future.done():
                _look(future, reservation)

    def close(self, *, at_once: bool = False) -> None:
        """Finish what has begun (with `at_once`, only the sub-group in work) and end the thread.

        Raises what went wrong, unless it has been raised before.
        """
        if self._thread is None:
            return
        self._stopping = self._stopping or at_once
        self._thread.shutdown(wait=True)
        unseen = [future for future, reservation in self._under_way if not reservation.seen]
        self._under_way.clear()
        for future in unseen:
            future.result()

    def _slots(self, unit: int) -> Sequence[Slot]:
        return self._plan.layouts[unit].slots

    def _pass(self, hyper: tuple[Any, ...], grad_scale: float, *, pending: bool = False) -> _Pass:
        uses = Counter(_touched(self._hidden))
        reservation = Reservation(pending=pending)
        turns = self._ready_queue(self._hidden, reservation)
        return _Pass(hyper, grad_scale, reservation, uses=uses, turns=turns)

    def _hand_over(self, behind: _Pass, sweep: StepContext, groups: Sequence[SubGroup]) -> None:
        """Reserve these sub-groups and let the thread step them."""
        with self._telling(behind.reservation):
            self._store.access.reserve(behind.reservation, *_touched(groups))
            self._let_step(behind, sweep, groups)

    def _let_step(self, behind: _Pass, sweep: StepContext, groups: Sequence[SubGroup]) -> None:
        """These are ready: let the thread step as many, those whose turn it is."""
        behind.begun.update(group.index for group in groups)
        behind.turns.add(groups, sweep)
        behind.turns.fetch(1)
        if groups:
            self._go_on(
                behind.reservation, self._step_ready, behind.turns, behind.uses, behind.reservation, len(groups)
            )

    @contextmanager
    def _telling(self, reservation: Reservation) -> Iterator[None]:
        """When the block fails, whoever wants what is reserved meets its error, and waits for nobody."""
        try:
            yield
        except BaseException as error:
            self._store.access.fail(reservation, error)
            raise

    def _go_on(self, reservation: Reservation, job: Callable[..., None], *arguments: Any) -> None:
        """Run a job behind the program."""

        def run() -> None:
            with self._telling(reservation), trace.span(trace.ENGINE, "behind the program"):
                job(*arguments)

        assert self._thread is not None
        self._under_way = [each for each in self._under_way if not each[0].done() or each[0].exception()]
        self._under_way.append((self._thread.submit(run), reservation))

    def _in_memory(self, group: SubGroup) -> bool:
        """Whether one with states on NVMe can be stepped without a read, which alone makes it worth going first: a
        parameter fetched for a few of its sub-groups would be written back for others, and fetched again for the rest.
        """
        keys = changed_by(group)
        return self._store[keys[0]].on_nvme and all(map(self._store.in_memory, keys))

    def _prefetch(self, reservation: Reservation | None, group: SubGroup) -> bool:
        return self._store.prefetch(*changed_by(group), by=reservation)

    def _ready_queue(self, groups: Sequence[SubGroup], reservation: Reservation | None) -> ReadyQueue[StepContext]:
        return ReadyQueue(groups, fetch=partial(self._prefetch, reservation), in_memory=self._in_memory)

    def _step_visible(self, sweep: StepContext) -> None:
        """Step those that the program sees."""
        turns = self._ready_queue(self._visible, None)
        turns.add(self._visible, sweep)
        self._step_ready(turns, Counter(_touched(self._visible)), None, len(self._visible))

    def _step_ready(
        self, turns: ReadyQueue[StepContext], uses: Counter[Key], reservation: Reservation | None, count: int
    ) -> None:
        """Step `count` of the sub-groups that are ready, one after the other."""
        for _ in range(count):
            if self._stopping:
                return
            if reservation is not None and not self._store.access.begin_work(reservation):
                return
            done: list[Key] = []
            try:
                group, sweep = turns.take()
                turns.fetch(STEP_READS)
                done = self._step_group(group, sweep, uses, reservation)
            finally:
                if reservation is not None:
                    self._store.access.end_work(reservation, *done)

    def _step_group(
        self, group: SubGroup, sweep: StepContext, uses: Counter[Key], reservation: Reservation | None
    ) -> list[Key]:
        """Step one sub-group and write it back. `uses`: how many sub-groups are still to use each partition; returns
        those that none is to use.
        """
        keys = _touched([group])
        uses.subtract(keys)
        done = [key for key in keys if uses[key] <= 0]
        self._change(group, sweep, reservation)
        self._store.flush(*done)
        return done

    def _change(self, group: SubGroup, sweep: StepContext, reservation: Reservation | None) -> None:
        store = self._store
        with (
            store.read(*_grads(group), by=reservation) as grads,
            store.write(*changed_by(group), by=reservation) as (states, *params),
        ):
            cuts: list[StepSlice] = []
            copies: list[tuple[Tensor, Tensor]] = []
            at = 0
            assert states.buffer is not None
            for piece, grad, param in zip(group.slices, grads, params, strict=True):
                stop = piece.start + piece.numel
                home = param.view(Kind.PARAM)[piece.start : stop]
                state_device = states.buffer.device
                # A device partition stepped on the CPU is copied there and back.
                local = home if home.device == state_device else home.to(state_device)
                local_grad = grad.view(Kind.GRAD)[piece.start : stop].to(state_device)
                if local is not home:
                    copies.append((home, local))
                layout = self._plan.layouts[piece.unit]
                parts = self._plan.placement.units[piece.unit].parts
                first = layout.partition_start(parts, self._index) + piece.start
                for run in sweep.runs(layout, piece, first, joins=self._method.joins):
                    span = slice(run.start, run.start + run.numel)
                    cuts.append(self._cut(states, at, local[span], local_grad[span], run, sweep.hyper[run.group]))
                at += piece.numel
            with trace.span(trace.COMPUTE, "optimizer", states.key, states.spec.nbytes):
                self._method.step(cuts, grad_scale=sweep.grad_scale, grad_bound=self._grad_bound)
                for home, local in copies:
                    home.copy_(local)

    def _cut(self, states: Partition, at: int, param: Tensor, grad: Tensor, run: Segment, hyper: Any) -> StepSlice:
        span = slice(at + run.start, at + run.start + run.numel)
        kinds = {section.kind for section in states.spec.sections}
        return StepSlice(
            run, hyper, param, grad, [states.view(kind)[span] for kind in self._method.moments],
            remainder=states.view(Kind.REMAINDER)[span] if Kind.REMAINDER in kinds else None,
            master=states.view(Kind.MASTER)[span] if Kind.MASTER in kinds else None,
        )  # fmt: skip


def _look(future: Future[None], reservation: Reservation) -> None:
    try:
        with trace.span(trace.WAIT, "optimizer step"):
            future.result()
    except BaseException:
        reservation.see()
        raise


def _grads(group: SubGroup) -> list[Key]:
    return [Key(Kind.GRAD, piece.unit) for piece in group.slices]


def _touched(groups: Sequence[SubGroup]) -> list[Key]:
    """Every partition that stepping these sub-groups reads or writes, once for each of them."""
    return [key for group in groups for key in (*changed_by(group), *_grads(group))]
