"""What is decided at the accumulation boundary, between the last backward and the optimizer's step.

gradients -> complete partitions -> norm and non-finite count of all ranks -> a verdict: skip, or step with a factor

Every rank comes to the same verdict, from the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infinity.distributed.collectives import exchange
from infinity.distributed.consistency import agree_on_numbers, on_any_rank
from infinity.engine.runtime import Runtime
from infinity.errors import NonFiniteError, StateError
from infinity.log import logger
from infinity.ops.adam import GradStats
from infinity.optim.clip import clip_factor
from infinity.optim.loss_scaler import LossScaler
from infinity.optim.nonfinite_guard import Skips
from infinity.zero.nonfinite import first_nonfinite
from infinity.zero.prefetch_timing import agree
from infinity.zero.unit import Unit

_NOTHING = GradStats(0.0, 0)
# The step of an engine after which a pass is timed.
_WATCHED_STEP = 2


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """What becomes of a step: its gradient norm before clipping (infinite when an element is not finite), whether it
    is skipped, when that is worth saying the parameter whose gradient is not finite, and what some rank has said.
    """

    norm: float
    nonfinite: bool
    skipped: bool
    origin: str = ""
    heard: tuple[bool, ...] = ()


class Boundary:
    """Decides about each step, and carries the decision out.

    says: what this rank has to say at each step beside its gradients; every rank hears whether some rank says it.
    """

    def __init__(self, parts: Runtime, says: Callable[[], tuple[bool, ...]]) -> None:
        config = parts.config.config
        self._config = parts.config
        self._units = parts.units
        self._groups = parts.groups
        self._device = parts.device
        self._store = parts.store
        self._gradients = parts.gradients
        self._coordinator = parts.coordinator
        self._stepper = parts.stepper
        self._says = says
        self.scaler = LossScaler.of(config.fp16.model_dump()) if parts.config.scales_loss else None
        # A gradient that is not finite skips the whole step, or (on request) leaves its own elements out.
        self.checked = parts.config.checks_gradients or not parts.stepper.guarded
        # Whether a step begins within its last backward: see [Note: step in backward].
        self.early = parts.plan.policy.step_in_backward
        # Of the latest step, before clipping.
        self.norm = 0.0
        self._skips = Skips(limit=config.max_skipped_steps, scaler=self.scaler)
        # Steps that this engine has seen: a run that is taken up is measured, too.
        self._judged = 0
        self._grad_scale = self._norm_factor = 1.0
        self._arrived: dict[Unit, list[bool]] = {}
        self._ahead = parts.plan.policy.time_prefetch

    @property
    def grad_factor(self) -> float:
        """What accumulated gradients are multiplied by: averaging over ranks, and fp16's unscaling."""
        ranks = self._groups.data.size if self._config.config.gradient_allreduce_op == "mean" else 1
        return 1.0 / ranks / (self.scaler.scale if self.scaler is not None else 1.0)

    def check(self) -> None:
        """StateError where no step can be taken; nothing has changed then."""
        if not any(unit.layout.trainable for unit in self._units):
            raise StateError("nothing to step: every parameter was frozen when the engine was made")
        if self.scaler is not None and self._gradients.unscaled:
            raise StateError(
                "fp16 needs its loss scale, and gradients have come without it: call engine.zero_grad(), and from then "
                "on engine.backward(loss) instead of loss.backward()"
            )

    def reduce_and_check(self, step: int, losses: Sequence[Tensor]) -> StepVerdict:
        """Complete the gradients and look at them. `step` counts steps; `losses` are those of its micro-steps.
        Collective.
        """
        self._settle_gradients()
        squares, count, heard = self._global_stats()
        self._coordinator.next_step()
        self._time_prefetch()
        self._norm_factor = self.grad_factor
        self.norm = math.sqrt(squares) * self._norm_factor if not count else math.inf
        skipped = bool(count) and self.checked
        self._skips.update(skipped)
        if not skipped:
            self._grad_scale = self.grad_factor * clip_factor(self.norm, self._config.clip_norm)
        origin = self._report_nonfinite(step, losses, count, skipped) if count else ""
        return StepVerdict(self.norm, nonfinite=bool(count), skipped=skipped, origin=origin, heard=heard)

    def grad_norms(self) -> dict[str, float]:
        """Gradient norm of every parameter that had a gradient in the latest step, as `norm` is of all. Collective.

        The squares of a rank's part of each parameter, added up over ranks.
        """
        if not self._arrived or self._gradients.begun:
            raise StateError(
                "norms by parameter are those of the latest step: ask for them after step(), before the next backward"
            )
        stats, mine = self._stepper.parameter_stats(), list[float]()
        slots = [
            (unit, slot, flag)
            for unit, flags in self._arrived.items()
            for slot, flag in zip(unit.layout.slots, flags, strict=True)
        ]
        for unit, slot, _ in slots:
            # What every rank has whole counts once.
            told = unit.placed.parts > 1 or self._groups.data.index == 0
            mine += stats.get((unit.layout.index, slot), _NOTHING) if told else _NOTHING
        rows = exchange(mine, self._groups.world, "exchange of norms by parameter")
        sums = [math.fsum(column) for column in zip(*rows, strict=True)]
        found: dict[str, list[float]] = {}
        for (_, slot, flag), squares, count in zip(slots, sums[::2], sums[1::2], strict=True):
            if flag:
                found.setdefault(slot.name, []).append(math.inf if count else squares)
        return {name: math.sqrt(math.fsum(squares)) * self._norm_factor for name, squares in found.items()}

    def apply(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Step every sub-group as judged, then bring whole units up to date. `param_groups` are live."""
        arrived = {unit.layout.index: flags for unit, flags in self._arrived.items()}
        self._stepper.step(param_groups, grad_scale=self._grad_scale, arrived=arrived)
        for unit in self._units:
            unit.generation += unit.layout.trainable
            if unit.placed.whole and unit.layout.trainable:
                unit.refresh()

    def finish(self, verdict: StepVerdict) -> None:
        """The step is over: the loss scale reacts, and gradients are gone."""
        if self.scaler is not None:
            self.scaler.update(overflow=verdict.nonfinite)
        self._gradients.reset()

    @property
    def should_abort(self) -> bool:
        """Whether too many steps were skipped. Everything is as the last good step left it, on every rank."""
        return self._skips.too_many

    def abort_error(self, step: int, verdict: StepVerdict, saved: str) -> NonFiniteError:
        """What to raise then; `saved` says what became of the weights."""
        return self._skips.error(step, verdict.origin, saved)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the loss scale, and skipped steps in a row."""
        scale = None if self.scaler is None else self.scaler.state_dict()
        return {"loss_scale": scale, "skips": self._skips.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict()` back; a run in another precision keeps its own loss scale."""
        if self.scaler is not None and state["loss_scale"] is not None:
            self.scaler.load_state_dict(state["loss_scale"])
        self._skips.load_state_dict(state["skips"])

    def _settle_gradients(self) -> None:
        """Complete the gradient partitions: late ones first, and agree on which parameters have one at all."""
        late = self._gradients.leftovers()
        alone = self._groups.world.size == 1
        if not alone:
            flags = [unit.layout.index in late for unit in self._units]
            agreed = on_any_rank(flags, self._groups.world, "agreement on late gradients")
            late = [index for index, flag in enumerate(agreed) if flag]
        self._gradients.boundary(late)
        self._arrived = dict(self._gradients.arrived)
        if not alone:
            mine = [flag for flags in self._arrived.values() for flag in flags]
            anyone = iter(on_any_rank(mine, self._groups.world, "agreement on gradients"))
            self._arrived = {unit: [next(anyone) for _ in flags] for unit, flags in self._arrived.items()}
            self._gradients.agree_on_order()

    def _time_prefetch(self) -> None:
        """Measure one warm training pass, and then prefetch as late as its times allow; once, on all ranks alike."""
        step, self._judged = self._judged, self._judged + 1
        if not self._ahead or step not in (_WATCHED_STEP, _WATCHED_STEP + 1):
            return
        if step == _WATCHED_STEP:
            self._coordinator.watch(self._device)
            return
        # The drive is measured alone: a step that has begun in backward would share it.
        self._stepper.finish()
        coordinator = self._coordinator
        found = agree(
            coordinator.use_times(), self._units, self._store, self._device, self._groups.world, coordinator.gathered
        )
        if found is not None:
            self._coordinator.retime(*found)

    def _global_stats(self) -> tuple[float, int, tuple[bool, ...]]:
        """Sum of squares and number of non-finite elements of all ranks' gradients, and what some rank says; the same
        bits on every rank.
        """
        says = self._says()
        squares, nonfinite = self._stepper.grad_stats()
        if self._groups.world.size == 1:
            return squares, nonfinite, says
        rows = agree_on_numbers([squares, float(nonfinite), *says], self._groups.world, "exchange of gradient norms")
        heard = tuple(any(row[2 + at] for row in rows) for at in range(len(says)))
        if self._config.stage == 0:
            # Nothing is cut: every rank has counted the same gradients.
            return rows[0][0], int(rows[0][1]), heard
        return math.fsum(row[0] for row in rows), int(sum(row[1] for row in rows)), heard

    def _report_nonfinite(self, step: int, losses: Sequence[Tensor], count: int, skipped: bool) -> str:
        """Say which gradient is not finite; returns the words. An overflow that only settles fp16's scale is usual."""
        if skipped and self._skips.in_a_row == 0:
            return ""
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        origin = first_nonfinite(self._gradients, self._groups.world, loss_is_finite=finite)
        logger.warning(
            "step %d%s: %d gradient elements are not finite, first in the gradient of %s; %s weights and moments are "
            "unchanged", step, " skipped" if skipped else "", count, origin, "all" if skipped else "their",
        )  # fmt: skip
        return origin
