"""The optimizer step of one rank: what is known of its gradients, what becomes of them, and the update of sub-groups.

    IDLE --landed--> ACCUMULATING --decide--> DECIDED --apply--> STEPPING --> APPLIED --finish--> IDLE
                                                 \\------------------- skipped ------finish--/

Gradients become complete partitions; all ranks add up their norm and count elements that are not finite; from these
numbers, the same bits on every rank, each rank draws the same verdict: skip the step, or take it with a factor. Then
one pass goes over the sub-groups: prefetch the next, step this one in place, flush the previous. The plan says what a
sub-group is, where it lives and in which order sub-groups are stepped.

[Note: step behind the program] Under the plan's policy `step_behind`, a thread (`infinity.step.worker`) steps the
sub-groups that the program cannot see, because their units are gathered before use, while the next forward runs. It
does so under a reservation: a gather of a unit that is not stepped yet waits in the store. What the thread steps first
is read while the last gradients are still to come. Units that stay whole are gathered again after such a step: see
[Note: refresh] in `infinity.zero.gather`.

[Note: step in backward] The thread may begin during backward: it steps a sub-group as soon as the gradients of all its
units are there, each parameter's. (Which parameters have a gradient on some rank is agreed on only when backward is
over.) If the drive does not keep up, the sub-groups that the next forward needs first overtake the others: see
`infinity.plan.orders`.

Such a step is a guess: that no more gradients come, that hyper-parameters stay, that `step()` is called at all. It
begins only for sub-groups whose old values stay on NVMe (see [Note: slots]); until `step()` every reader gets those.
`step()` compares the guess with what holds then. If it was right, the new values are committed; else everything is
stepped from the old ones, with the gradients, which stay where they are until then.

[Note: guessed norm] Where a step waits for the norm of all gradients, to clip them or to find one that is not finite,
the guess is also that their factor is the one of a step that is not clipped. `clip_factor` is then exactly 1, so that
the values are those of the step that waits, bit for bit; from values that were stepped with a wrong factor the right
ones could not be computed. What this rank has measured is a lower bound of the norm: as soon as it is over the limit,
nothing more begins. Each wrong guess has the next ones rest for longer, a right one halves that.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from infinity.config.resolve import ResolvedConfig
from infinity.distributed.collectives import exchange_values
from infinity.distributed.groups import ProcessGroups
from infinity.errors import StateError
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.transaction import Reservation
from infinity.ops.adam import GradStats
from infinity.optim.muon import MuonRule
from infinity.optim.update_rules import Rules, StepContext
from infinity.plan.layout import Slot, SubGroup
from infinity.plan.partitions import SOON_UNITS, STEP_READS, first_reads
from infinity.plan.plan import Plan, UnitNumbers, model_params
from infinity.plan.types import Key, Kind
from infinity.step.loss_scaler import LossScaler, Skips
from infinity.step.norms import Norms, StepFlags, clip_factor
from infinity.step.update import StepPass, SubGroupUpdater, in_memory, prefetch
from infinity.step.worker import StepWorker

# So many times a step may begin in a backward that was not the last of its step; then none does any more.
_HASTY_MAX = 2
# Steps that wait after a first wrong guess, by how much that grows with the next, and to how much.
_REST, _REST_GROWTH, _REST_MAX = 4, 4, 256
_NOTHING = GradStats(0.0, 0)


class StepState(enum.Enum):
    """How far the step at hand has come. What goes on behind the program is the worker's business."""

    # No gradient has arrived since the last step; the verdict is of that one.
    IDLE = "idle"
    # Gradients arrive; some sub-groups may be stepped already: see [Note: step in backward].
    ACCUMULATING = "accumulating"
    # Gradients are complete, and the verdict says what becomes of them.
    DECIDED = "decided"
    # Inside `apply`.
    STEPPING = "stepping"
    # The gradients were used.
    APPLIED = "applied"


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What becomes of a step, the same on every rank.

    norm: of all gradients before clipping, infinite where an element is not finite. nonfinite: how many are not.
    grad_scale: what gradients are multiplied by in the update. unscale: the part of it that is not clipping. arrived:
    by the index of a unit, which of its parameters had a gradient on some rank. elsewhere: names of those that only
    other stages have. flags: what some rank has told.
    """

    norm: float
    nonfinite: int
    skipped: bool
    grad_scale: float
    unscale: float
    arrived: Mapping[int, Sequence[bool]]
    elsewhere: frozenset[str]
    flags: StepFlags


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


@dataclass(frozen=True, slots=True)
class EarlyGroups:
    """Sub-groups that were stepped in backward, since the engine was made, by what became of them.

    wrong: the guess was, so that they were stepped again, or the step was skipped. forgotten: the program threw their
    gradients away, added to them, or looked at what they change.
    """

    committed: int = 0
    wrong: int = 0
    forgotten: int = 0


class _InBackward:
    """What of a step goes on while gradients still arrive.

    groups_of: by unit, the sub-groups that may be stepped then. early: the step that has begun in this backward. rests:
    whether wrong guesses about the norm have the next ones rest.
    """

    def __init__(self, may: Iterable[SubGroup], *, rests: bool) -> None:
        self.groups_of: dict[int, list[SubGroup]] = {}
        for group in may:
            for piece in group.slices:
                self.groups_of.setdefault(piece.unit, []).append(group)
        self.early: _EarlyStep | None = None
        self.counts = EarlyGroups()
        # How often a step was begun in a backward that was not the last.
        self._hasty = 0
        self._rests = rests
        # Steps that are still to wait, with the one at hand, and how many will after the next wrong guess.
        self._resting, self._rest = 0, _REST
        # Of the gradients that have come in this backward: a lower bound of what the step's norm is made of; and a unit
        # whose gradients may still be on their way.
        self._squares = 0.0
        self._coming: list[int] = []
        # Units whose gradients are still to come before the step.
        self._expected: set[int] = set()

    @property
    def may_begin(self) -> bool:
        return bool(self.groups_of) and self.early is None and self._hasty < _HASTY_MAX and not self._resting

    def begin(self, early: _EarlyStep) -> None:
        """A step begins."""
        self.early = early
        self._squares, self._coming = 0.0, []

    def came(self, unit: int, *, late: bool) -> list[int]:
        """A unit's gradients are final: return the units whose gradients are there, with `late` those before."""
        came, self._coming = [*self._coming, unit], []
        if late:
            came, self._coming = came[:-1], [unit]
        return came

    def add(self, squares: float) -> float:
        """Return the sum of squares of all gradients that have come."""
        self._squares += squares
        return self._squares

    def end(self, end: str) -> _EarlyStep | None:
        """Return the step that has begun, of which nothing more begins here. end: "committed", "wrong", "forgotten", or
        "hasty", which is forgotten because this was not the last backward.
        """
        early, self.early = self.early, None
        if early is None:
            return None
        committed, wrong, forgotten = self.counts.committed, self.counts.wrong, self.counts.forgotten
        match "forgotten" if early.reservation.forgotten else end:
            case "committed":
                committed += len(early.begun)
                self._rest = max(self._rest // 2, _REST)
            case "wrong":
                wrong += len(early.begun)
                # This step's own end is counted, too.
                self._resting = 1 + (self._rest if self._rests else 0)
                self._rest = min(_REST_GROWTH * self._rest, _REST_MAX)
            case _:
                forgotten += len(early.begun)
                self._hasty += end == "hasty"
        self.counts = EarlyGroups(committed, wrong, forgotten)
        return early

    def stepped(self) -> None:
        """A step is over, or was skipped."""
        self._resting = max(self._resting - 1, 0)

    def outstanding(self, unit: int, hidden: Iterable[SubGroup]) -> int:
        """How many units of `hidden` sub-groups are still to come, now that this one has."""
        self._expected = self._expected or {piece.unit for group in hidden for piece in group.slices}
        self._expected.discard(unit)
        return len(self._expected)

    def expect_all(self) -> None:
        """The step is taken: the gradients of all units are to come again."""
        self._expected = set()


class OptimizerStep:
    """One optimizer over a plan's sub-groups. Called from the training thread only, but for `landed` and `changes`,
    which autograd's calls in backward.

    config: clipping, bounds and checks are its. scaler: fp16's loss scale; None in other precisions.
    """

    def __init__(
        self, plan: Plan, store: TieredStore, groups: ProcessGroups, config: ResolvedConfig, *, device: Device,
        rules: Rules, scaler: LossScaler | None = None,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._store = store
        self._config = config
        self.rules = rules
        for rule in rules:
            if isinstance(rule, MuonRule):
                rule.place(store.matrices, groups.data, groups.tensor)
        # Steps that each parameter of the model has taken, also of other stages: one without a gradient is not stepped,
        # as in torch.
        params = {name: param for name, param in model_params(plan).items() if param.trainable}
        self.steps: dict[str, int] = dict.fromkeys(params, 0)
        # The parameter group of each one; replaced, never changed.
        self._group_of: Mapping[str, int] = {name: param.group for name, param in params.items()}
        # How often states may have changed: what was read of them before is old.
        self.age = 0
        self.state = StepState.IDLE
        # Of the latest step; None before the first.
        self.verdict: StepVerdict | None = None
        self.skips = Skips(limit=config.sections.max_skipped_steps, scaler=scaler)
        self._norms = Norms(plan, store, groups)
        self._updater = SubGroupUpdater(
            plan, store, rules, device=device, index=groups.data.index, grad_bound=config.clip_value or math.inf
        )
        self._worker = StepWorker(store, device)
        self._parts = plan.step_parts()
        self._backward = _InBackward(self._parts.in_backward, rests=not config.speculates_always)
        store.keep(*(Key(Kind.STATES, index) for index in plan.kept()))

    # What is known of it.

    @property
    def _skips(self) -> bool:
        """Whether a step whose gradients are not all finite is skipped."""
        return self._config.checks_gradients or not self.rules.guarded
    @property
    def norm(self) -> float:
        """The gradient norm of the latest step, before clipping; 0 before the first."""
        return self.verdict.norm if self.verdict is not None else 0.0

    @property
    def numbers(self) -> UnitNumbers:
        """The place of this rank's units in the whole model."""
        return self._norms.numbers

    @property
    def early_groups(self) -> EarlyGroups:
        """What became of the sub-groups that were stepped in backward."""
        return self._backward.counts

    @property
    def scaler(self) -> LossScaler | None:
        """fp16's loss scale; None in other precisions."""
        return self.skips.scaler

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by: fp16's present loss scale, 1 in other precisions."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def grad_factor(self) -> float:
        """What accumulated gradients are multiplied by: averaging over data-parallel ranks, and fp16's unscaling."""
        averaged = self._config.sections.gradient_allreduce_op == "mean"
        return 1.0 / (self._norms.groups.data.size if averaged else 1) / self.loss_scale

    def parameter_scalars(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer keeps of a parameter in one value, by name, for those that this rank steps."""
        if self.rules.scalars:
            # A step that goes on changes them.
            self.synchronize()
        return self.rules.parameter_scalars(self.steps)

    def load_parameter_scalars(self, singles: Mapping[str, Mapping[str, Any]]) -> None:
        """Take back what `parameter_scalars()` of all ranks has returned; `steps` are already those of that time."""
        self.rules.load_parameter_scalars(singles, self.steps)

    def regroup(self, group_of: Mapping[str, int]) -> None:
        """From now on step each parameter with the group that is named for it, and none without. The same on every
        rank.
        """
        self._group_of = dict(group_of)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps besides step counts: the loss scale, and skipped steps in a row."""
        scaler = self.scaler
        return {"loss_scale": None if scaler is None else scaler.state_dict(), "skips": self.skips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict()` back; a run in another precision keeps its own loss scale."""
        if self.scaler is not None and state["loss_scale"] is not None:
            self.scaler.load_state_dict(state["loss_scale"])
        self.skips.load_state_dict(state["skips"])

    def _move(self, to: StepState) -> None:
        """Change the state. StateError inside a step, which only ends."""
        if self.state is StepState.STEPPING and to not in (StepState.IDLE, StepState.APPLIED):
            raise StateError(f"the optimizer's step cannot go from {self.state.value} to {to.value}")
        self.state = to

    # As gradients arrive.

    def start_in_backward(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Let the step begin in the backward that comes: see [Note: step in backward]. groups: as of `apply`."""
        self._move(StepState.ACCUMULATING)
        # A unit with a parameter that is in no group is stepped with what has arrived.
        if self._backward.may_begin and len(self._group_of) == len(self.steps):
            behind = StepPass(self._parts.hidden, self._store, self._updater, Reservation(pending=True))
            hyper = tuple(map(self.rules.hyper, groups))
            self._backward.begin(_EarlyStep(behind, hyper, self._group_of, self.grad_factor))

    def landed(self, unit: int, arrived: Sequence[bool], *, final: bool) -> None:
        """A unit's GRAD partition has new sums.

        arrived: which of the unit's parameters have a gradient since the last step. final: whether this is probably the
        last time before the step.
        """
        self._move(StepState.ACCUMULATING)
        self._norms.forget(unit)
        passes = self._plan.placement.units[unit].grad.on_drive
        if final and passes:
            # What passes through memory on its way to a drive is measured there.
            self._norms.measure([unit], None)
        if self._backward.early is not None and final:
            self._judge_early(self._backward.early, unit)
        if self._backward.early is not None and final:
            self._step_early(self._backward.early, unit, arrived)
        elif final and self._plan.policy.step_behind:
            if self._backward.outstanding(unit, self._parts.hidden) == SOON_UNITS:
                # Begin to read what the step needs first, now that backward has only a few gradients to deliver.
                for group in first_reads(self._parts.hidden, partial(in_memory, self._store)):
                    if not prefetch(self._store, None, group, complete=False):
                        break
            if not passes and (units := self._norms.batch(unit)):
                reservation = Reservation()
                self._store.access.reserve(reservation, *(Key(Kind.GRAD, each) for each in units))
                self._worker.submit(reservation, self._norms.measure_reserved, units, reservation)

    def changes(self, unit: int) -> None:
        """Gradients are about to be added to those of a unit that were said to be final: do not begin to measure
        them.
        """
        self._norms.unqueue(unit)

    def forget(self) -> None:
        """Drop the accumulated gradients, and what was stepped with them."""
        self._move(StepState.IDLE)
        self.forget_early()

    def reset(self) -> None:
        """Finish what has begun, before all values are replaced."""
        self.age += 1
        self.forget()
        self.synchronize()

    def _judge_early(self, early: _EarlyStep, unit: int) -> None:
        """Measure gradients that have come, and give a guess up that they prove wrong. An accelerator goes on computing
        meanwhile: what it has delivered before is measured, and this unit's gradients with the next ones.
        """
        for came in self._backward.came(unit, late=self._plan.request.accelerator):
            squares, nonfinite = self._norms.of_unit(came, early.reservation)
            if not self._plan.policy.speculates:
                continue
            norm = math.sqrt(self._backward.add(squares)) * self.grad_factor
            skips = bool(nonfinite) and self._skips
            if skips or clip_factor(norm, self._config.clip_norm) < 1.0:
                self.forget_early("wrong")

    def _step_early(self, early: _EarlyStep, unit: int, arrived: Sequence[bool]) -> None:
        """Step the sub-groups that have all gradients now."""
        mine = self._backward.groups_of.get(unit, ())
        if any(group.index in early.begun for group in mine):
            # That was not the last backward of the step: a program that does so once will again.
            self.forget_early("hasty")
            return
        if early.reservation.forgotten or not all(arrived):
            # Another rank may have the others: `decide` knows.
            return
        early.complete.add(unit)
        for group in mine:
            units = {piece.unit for piece in group.slices}
            if units <= early.complete:
                steps = {index: [self.steps[slot.name] + 1 for slot in self._slots(index)] for index in units}
                flags = {index: [True] * len(self._slots(index)) for index in units}
                early.steps.update(steps)
                with self._worker.failing(early.reservation):
                    early.behind.reserve([group])
                    context = StepContext(early.hyper, early.group_of, early.grad_scale, flags, steps)
                    self._let_step(early.behind, context, [group])

    def forget_early(self, end: str = "forgotten") -> None:
        """Forget what was stepped in backward, if anything; `end` says why: see `_InBackward.end`."""
        if (early := self._backward.end(end)) is not None:
            self._store.access.forget(early.reservation)

    # The verdict.

    def check_trains(self, *, unscaled: bool) -> None:
        """Raise StateError where no step can be taken. Nothing has changed then. unscaled: whether a gradient has come
        without the loss scale.
        """
        if not self._plan.trains:
            raise StateError("nothing to step: every parameter was frozen when the engine was made")
        if self.scaler is not None and unscaled:
            raise StateError(
                "fp16 needs its loss scale, and gradients have come without it: call engine.zero_grad(), and from then "
                "on engine.backward(loss) instead of loss.backward()"
            )

    def decide(
        self, arrived: Mapping[int, Sequence[bool]], elsewhere: frozenset[str], flags: StepFlags,
        param_groups: Sequence[Mapping[str, Any]],
    ) -> StepVerdict:  # fmt: skip
        """Decide about the gradients, which are complete. Collective. DesyncError where ranks would step with different
        numbers.

        arrived: by unit, which of its parameters have had a gradient on some rank. elsewhere: the names of parameters
        of other stages that have. flags: what this rank tells the others.
        """
        early = self._backward.early
        if early is None:
            # A step that has begun in backward is not waited for.
            self.synchronize()
        by = None if early is None else early.reservation
        squares, count, heard = self._norms.of_all_ranks(flags, self._numbers(param_groups), by)
        config, unscale = self._config, self.grad_factor
        norm = math.sqrt(squares) * unscale if not count else math.inf
        skipped = bool(count) and self._skips
        self.skips.update(skipped)
        if skipped:
            self.forget_early("wrong")
        factor = unscale if skipped else unscale * clip_factor(norm, config.clip_norm)
        self.verdict = StepVerdict(norm, count, skipped, factor, unscale, arrived, elsewhere, heard)
        self._move(StepState.DECIDED)
        return self.verdict

    def _numbers(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
        """Return the numbers that the step takes beside gradients, by name: of each group, and of the configuration."""
        config = self._config
        return [
            *((f"param_groups[{at}][{key!r}]", said)
              for at, group in enumerate(param_groups) for key, value in group.items()
              if key != "params" and (said := _number(value)) is not None),
            ("gradient_clipping", config.clip_norm), ("gradient_clipping_value", config.clip_value),
            ("gradient_accumulation_steps", config.accumulation), ("the loss scale", self.loss_scale),
        ]  # fmt: skip

    def norms_by_parameter(self, *, begun: bool) -> dict[str, float]:
        """Return the gradient norm of every parameter that had a gradient in the latest step, by name. Collective.
        StateError where there is none, or its gradients are gone. begun: whether others have come since.

        Each rank adds up the squares of its part of a parameter, and these are added up over ranks.
        """
        verdict, world = self.verdict, self._norms.groups.world
        if verdict is None or not verdict.arrived or begun:
            raise StateError(
                "norms by parameter are those of the latest step: ask for them after step(), before the next backward"
            )
        stats = self._norms.by_parameter(self._worker.latest)
        mine: list[tuple[str, float, int]] = []
        for layout in self._plan.layouts:
            told = self._norms.tells(layout.index)
            for slot, flag in zip(layout.slots, verdict.arrived.get(layout.index, ()), strict=False):
                if flag:
                    mine.append((slot.name, *(stats.get((layout.index, slot), _NOTHING) if told else _NOTHING)))
        # Ranks of other stages have other parameters.
        rows = exchange_values(mine, world, "exchange of norms by parameter") if world.size > 1 else [mine]
        told_of: dict[str, list[float]] = {}
        for name, squares, count in (each for row in rows for each in row):
            told_of.setdefault(name, []).append(math.inf if count else squares)
        return {name: math.sqrt(math.fsum(squares)) * verdict.unscale for name, squares in told_of.items()}

    # The update.

    def apply(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Step every parameter that has a gradient, as the verdict says; the visible ones are stepped on return, the
        others reserved. param_groups: live (lr, betas, eps, weight_decay).
        """
        verdict = self.verdict
        if self.state is not StepState.DECIDED or verdict is None:
            raise StateError("optimizer.step() is called by engine.step(): call that instead")
        self._move(StepState.STEPPING)
        try:
            self.age += 1
            hyper = tuple(map(self.rules.hyper, param_groups))
            # A parameter in tiles counts once: its tiles have their gradients together.
            for index, flags in verdict.arrived.items():
                for slot, flag in zip(self._slots(index), flags, strict=True):
                    self.steps[slot.name] += flag and slot.ends and slot.name in self._group_of
            context = StepContext(
                hyper, self._group_of, verdict.grad_scale, verdict.arrived,
                {index: [self.steps[slot.name] for slot in self._slots(index)] for index in verdict.arrived},
                self._updater.mark(),
            )  # fmt: skip
            self._step(context)
            # Of other stages, whose ranks step them.
            for name in self._group_of.keys() & verdict.elsewhere:
                self.steps[name] += 1
        except BaseException:
            self._move(StepState.IDLE)
            raise
        self._move(StepState.APPLIED)

    def _step(self, context: StepContext) -> None:
        early = self._backward.early
        if early is not None and early.is_right(context) and self._store.access.commit(early.reservation):
            # The step that has begun in backward was begun as this one.
            self._backward.end("committed")
            behind = early.behind
        else:
            self.forget_early("wrong")
            self.synchronize()
            behind = StepPass(self._parts.hidden, self._store, self._updater, Reservation())
        self._backward.expect_all()
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

    def _let_step(self, behind: StepPass, context: StepContext, groups: Sequence[SubGroup]) -> None:
        """Make these sub-groups ready, and let the worker step as many: those whose turn it is."""
        behind.add(groups, context)
        behind.fetch_ahead()
        if groups:
            assert behind.reservation is not None
            self._worker.submit(behind.reservation, behind.run, len(groups), self._worker.stopping)

    def finish(self) -> None:
        """End the step: the loss scale reacts to its verdict."""
        assert self.verdict is not None
        if self.scaler is not None:
            self.scaler.update(overflow=bool(self.verdict.nonfinite))
        self._backward.stepped()
        self._move(StepState.IDLE)

    # Behind the program.

    def then(self, job: Callable[..., None], *arguments: Any) -> None:
        """Run a job once everything that has begun behind the program is done, before anything else begins there."""
        self._worker.submit(Reservation(), job, *arguments)

    def synchronize(self) -> None:
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


def _number(value: object) -> object:
    """Return a number, or a sequence of them, in a form that is the same text on every rank; None for anything else."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else None
