"""What a pass over a model needs beside parameters and their gradients: one type for estimates and measurements.

Activations of one rank of a pipeline: what it holds behind each action of its table, and at the busiest moment.

A forward saves what its stage's blocks save, and keeps the tensors at the stage's boundaries; a backward releases it. A
backward that is split releases all but what weight gradients are computed from, until they are. Buffers of messages
come to that. The engine sets aside what this module counts, and the estimator prints it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from infinity.plan.pipeline import Action, ActionKind, Tables, activations_in_flight, held_behind, sends_needed
from infinity.plan.stages import PipelinePlace
from infinity.plan.types import Tier


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device of one micro-batch's forward and backward, gradients of parameters left out.

    nbytes: at the busiest moment; saved_nbytes: what lies between forward and backward. parts: what the busiest moment
    is made of, by name. source: where the numbers are from, with a reason where it is not the first choice.
    inputs: how many tensors of these are kept by blocks that are computed again, and may lie on another tier;
    input_nbytes: bytes of one. gaps_nbytes: what the process's allocator takes beyond them, if they lie in the
    process's memory. blocks: the same by block, of which stages have
    their part; None where it is not known.
    """

    nbytes: int
    parts: Mapping[str, int]
    source: str
    saved_nbytes: int = 0
    inputs: int = 0
    input_nbytes: int = 0
    gaps_nbytes: int = 0
    blocks: BlockActivations | None = None


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """A micro-batch's activations by block, for a model in stages.

    saved: bytes that each block's forward saves. deferred: of each block's linear layers, their inputs and the
    gradients of their outputs, from which a split backward computes weight gradients later. saves_input: whether what a
    block saves contains the tensor that enters it. recomputed: whether it saves that alone, and is computed again.
    head_nbytes: saved behind the last block; loss_nbytes: the same at the loss's busiest moment; head_deferred: of the
    head, as of a block. working: what each block's backward has beside what all forwards have saved. boundary_nbytes:
    of the tensor that goes from block to block.
    """

    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    saves_input: tuple[bool, ...]
    recomputed: tuple[bool, ...]
    working: tuple[int, ...]
    boundary_nbytes: int
    head_nbytes: int = 0
    loss_nbytes: int = 0
    head_deferred: int = 0

    def with_inputs_elsewhere(self) -> BlockActivations:
        """The same where inputs of recomputed blocks lie on another tier between forward and backward."""
        each = [*zip(self.saved, self.working, self.recomputed, strict=True)]
        return replace(
            self, saved=tuple(0 if again else saved for saved, _, again in each),
            working=tuple(working + (saved if again else 0) for saved, working, again in each),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class OffloadedCheckpoints:
    """Checkpoints that lie on a tier between forward and backward: how many, bytes of each, and how many buffers in CPU
    memory they pass through (none on their way to CPU memory).
    """

    tier: Tier
    count: int
    each_nbytes: int
    buffers: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the tier."""
        return self.count * self.each_nbytes

    @property
    def freed_nbytes(self) -> int:
        """Bytes that the device is spared: of all but the one that backward works on."""
        return max(self.count - 1, 0) * self.each_nbytes


# Sends of a link that an executor keeps before it waits for the oldest, where the schedule needs no more.
_SENDS_WAITING_MIN = 2


@dataclass(frozen=True, slots=True)
class ActionBytes:
    """Bytes of activations around one action: in front of it, at its busiest moment, and behind it."""

    action: Action
    before: int
    busiest: int
    behind: int

    @property
    def levels(self) -> tuple[int, int, int]:
        """In front of the action, at its busiest moment, and behind it."""
        return self.before, self.busiest, self.behind


@dataclass(frozen=True, slots=True)
class StageActivations:
    """What a rank of a pipeline holds of activations.

    in_flight: micro-batches that forwards have begun and backwards not yet ended, at most, each of one of the rank's
    stages. saved, kept, deferred: bytes by stage of the model, and 0 for other ranks' stages: what a forward saves; the
    tensors at its boundaries that the rank keeps beside; what lies between a split backward's two parts. buffers:
    bytes of messages under way. moments: by action of the rank's table.
    """

    in_flight: int
    saved: tuple[int, ...]
    kept: tuple[int, ...]
    deferred: tuple[int, ...]
    buffers: int
    moments: tuple[ActionBytes, ...]

    @property
    def nbytes(self) -> int:
        """Bytes at the busiest moment of a step."""
        return max((moment.busiest for moment in self.moments), default=self.buffers)

    @property
    def saved_nbytes(self) -> int:
        """Bytes between two actions, at most: all but the working memory of an action."""
        return max((moment.behind for moment in self.moments), default=self.buffers)


def stage_activations(blocks: BlockActivations, place: PipelinePlace) -> StageActivations:
    """Follow the activations of a place's rank along its table. blocks: one entry for each block of the cut."""
    cut, actions, last = place.cut, place.actions, place.cut.last
    saved, kept, deferred, working = ([0] * (last + 1) for _ in range(4))
    for stage in place.stages:
        begin, end = cut.bounds[stage : stage + 2]
        saved[stage] = sum(blocks.saved[begin:end])
        deferred[stage] = sum(blocks.deferred[begin:end])
        # What comes in, and what goes out, where no block saves it.
        received = stage > 0 and not blocks.saves_input[begin]
        kept[stage] = blocks.boundary_nbytes * (received + (stage < last))
        moments = [*blocks.working[begin:end]]
        if stage == last:
            saved[stage] += blocks.head_nbytes
            deferred[stage] += blocks.head_deferred
            moments = [each - blocks.head_nbytes for each in moments] + [blocks.loss_nbytes - blocks.head_nbytes]
        working[stage] = max(0, *moments)
    whole = [sum(each) for each in zip(saved, kept, strict=True)]
    buffers = blocks.boundary_nbytes * _messages(place)
    split = any(action.kind is ActionKind.BACKWARD_INPUT for action in actions)
    behind = [buffers + round(held) for held in held_behind(actions, whole, deferred)]
    moments_of = [
        ActionBytes(action, before, max(after, before + working[action.stage] * action.kind.sends_backward), after)
        for action, before, after in zip(actions, [buffers, *behind], behind, strict=False)
    ]
    return StageActivations(
        in_flight=round(activations_in_flight((actions,))[0]), saved=tuple(saved), kept=tuple(kept),
        deferred=tuple(deferred) if split else (0,) * (last + 1), buffers=buffers, moments=tuple(moments_of),
    )  # fmt: skip


def in_stages(found: Activations, place: PipelinePlace) -> Activations:
    """Of a whole model's activations of one micro-batch, those of a place's rank in a step of its pipeline.

    Where they are not known by block, the whole model's stand for those of a stage.
    """
    blocks = found.blocks
    if blocks is None or len(blocks.saved) != len(place.cut.blocks):
        return found
    held = stage_activations(blocks, place)
    peak = held.nbytes
    inputs = inputs_in_flight(blocks.recomputed, place)
    words = f"{held.in_flight} micro-batch{'es' if held.in_flight > 1 else ''} of a stage in flight"
    return replace(
        found, nbytes=peak, saved_nbytes=held.saved_nbytes, parts=dict(_parts(held)), source=f"{found.source}, {words}",
        inputs=min(inputs, found.inputs * held.in_flight),
        gaps_nbytes=ceil(found.gaps_nbytes * peak / max(found.nbytes, 1)),
    )  # fmt: skip


def sent_nbytes(blocks: BlockActivations, place: PipelinePlace) -> int:
    """Bytes that a place's rank sends to other stages in a step: boundaries, and their gradients back."""
    ends = {True: place.cut.last, False: 0}
    crossing = [
        action for action in place.actions
        if action.kind is not ActionKind.BACKWARD_WEIGHT
        and action.stage != ends[action.kind is ActionKind.FORWARD]
    ]  # fmt: skip
    return len(crossing) * blocks.boundary_nbytes


def _messages(place: PipelinePlace) -> int:
    """Tensors of a boundary that lie in buffers of messages, at most: an activation and a gradient that are received
    ahead, the gradient in use, and of either direction those that were sent and not yet waited for.
    """
    last, stages = place.cut.last, place.stages
    gradients = any(action.kind is not ActionKind.FORWARD for action in place.actions)
    takes, gives, waiting = stages[-1] > 0, stages[0] < last, _sends_waiting(place.tables)
    return takes + waiting * gives + (2 * gives + waiting * takes if gradients else 0)


@lru_cache(maxsize=16)
def _sends_waiting(tables: Tables) -> int:
    several = len({action.stage for action in tables[0]}) > 1
    return max(_SENDS_WAITING_MIN, sends_needed(tables, posted_ahead=0) if several else 0)


def inputs_in_flight(recomputed: Sequence[bool], place: PipelinePlace) -> int:
    """Return how many inputs of recomputed blocks a place's rank holds at most. recomputed: by block of the cut."""
    counts = [0] * (place.cut.last + 1)
    for stage in place.stages:
        begin, end = place.cut.bounds[stage : stage + 2]
        counts[stage] = sum(recomputed[begin:end])
    return round(activations_in_flight((place.actions,), counts, [0] * len(counts))[0])


def _parts(held: StageActivations) -> Iterator[tuple[str, int]]:
    """What the busiest moment is made of, by name."""
    busiest = max(held.moments, key=lambda moment: moment.busiest)
    at = held.moments.index(busiest)
    done = held.moments[: at + 1] if busiest.busiest == busiest.behind else held.moments[:at]
    actions = [moment.action for moment in done]
    nothing = [0] * len(held.saved)

    def behind(saved: tuple[int, ...] | list[int], deferred: tuple[int, ...] | list[int]) -> int:
        return round([0.0, *held_behind(actions, saved, deferred)][-1])

    count = behind([1] * len(nothing), nothing)
    yield f"{count} micro-batch{'es' if count != 1 else ''} in flight", behind(held.saved, nothing)
    yield "boundaries of stages", behind(held.kept, nothing) + held.buffers
    if any(held.deferred):
        yield "deferred weight gradients", behind(nothing, held.deferred)
    if working := busiest.busiest - (busiest.behind if busiest.busiest == busiest.behind else busiest.before):
        yield "working memory of a backward", working
