"""The step of one sub-group: lease its partitions, cut them where hyper-parameters change, apply the update rule."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from infinity.memory.access_control import Reservation
from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.observability import trace
from infinity.optim.step_context import Segment, StepContext
from infinity.optim.update_rules import StepSlice, UpdateRule
from infinity.plan.layout import SubGroup
from infinity.plan.plan import Plan
from infinity.plan.stepping import changed_by
from infinity.plan.types import Key, Kind


def touched_by(groups: Sequence[SubGroup]) -> list[Key]:
    """Every partition that a step of these sub-groups reads or writes, once for each sub-group that does."""
    return [key for group in groups for key in (*changed_by(group), *_grads_of(group))]


def _grads_of(group: SubGroup) -> list[Key]:
    return [Key(Kind.GRAD, piece.unit) for piece in group.slices]


class SubGroupUpdater:
    """Steps sub-groups in place with one update rule.

    index: this rank's place among the ranks that share a unit.
    grad_bound: each gradient element is clamped to this magnitude, once scaled; infinity for no clamp.
    """

    def __init__(self, plan: Plan, store: TieredStore, rule: UpdateRule, *, index: int, grad_bound: float) -> None:
        self._plan = plan
        self._store = store
        self._rule = rule
        self._index = index
        self._grad_bound = grad_bound

    def update(self, group: SubGroup, context: StepContext, by: Reservation | None) -> None:
        """Step one sub-group; its partitions are fetched first if they are not in memory.

        by: the reservation that holds the partitions, if the step runs behind the program.
        """
        with (
            self._store.read(*_grads_of(group), by=by) as grads,
            self._store.write(*changed_by(group), by=by) as (states, *params),
        ):
            slices: list[StepSlice] = []
            copies: list[tuple[Tensor, Tensor]] = []
            at = 0
            assert states.buffer is not None
            for piece, grad, param in zip(group.slices, grads, params, strict=True):
                stop = piece.start + piece.numel
                home = param.view(Kind.PARAM)[piece.start : stop]
                device = states.buffer.device
                # A device partition stepped on the CPU is copied there and back.
                local = home if home.device == device else home.to(device)
                local_grad = grad.view(Kind.GRAD)[piece.start : stop].to(device)
                if local is not home:
                    copies.append((home, local))
                layout = self._plan.layouts[piece.unit]
                parts = self._plan.placement.units[piece.unit].parts
                first = layout.partition_start(parts, self._index) + piece.start
                for segment in context.segments(layout, piece, first, joins=self._rule.joins):
                    span, hyper = slice(segment.start, segment.start + segment.numel), context.hyper[segment.group]
                    slices.append(self._slice(states, at, local[span], local_grad[span], segment, hyper))
                at += piece.numel
            with trace.span(trace.COMPUTE, "optimizer", states.key, states.spec.nbytes):
                self._rule.step(slices, grad_scale=context.grad_scale, grad_bound=self._grad_bound)
                for home, local in copies:
                    home.copy_(local)

    def _slice(
        self, states: Partition, at: int, param: Tensor, grad: Tensor, segment: Segment, hyper: object
    ) -> StepSlice:
        """Return a segment with its states. at: where the states of the segment's slice begin in the sub-group's."""
        span = slice(at + segment.start, at + segment.start + segment.numel)
        kinds = {section.kind for section in states.spec.sections}
        return StepSlice(
            segment, hyper, param, grad, [states.view(kind)[span] for kind in self._rule.moments],
            remainder=states.view(Kind.REMAINDER)[span] if Kind.REMAINDER in kinds else None,
            master=states.view(Kind.MASTER)[span] if Kind.MASTER in kinds else None,
        )  # fmt: skip
