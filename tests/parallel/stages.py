"""A model cut into stages, for the executor without an engine: small, exact, and with all that may cross a boundary.

Between stages go the hidden values (in memory of another order behind every second stage), a count that needs no
gradient, and values that the next stage does not use, whose gradient is None.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from infinity.distributed.groups import ProcessGroups
from infinity.distributed.links import Boundary, Gradients, PipelineLinks
from infinity.plan.pipeline import Action, ActionKind

WIDTH = 6
LENGTHS = (1, 3, 4, 7, 12)


def links_of(groups: ProcessGroups) -> PipelineLinks:
    return PipelineLinks(
        groups.pipeline_forward, groups.pipeline_backward, groups.pipeline, device=torch.device("cpu")
    )


def length_of(micro_batch: int) -> int:
    return LENGTHS[(3 * micro_batch + 1) % len(LENGTHS)]


def batch_of(micro_batch: int) -> Tensor:
    return torch.randn(length_of(micro_batch), WIDTH, generator=torch.Generator().manual_seed(micro_batch))


class AffineStages:
    """Some of `count` stages, each of which multiplies and adds; a handler of the executor.

    losses: by micro-batch. sums: by stage, the gradients of its weights, added in the order of backwards. inputs: by
    micro-batch, the gradient of stage 0's input.
    """

    def __init__(self, count: int, own: Any, *, split: bool = False, trains: bool = True) -> None:
        self.last, self.split, self.trains = count - 1, split, trains
        self.weights = {stage: _weights(stage) for stage in own}
        self.losses: dict[int, Tensor] = {}
        self.inputs: dict[int, Tensor] = {}
        self.sums: dict[int, list[Tensor]] = {}
        self.order: list[Action] = []
        self._saved: dict[tuple[int, int], tuple[Boundary, list[Tensor]]] = {}
        self._queued: dict[tuple[int, int], list[Tensor]] = {}

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        self.order.append(action)
        stage, _, micro_batch = action
        if received is None:
            received = batch_of(micro_batch).requires_grad_(self.trains), torch.tensor(micro_batch)
        assert [tensor.requires_grad for tensor in received[:2]] == [self.trains, False]
        assert all(tensor.is_leaf for tensor in received)
        made = self.outputs(stage, received)
        if self.trains:
            self._saved[stage, micro_batch] = received, [tensor for tensor in made if tensor.requires_grad]
        if stage == self.last:
            self.losses[micro_batch] = made[0].detach()
            return None
        return made

    def outputs(self, stage: int, received: Boundary) -> Boundary:
        """What a stage computes; the last one its loss."""
        scale, shift = self.weights[stage]
        hidden = received[0] if stage % 2 == 0 else received[0].t()
        with torch.set_grad_enabled(self.trains):
            hidden = hidden * scale + shift
            if stage == self.last:
                return (hidden.square().sum() + received[1],)
            return hidden.t() if stage % 2 == 0 else hidden, received[1] + 1, hidden[:, ::2] * 2

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        self.order.append(action)
        stage, kind, micro_batch = action
        received, made = self._saved.pop((stage, micro_batch))
        if grads is None:
            flows: list[Tensor] | None = None
        else:
            assert grads[1] is None and grads[2] is not None and not grads[2].any()
            flows = [grad for grad in grads if grad is not None]
        split = kind is ActionKind.BACKWARD_INPUT
        wanted = [received[0]] if split else [received[0], *self.weights[stage]]
        found = torch.autograd.grad(made, wanted, flows, retain_graph=split)
        if split:
            self._queued[stage, micro_batch] = [*torch.autograd.grad(made, self.weights[stage], flows)]
        else:
            self.add(stage, found[1:])
        if stage == 0:
            self.inputs[micro_batch] = found[0]
            return None
        return found[0], *[None] * (len(received) - 1)

    def backward_weight(self, action: Action) -> None:
        self.order.append(action)
        self.add(action.stage, self._queued.pop((action.stage, action.micro_batch)))

    def add(self, stage: int, found: Any) -> None:
        """Add a micro-batch's gradients of a stage's weights."""
        sums = self.sums.setdefault(stage, [torch.zeros(WIDTH), torch.zeros(WIDTH)])
        for total, grad in zip(sums, found, strict=True):
            total += grad


@cache
def in_sequence(count: int, m: int) -> AffineStages:
    """The same stages on one rank, a micro-batch at a time, as one graph."""
    whole = AffineStages(count, range(count))
    if m > 1:
        before = in_sequence(count, m - 1)
        whole.losses, whole.inputs = dict(before.losses), dict(before.inputs)
        whole.sums = {stage: [each.clone() for each in sums] for stage, sums in before.sums.items()}
    batch = batch_of(m - 1).requires_grad_()
    flowing: Boundary = batch, torch.tensor(m - 1)
    for stage in range(count):
        flowing = whole.outputs(stage, flowing)
    whole.losses[m - 1] = flowing[0].detach()
    weights = [weight for stage in range(count) for weight in whole.weights[stage]]
    whole.inputs[m - 1], *found = torch.autograd.grad(flowing[0], [batch, *weights])
    for stage in range(count):
        whole.add(stage, found[2 * stage : 2 * stage + 2])
    return whole


def _weights(stage: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + stage)
    return [torch.randn(WIDTH, generator=generator).requires_grad_() for _ in range(2)]
