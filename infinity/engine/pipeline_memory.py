"""What a rank of a pipeline holds between forwards and backwards, counted and booked as the step goes on.

Micro-batches in flight are counted as the plan counts them: from a forward until its gradients are complete. Tensors at
boundaries and deferred weight gradients are booked in the ledger; what autograd saves is torch's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from torch import Tensor

from infinity.distributed.links import Gradients, PipelineLinks
from infinity.memory.ledger import Ledger
from infinity.memory.memory_report import PipelineUse
from infinity.parallel.deferred_weights import DeferredWeights
from infinity.plan.pipeline import Action, ActionKind
from infinity.plan.types import Kind, Tier

# What each action adds to the micro-batches in flight.
_IN_FLIGHT = {
    ActionKind.FORWARD: 1, ActionKind.BACKWARD: -1, ActionKind.BACKWARD_INPUT: 0, ActionKind.BACKWARD_WEIGHT: -1
}  # fmt: skip


class PipelineMemory:
    """Counts and books of one rank. `use` is that of the step under way, or of the latest one."""

    def __init__(self, ledger: Ledger, links: PipelineLinks, deferred: DeferredWeights | None) -> None:
        self.use = PipelineUse()
        self._ledger = ledger
        self._links = links
        self._deferred = deferred
        # By stage and micro-batch, what waits for its weight gradients.
        self._waiting: dict[tuple[int, int], int] = {}

    def begin_step(self) -> None:
        """Begin the figures of a step."""
        self.use = PipelineUse()

    def ran(self, action: Action) -> None:
        """Count an action: a forward as it begins, others as they end."""
        stage, kind, micro_batch = action
        held = self.use.in_flight + _IN_FLIGHT[kind]
        self.use = replace(self.use, in_flight=held, in_flight_most=max(held, self.use.in_flight_most))
        if kind is ActionKind.BACKWARD_INPUT and self._deferred is not None:
            self._waiting[stage, micro_batch] = self._deferred.nbytes_of((stage, micro_batch))
            self._book(deferred=sum(self._waiting.values()))
        elif kind is ActionKind.BACKWARD_WEIGHT:
            self._waiting.pop((stage, micro_batch), None)
            self._book(deferred=sum(self._waiting.values()))

    def book(self, boundaries: Iterable[Collection[Gradients]]) -> None:
        """Book the tensors at boundaries: those that are given, and what is under way; each storage once."""
        held = [tensor for each in boundaries for tensors in each for tensor in tensors if tensor is not None]
        self._book(boundary=_nbytes([*held, *self._links.tensors()]))

    def end_step(self) -> None:
        """Book that nothing is held any more, of a step that failed, too."""
        self._waiting.clear()
        self._book(boundary=0, deferred=0)
        self.use = replace(self.use, in_flight=0)

    def _book(self, *, boundary: int | None = None, deferred: int | None = None) -> None:
        use = self.use
        boundary = use.boundary if boundary is None else boundary
        deferred = use.deferred if deferred is None else deferred
        # They are part of what was set aside for activations.
        more = boundary + deferred - use.boundary - use.deferred
        self._ledger.add(Tier.GPU, Kind.ACTIVATION, more, limited=False)
        self.use = replace(
            use, boundary=boundary, boundary_most=max(boundary, use.boundary_most), deferred=deferred,
            deferred_most=max(deferred, use.deferred_most),
        )  # fmt: skip


def _nbytes(tensors: Iterable[Tensor]) -> int:
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())
