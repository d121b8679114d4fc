"""The accumulation boundary: what happens between the last backward of a step and the next forward.

    ACCUMULATING --reduce_and_check--> CHECKED --apply--> APPLIED --finish--> ACCUMULATING
                                          \\--------- skipped ---------finish--/

Gradients become complete partitions; all ranks add up their norm and count elements that are not finite; from these
numbers, the same bits on every rank, each rank draws the same verdict: skip the step, or take it with a factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.distributed.collectives import exchange_texts, exchange_values
from infinity.distributed.consistency import agree_on_numbers, on_any_rank
from infinity.engine.optimizer import OptimizerStates, TieredOptimizer
from infinity.engine.runtime import Runtime
from infinity.errors import NonFiniteError, StateError
from infinity.log import logger
from infinity.ops.adam import GradStats
from infinity.optim.factory import Chosen
from infinity.plan.plan import UnitNumbers
from infinity.plan.shards import Replica
from infinity.step.loss_scaler import Skips
from infinity.step.norms import clip_factor
from infinity.zero.gather import agree
from infinity.zero.gradients import NOWHERE, first_nonfinite
from infinity.zero.parameter import ParameterOffload

_NOTHING = GradStats(0.0, 0)
# The step of an engine after which a pass is timed.
_WATCHED_STEP = 2


class BoundaryState(Enum):
    """How far the step at hand has come."""

    # Micro-steps add up; the latest verdict is that of the step before.
    ACCUMULATING = auto()
    # Gradients are complete, and the verdict says what becomes of them.
    CHECKED = auto()
    # The optimizer has used them.
    APPLIED = auto()


class StepFlags(NamedTuple):
    """What one rank tells the others at each step beside its gradients, and what at least one of them has told."""

    # A signal asks this process to end.
    preempted: bool = False
    # A save behind the program has failed.
    save_failed: bool = False


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What becomes of a step, the same on every rank.

    norm: of all gradients before clipping, infinite where an element is not finite. grad_scale: what gradients are
    multiplied by in the update. unscale: the part of it that is not clipping. arrived: by the index of a unit, which of
    its parameters had a gradient on some rank. elsewhere: names of those that only other stages have. origin: the
    parameter whose gradient is not finite, where that is worth a warning. flags: what some rank has told.
    """

    norm: float
    nonfinite: bool
    skipped: bool
    grad_scale: float
    unscale: float
    arrived: Mapping[int, Sequence[bool]]
    elsewhere: frozenset[str]
    origin: str
    flags: StepFlags


class Boundary:
    """Decides about each step, and carries the decision out. Called from the training thread only."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timing = _PrefetchTiming(runtime)
        self._skips = Skips(limit=runtime.config.config.max_skipped_steps, scaler=runtime.scaler)
        self._state = BoundaryState.ACCUMULATING
        self._latest: StepVerdict | None = None
        self._trained = [runtime.units[index] for index in runtime.plan.refresh_order()]
        self._numbers = UnitNumbers(runtime.plan)

    @property
    def norm(self) -> float:
        """The gradient norm of the latest step, before clipping; 0 before the first."""
        return self._latest.norm if self._latest is not None else 0.0

    def optimizer(self, groups: list[dict[str, Any]], chosen: Chosen, given: object) -> TieredOptimizer | None:
        """Return the optimizer that the program holds, whose step is this one's; None where nothing is trained. given:
        what the program has brought as its own.
        """
        runtime = self._runtime
        if not chosen.trains:
            return None
        module, stepper = runtime.module, runtime.stepper
        return TieredOptimizer(
            groups, chosen.defaults, self.apply, kind=chosen.name, stepper=stepper,
            states=OptimizerStates(runtime.access, stepper, module.parameters), named=module.named_parameters,
            skipped=lambda: self._latest is not None and self._latest.skipped,
            norm=lambda: self.norm, scaler=runtime.scaler,
            given=given if isinstance(given, torch.optim.Optimizer) else None,
            parameter_offload=ParameterOffload(runtime.module),
        )  # fmt: skip

    def check(self) -> None:
        """Raise StateError where no step can be taken. Nothing has changed then."""
        runtime = self._runtime
        if not runtime.plan.trains:
            raise StateError("nothing to step: every parameter was frozen when the engine was made")
        if runtime.scaler is not None and runtime.gradients.unscaled:
            raise StateError(
                "fp16 needs its loss scale, and gradients have come without it: call engine.zero_grad(), and from then "
                "on engine.backward(loss) instead of loss.backward()"
            )

    def reduce_and_check(
        self, step: int, losses: Sequence[Tensor], flags: StepFlags, param_groups: Sequence[Mapping[str, Any]]
    ) -> StepVerdict:
        """Complete the gradients and decide about them. Collective. DesyncError where ranks would step with different
        numbers.

        step: number of steps before this one. losses: of its micro-steps. flags: what this rank tells the others.
        """
        arrived, elsewhere = self._settle_gradients()
        squares, count, heard = self._global_stats(flags, param_groups)
        self._runtime.coordinator.next_step()
        self._timing.advance()
        unscale = self._runtime.grad_factor
        norm = math.sqrt(squares) * unscale if not count else math.inf
        skipped = bool(count) and self._runtime.skips_nonfinite
        self._skips.update(skipped)
        verdict = StepVerdict(
            norm, nonfinite=bool(count), skipped=skipped, unscale=unscale, arrived=arrived,
            elsewhere=elsewhere, flags=heard,
            grad_scale=unscale if skipped else unscale * clip_factor(norm, self._runtime.config.clip_norm),
            origin=self._report_nonfinite(step, losses, count, skipped) if count else "",
        )  # fmt: skip
        self._latest, self._state = verdict, BoundaryState.CHECKED
        return verdict

    def apply(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Step every sub-group as the verdict says, and have whole units follow. `param_groups` are live."""
        if self._state is not BoundaryState.CHECKED or self._latest is None:
            raise StateError("optimizer.step() is called by engine.step(): call that instead")
        runtime, verdict = self._runtime, self._latest
        runtime.stepper.step(param_groups, grad_scale=verdict.grad_scale, arrived=verdict.arrived)
        runtime.stepper.count_elsewhere(verdict.elsewhere)
        runtime.coordinator.memory.follow_step(self._trained)
        self._state = BoundaryState.APPLIED

    def finish(self) -> None:
        """End the step: the loss scale reacts to its verdict, and the gradients are dropped."""
        assert self._latest is not None
        if self._runtime.scaler is not None:
            self._runtime.scaler.update(overflow=self._latest.nonfinite)
        self._runtime.gradients.reset()
        self._state = BoundaryState.ACCUMULATING

    def grad_norms(self) -> dict[str, float]:
        """Return the gradient norm of every parameter that had a gradient in the latest step, by name. Collective.

        Each rank adds up the squares of its part of a parameter, and these are added up over ranks.
        """
        verdict = self._latest
        if verdict is None or not verdict.arrived or self._runtime.gradients.begun:
            raise StateError(
                "norms by parameter are those of the latest step: ask for them after step(), before the next backward"
            )
        runtime, stats = self._runtime, self._runtime.stepper.parameter_stats()
        mine: list[tuple[str, float, int]] = []
        for unit in runtime.units:
            flags = verdict.arrived.get(unit.layout.index, ())
            told = self._tells(unit.layout.index)
            for slot, flag in zip(unit.layout.slots, flags, strict=False):
                if flag:
                    found = stats.get((unit.layout.index, slot), _NOTHING) if told else _NOTHING
                    mine.append((slot.name, *found))
        # Ranks of other stages have other parameters.
        world = runtime.groups.world
        rows = exchange_values(mine, world, "exchange of norms by parameter") if world.size > 1 else [mine]
        told_of: dict[str, list[float]] = {}
        for name, squares, count in (each for row in rows for each in row):
            told_of.setdefault(name, []).append(math.inf if count else squares)
        return {name: math.sqrt(math.fsum(squares)) * verdict.unscale for name, squares in told_of.items()}

    @property
    def should_abort(self) -> bool:
        """Whether too many steps were skipped. Everything is as the last good step left it, on every rank."""
        return self._skips.too_many

    def abort_error(self, step: int, saved: str) -> NonFiniteError:
        """Return what to raise then. step: number of the latest step. saved: what became of the weights."""
        return self._skips.error(step, self._latest.origin if self._latest is not None else "", saved)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the loss scale, and skipped steps in a row."""
        scaler = self._runtime.scaler
        return {"loss_scale": None if scaler is None else scaler.state_dict(), "skips": self._skips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict()` back; a run in another precision keeps its own loss scale."""
        if self._runtime.scaler is not None and state["loss_scale"] is not None:
            self._runtime.scaler.load_state_dict(state["loss_scale"])
        self._skips.load_state_dict(state["skips"])

    def _settle_gradients(self) -> tuple[dict[int, list[bool]], frozenset[str]]:
        """Complete the gradient partitions, late ones first; return which parameters have a gradient on some rank: of
        this rank's units, and the names of others.
        """
        gradients, groups, units = self._runtime.gradients, self._runtime.groups, self._runtime.units
        late = gradients.leftovers()
        if groups.stage.size > 1:
            flags = [unit.layout.index in late for unit in units]
            agreed = on_any_rank(flags, groups.stage, "agreement on late gradients")
            late = [index for index, flag in enumerate(agreed) if flag]
        gradients.boundary(late)
        for index in sorted(self._runtime.plan.shared):
            if units[index].layout.trainable and units[index].layout.numel:
                gradients.sum_shared(units[index])
        arrived = {unit.layout.index: [*flags] for unit, flags in gradients.arrived.items()}
        elsewhere: frozenset[str] = frozenset()
        if groups.world.size > 1:
            anyone = on_any_rank(self._numbers.flags(arrived), groups.world, "agreement on gradients")
            arrived = {index: self._numbers.of_unit(anyone, index) for index in arrived}
            elsewhere = self._numbers.names_elsewhere(anyone)
            gradients.agree_on_order()
        return arrived, elsewhere

    def _global_stats(
        self, flags: StepFlags, param_groups: Sequence[Mapping[str, Any]]
    ) -> tuple[float, int, StepFlags]:
        """Return (sum of squares, number of non-finite elements) of all ranks' gradients, and the flags that some rank
        has raised; the same bits on every rank.

        Ranks exchange a sum for each unit, and all of these are added exactly and rounded once: the order of units and
        ranks does not matter.
        """
        world = self._runtime.groups.world
        mine = [0.0] * (2 * self._numbers.count)
        for unit, stats in self._runtime.stepper.grad_stats().items():
            if self._tells(unit):
                at = 2 * self._numbers.number(unit)
                mine[at : at + 2] = stats
        rows = [mine]
        if world.size > 1:
            alike = self._numbers_of_step(param_groups)
            rows = agree_on_numbers([*mine, *flags], world, "exchange of gradient norms", alike=alike)
        squares = math.fsum(square for row in rows for square in row[: len(mine) : 2])
        count = sum(int(number) for row in rows for number in row[1 : len(mine) : 2])
        if world.size > 1:
            flags = StepFlags(*(any(column) for column in zip(*(row[len(mine) :] for row in rows), strict=True)))
        return squares, count, flags

    def _numbers_of_step(self, param_groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, object]]:
        """Return the numbers that the step takes beside gradients, by name: of each group, and of the configuration."""
        config = self._runtime.config
        return [
            *((f"param_groups[{at}][{key!r}]", said)
              for at, group in enumerate(param_groups) for key, value in group.items()
              if key != "params" and (said := _number(value)) is not None),
            ("gradient_clipping", config.clip_norm), ("gradient_clipping_value", config.clip_value),
            ("gradient_accumulation_steps", config.accumulation), ("the loss scale", self._runtime.loss_scale),
        ]  # fmt: skip

    def _tells(self, unit: int) -> bool:
        """Whether this rank tells the others of a unit's gradients: what several ranks have is told by one of them."""
        groups, each = self._runtime.groups, self._runtime.units[unit]
        parted = each.placed.parts > 1 or groups.data.index == 0
        alone = each.layout.replica is Replica.NONE or groups.tensor.index == 0
        return parted and alone and self._numbers.tells(unit)

    def _report_nonfinite(self, step: int, losses: Sequence[Tensor], count: int, skipped: bool) -> str:
        """Warn which gradient is not finite, and return its name; "" for an overflow that only settles fp16's scale."""
        if skipped and self._skips.in_a_row == 0:
            return ""
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        groups = self._runtime.groups
        origin = first_nonfinite(self._runtime.gradients, groups.stage, loss_is_finite=finite)
        if groups.pipeline.size > 1:
            # The last stage's backward comes first.
            told = exchange_texts(origin, groups.pipeline, "search for what is not finite")
            origin = next((each for each in reversed(told) if each != NOWHERE), origin)
        logger.warning(
            "step %d%s: %d gradient elements are not finite, first in the gradient of %s; %s weights and moments are "
            "unchanged", step, " skipped" if skipped else "", count, origin, "all" if skipped else "their",
        )  # fmt: skip
        return origin


def _number(value: object) -> object:
    """Return a number, or a sequence of them, in a form that is the same text on every rank; None for anything else."""
    if isinstance(value, (bool, int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
        return float(value)
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else None


class _PrefetchTiming:
    """Times one warm training pass, and then has units prefetched as late as its times allow."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # Of this engine, not of the run: one that is taken up is timed, too.
        self._steps = 0

    def advance(self) -> None:
        """A step was reduced: begin or end the timing where it is due. Collective."""
        step, self._steps = self._steps, self._steps + 1
        if not self._runtime.plan.policy.time_prefetch or step not in (_WATCHED_STEP, _WATCHED_STEP + 1):
            return
        runtime, coordinator = self._runtime, self._runtime.coordinator
        if step == _WATCHED_STEP:
            coordinator.prefetcher.watch(runtime.device)
            return
        # The drive is measured alone: a step that has begun in backward would share it.
        runtime.stepper.finish()
        found = agree(
            coordinator.prefetcher.use_times(), runtime.units, runtime.store, runtime.device, runtime.groups.stage,
            coordinator.memory,
        )  # fmt: skip
        if found is not None:
            coordinator.prefetcher.retime(*found)
