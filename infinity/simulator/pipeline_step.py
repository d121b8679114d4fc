"""How long a step of a pipeline takes: its tables in simulated time, with each rank's own work simulated alone.

A rank that never waits for others takes so many seconds a micro-batch, gathers, reads and reductions included, and so
many for the rest of a step: both are simulated along its plan (`infinity.simulator.step_time`). Those of a micro-batch
are divided among its stages' actions by their operations; then the tables say when each action of each rank begins.
Messages between stages take the network's time, and the ranks none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from infinity.plan.activation_bytes import OffloadedCheckpoints
from infinity.plan.hardware import ASSUMED, HardwareProfile, assumed
from infinity.plan.pipeline import ActionKind, ActionSeconds, PipelineTimes, Tables, time_tables
from infinity.plan.plan import Plan
from infinity.plan.prefetch import UnitAccess
from infinity.simulator.step_time import StepTime, predict


@dataclass(frozen=True, slots=True)
class StageOperations:
    """Floating-point operations of one stage for one micro-batch, by kind of action."""

    forward: float
    backward_input: float
    backward_weight: float

    @property
    def total(self) -> float:
        """Those of all its actions."""
        return self.forward + self.backward_input + self.backward_weight


@dataclass(frozen=True)
class RankWork:
    """What a rank of a pipeline does beside its plan: operations of each of its stages for one micro-batch, bytes that
    it sends to others of its tensor group for one, and its activation checkpoints of one on another tier.
    """

    stages: Sequence[StageOperations]
    exchanged_nbytes: int = 0
    offloaded: OffloadedCheckpoints | None = None


@dataclass(frozen=True)
class PipelineStepTime:
    """A predicted step of a pipeline. step: of the rank that ends last, with the seconds of all. seconds: of each rank
    for a micro-batch and for the rest of a step, if it never waited.
    """

    step: StepTime
    times: PipelineTimes
    seconds: tuple[tuple[float, float], ...]


def predict_pipeline(
    plans: Sequence[Plan], profile: HardwareProfile | None, *, tokens: int, work: Sequence[RankWork],
    boundary_nbytes: int, briefly: bool = False,
) -> PipelineStepTime:  # fmt: skip
    """Predict a step. plans, work: of each place on the pipeline axis. tokens: of one micro-batch. boundary_nbytes: of
    what goes from stage to stage for one. briefly: as `predict`.
    """
    part = plans[0].pipeline
    assert part is not None
    profile = profile or assumed(plans[0].request.accelerator)
    flat = [one_micro_batch(plan) for plan in plans]
    alone: dict[object, tuple[float, float]] = {}
    seconds = []
    for plan, own in zip(flat, work, strict=True):
        # Ranks in the middle of an axis are often alike.
        likeness = plan.numel, plan.schedule, tuple(own.stages), plan.placement
        if likeness not in alone:
            alone[likeness] = _alone(plan, profile, tokens, own)
        seconds.append(alone[likeness])
    actions = _action_seconds(part.split.tables, work, seconds)
    message = boundary_nbytes / (profile.network_rate or ASSUMED.network_rate or 1.0)
    times = time_tables(part.split.tables, actions, message_seconds=message)
    ends = [spans[-1][1] + rest for spans, (_, rest) in zip(times.spans, seconds, strict=True)]
    slowest = max(range(len(plans)), key=lambda index: _busy(seconds[index], part.split.micro_batches))
    own = work[slowest]
    step = predict(
        flat[slowest], profile, tokens=tokens, flops=_flops(own), accumulation=part.split.micro_batches,
        briefly=briefly, offloaded=own.offloaded, exchanged_nbytes=own.exchanged_nbytes,
    )  # fmt: skip
    day = step.nvme_written_nbytes_a_day * step.seconds / max(ends)
    return PipelineStepTime(
        replace(step, seconds=max(ends), nvme_written_nbytes_a_day=day), times, tuple(seconds)
    )


def one_micro_batch(plan: Plan) -> Plan:
    """The same plan with the uses of one micro-batch: forward through all stages of the rank, then backward."""
    part = plan.pipeline
    assert part is not None
    uses, position = plan.schedule.uses, 0
    forward: list[UnitAccess] = []
    backward: list[UnitAccess] = []
    for stage, kind, micro_batch in part.split.tables[part.index]:
        count = 0 if kind is ActionKind.BACKWARD_WEIGHT else part.split.uses[stage]
        if micro_batch == 0:
            (forward if kind is ActionKind.FORWARD else backward).extend(uses[position : position + count])
        position += count
    return replace(plan, schedule=plan.reschedule((*forward, *backward)), pipeline=None)


def _alone(plan: Plan, profile: HardwareProfile, tokens: int, own: RankWork) -> tuple[float, float]:
    """Seconds that a rank takes for each micro-batch, and for the rest of a step."""
    one, two = (
        predict(
            plan, profile, tokens=tokens, flops=_flops(own), accumulation=count, briefly=True,
            offloaded=own.offloaded, exchanged_nbytes=own.exchanged_nbytes,
        ).seconds
        for count in (1, 2)
    )  # fmt: skip
    return two - one, max(2 * one - two, 0.0)


def _flops(own: RankWork) -> float:
    return sum(stage.total for stage in own.stages)


def _busy(seconds: tuple[float, float], micro_batches: int) -> float:
    each, rest = seconds
    return each * micro_batches + rest


def _action_seconds(
    tables: Tables, work: Sequence[RankWork], seconds: Sequence[tuple[float, float]]
) -> ActionSeconds:
    """Seconds of each stage's actions: of its rank's micro-batch, as much as it has of the rank's operations."""
    pp = len(tables)
    found: list[tuple[float, float, float]] = []
    for stage in range(sum(len(own.stages) for own in work)):
        own, (each, _) = work[stage % pp], seconds[stage % pp]
        operations, rate = own.stages[stage // pp], each / max(_flops(own), 1.0)
        parts = operations.forward, operations.backward_input, operations.backward_weight
        found.append((parts[0] * rate, parts[1] * rate, parts[2] * rate))
    forward, backward_input, backward_weight = zip(*found, strict=True)
    return ActionSeconds(forward, backward_input, backward_weight)
