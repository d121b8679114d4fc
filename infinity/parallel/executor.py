"""Running a step of a pipeline: a loop over this rank's table, with messages to the stages of other ranks.

The table says what the rank does and in which order (`plan.pipeline`); a handler does it (a forward, a backward, or a
part of one, of one stage and micro-batch); the links bring what it needs (`distributed.links`). Neighbouring stages of
one rank hand their tensors over without a message. The executor decides nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from infinity.distributed.links import (
    Boundary,
    BoundaryMessage,
    Forms,
    Gradients,
    PipelineLinks,
    TensorForm,
    by_tensor,
    trained_gradients,
)
from infinity.errors import StateError
from infinity.plan.pipeline import Action, ActionKind, MessageLink, Tables, message_order, sends_needed

# Sends of a link that may wait as a rank goes on; more where a schedule needs them.
_SENDS_WAITING_MIN = 2
_WORDS = {
    ActionKind.FORWARD: "forward", ActionKind.BACKWARD: "backward", ActionKind.BACKWARD_INPUT: "backward for inputs",
    ActionKind.BACKWARD_WEIGHT: "backward for weights",
}  # fmt: skip


class StageHandler(Protocol):
    """What computes the actions of a rank's stages."""

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        """Run a stage on a micro-batch; return what the next stage receives, None in the last stage.

        received: what the stage before has returned, None in stage 0: leaf tensors, which require grad where those of
        the stage before do, if the step has backwards.
        """

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        """Run the backward (B), or its part for the inputs (I); return the gradients of what was received.

        grads: of what the forward has returned, None in the last stage: by tensor, None for one that required no grad.
        The gradients that are returned go by the tensors received; None in stage 0. A tensor's None stands for zeros,
        and gradients of tensors that required none in the stage before are dropped.
        """

    def backward_weight(self, action: Action) -> None:
        """Run the part of a backward for the weights (W)."""


class PipelineExecutor:
    """Runs the actions of one rank of a pipeline."""

    def __init__(self, links: PipelineLinks, *, index: int) -> None:
        """index: this rank's place on the pipeline axis."""
        self._links = links
        self._index = index

    def run(self, tables: Tables, handler: StageHandler, keys: Sequence[Hashable] = ()) -> None:
        """Run this rank's actions of a step. Collective along the pipeline axis; returns once all is sent and received.

        tables: those of all ranks; a step has forwards and backwards, or forwards alone (`forward_tables`).
        keys: one for each micro-batch, hashable and equal on all ranks, that tells the shapes at its boundaries, such
        as the shapes of its inputs: where a key is known, no header is sent. Without keys each activation has one.

        An error of the handler passes through. The links cannot be used again then, because other ranks are in the
        middle of the step.
        """
        program = _compile(tables, self._index)
        held = _Held(self._links.device)
        receive, send = self._links.receive, self._links.send
        action = None
        try:
            self._links.begin(
                program.order, keys, gradients=program.gradients, sends_waiting=program.sends_waiting
            )
            for action, receives, takes, sends, leaves in program.steps:
                kind = action.kind
                if kind is ActionKind.BACKWARD_WEIGHT:
                    handler.backward_weight(action)
                    continue
                given: Gradients | None
                made: Gradients | None
                if receives is not None:
                    given = receive(receives)
                else:
                    given = held.take(takes) if takes is not None else None
                if kind is ActionKind.FORWARD:
                    made = handler.forward(action, given)  # type: ignore[arg-type]
                else:
                    made = handler.backward(action, given)
                if sends is not None:
                    send(sends, _some(made, action))
                elif leaves is not None:
                    held.leave(leaves, _some(made, action), gradients=program.gradients)
            self._links.finish()
        except BaseException as error:
            # Other ranks are told where in the step it was, as a note of the traceback; Python 3.10 has none.
            if action is not None and hasattr(error, "add_note"):
                stage, kind, micro_batch = action
                error.add_note(f"in the {_WORDS[kind]} of micro-batch {micro_batch} in stage {stage}")
            self._links.abandon(error)
            raise


def _some(made: Gradients | None, action: Action) -> Gradients:
    if made is None:
        raise StateError(f"{action}: the handler returned None, and another stage waits for tensors")
    return made


class _Crossing(NamedTuple):
    """What crosses a boundary between two stages of one rank."""

    stage: int
    micro_batch: int
    forward: bool


class _Held:
    """Tensors between two stages of this rank."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: dict[_Crossing, Gradients] = {}
        # By boundary and micro-batch, of activations that come back as gradients.
        self._forms: dict[tuple[int, int], Forms] = {}

    def take(self, crossing: _Crossing) -> Gradients:
        return self._tensors.pop(crossing)

    def leave(self, crossing: _Crossing, tensors: Gradients, *, gradients: bool) -> None:
        stage, micro_batch, forward = crossing
        if not forward:
            what = f"the gradient of micro-batch {micro_batch} behind stage {stage}"
            forms = self._forms.pop((stage, micro_batch))
            self._tensors[crossing] = by_tensor(trained_gradients(tensors, forms, self._device, what), forms)
            return
        activations = [tensor for tensor in tensors if tensor is not None]
        if gradients:
            self._forms[stage, micro_batch] = tuple(map(TensorForm.of, activations))
        self._tensors[crossing] = tuple(
            tensor.detach().requires_grad_(gradients and tensor.requires_grad) for tensor in activations
        )


class _Step(NamedTuple):
    """An action, what it needs and where its outcome goes: over a link, or to a stage of this rank."""

    action: Action
    receives: BoundaryMessage | None
    takes: _Crossing | None
    sends: BoundaryMessage | None
    leaves: _Crossing | None


@dataclass(frozen=True, slots=True)
class _Program:
    """A rank's table with its messages. order: those of each of its links, in the sender's order."""

    steps: tuple[_Step, ...]
    order: dict[MessageLink, tuple[BoundaryMessage, ...]]
    gradients: bool
    sends_waiting: int


@lru_cache(maxsize=8)
def _compile(tables: Tables, index: int) -> _Program:
    last = max(action.stage for actions in tables for action in actions)
    order = {}
    messages: dict[_Crossing | None, BoundaryMessage] = {}
    for link, actions in message_order(tables).items():
        if index in link[:2]:
            crossings = [_crossings(action, last)[1] for action in actions]
            order[link] = tuple(BoundaryMessage.over(link, made[:2]) for made in crossings if made is not None)
            messages.update(zip(crossings, order[link], strict=True))
    steps = []
    for action in tables[index]:
        needed, made = _crossings(action, last)
        receives, sends = messages.get(needed), messages.get(made)
        steps.append(_Step(action, receives, None if receives else needed, sends, None if sends else made))
    gradients = any(action.kind is not ActionKind.FORWARD for actions in tables for action in actions)
    # The receive of tensors behind a header is posted only when they are used.
    waiting = max(_SENDS_WAITING_MIN, sends_needed(tables, posted_ahead=0))
    return _Program(tuple(steps), order, gradients, waiting)


def _crossings(action: Action, last: int) -> tuple[_Crossing | None, _Crossing | None]:
    """What an action needs from another stage, and what it makes for one."""
    stage, kind, micro_batch = action
    if kind is ActionKind.BACKWARD_WEIGHT:
        return None, None
    forward = kind is ActionKind.FORWARD
    before = _Crossing(stage - 1, micro_batch, forward) if stage > 0 else None
    behind = _Crossing(stage, micro_batch, forward) if stage < last else None
    return (before, behind) if forward else (behind, before)
