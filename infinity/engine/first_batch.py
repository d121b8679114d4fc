"""A micro-batch's activations: known before they are allocated, or refused on all ranks while nothing is lost.

A plan is made before any batch is seen. What shows one at the start (`memory.activations.sequence_length`, training
data where memory is short) is measured there. Otherwise the first forward is: on fake tensors before it begins where
memory is short, else by counting what autograd saves while it runs, which ends where that passes the limit. A batch
with a larger tensor than all before is looked at again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from infinity.config import ResolvedConfig
from infinity.config.units import format_bytes
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import agree_on_numbers
from infinity.engine import precision
from infinity.engine.set_aside import with_activations
from infinity.errors import CapacityError, ConfigError
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.tiers.device import Device
from infinity.plan.activation_bytes import Activations
from infinity.plan.capacity_report import less_activations
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan
from infinity.plan.types import Tier
from infinity.zero.activation_measurement import LiveBytes, measure_call
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator

# Positional and keyword arguments of a model.
Call = tuple[Sequence[Any], Mapping[str, Any]]
Shapes = tuple[tuple[int, ...], ...]


def stated_batch(config: ResolvedConfig, model: nn.Module) -> dict[str, Tensor] | None:
    """Return a micro-batch of the configured length, for a model that takes `input_ids`; None without either."""
    length = config.config.memory.activations.sequence_length
    takes = inspect.signature(model.forward).parameters
    if length is None or "input_ids" not in takes:
        return None
    tokens = torch.zeros(config.micro_batch, length, dtype=torch.long, device="cpu")
    return {name: tokens for name in ("input_ids", "labels") if name in takes}


def on_shapes(
    config: ResolvedConfig, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], device: Device, *,
    recomputed: Sequence[str], blocks: Sequence[str] = (), training: bool = False,
) -> Activations | None:  # fmt: skip
    """Measure a call on fake tensors, in the precision of the run; None where the model cannot run on them.

    training: as it is trained, also where the model evaluates now.
    """
    if config.casts_inputs:
        args = precision.half(tuple(args))
    with precision.autocast(config.config.torch_autocast, device.torch), torch.enable_grad():
        try:
            found = measure_call(
                model, args, kwargs, dtype=DTYPES[config.compute_dtype], recomputed=recomputed, blocks=blocks,
                keep_ops=config.config.activation_checkpointing.keep_ops, training=training,
                holds_output=not blocks,
            )  # fmt: skip
        except ConfigError:
            return None
    return replace(found, source=f"{_in_words(shapes_of(args, kwargs))}, measured")


def shapes_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shapes:
    """The shapes of a call's tensors, in order."""
    return tuple(tuple(each.shape) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))


class FirstBatch:
    """Looks at the first micro-batch of a run, and at each that is larger than those before."""

    def __init__(
        self, question: PlanInputs, plan: Plan, model: nn.Module, coordinator: Coordinator, compiled: CompiledModules,
        group: AxisGroup, device: Device, ledger: Ledger,
    ) -> None:  # fmt: skip
        self._question, self._plan, self._model, self._compiled = question, plan, model, compiled
        self._coordinator, self._device, self._ledger = coordinator, device, ledger
        # All ranks come to the first forward, and to each gather in it.
        self._group = group if plan.policy.collective_forward and group.size > 1 else None
        self._first = True
        self._raised_on_all: CapacityError | None = None
        # The largest batches that were looked at; one that `initialize` has measured is known.
        tokens = stated_batch(question.config, model) if question.reserve.activations.endswith("measured") else None
        self._seen = [] if tokens is None else [shapes_of((), tokens)]
        free, reserve = question.free, question.reserve
        ledger.forecast(ledger.predicted_nbytes, reserve.activation_nbytes, reserve.activations)
        gaps = int(device.allocator.free_gaps * (free.device or 0))
        beside = free.left({Tier.CPU: reserve.overhead_nbytes, Tier.GPU: reserve.product_nbytes + gaps})
        self._room = None if free.device is None else beside.room(Tier.GPU, plan.nbytes_by_tier())
        # On fake tensors a whole model runs.
        self._whole = question.axis.size == 1 and question.cut is None
        self._tight = self._room is not None and self._room < (free.device or 0) // 4

    @contextmanager
    def forward(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
        """Around a forward. CapacityError if the activations of its batch do not fit."""
        shapes = shapes_of(args, kwargs)
        if not torch.is_grad_enabled() or any(_covers(seen, shapes) for seen in self._seen):
            yield
            return
        group = self._group if self._first else None
        # The operations of a compiled module cannot be seen.
        counts = not self._compiled.active
        found = None
        if self._whole and (self._tight or not counts):
            question = self._question
            found = on_shapes(
                question.config, self._model, args, kwargs, self._device, recomputed=question.checkpointed
            )
        if found is not None or not counts:
            if found is not None:
                self._judge(found, group)
            yield
        else:
            live = LiveBytes(self._model, self._question.checkpointed, self._limit(shapes, group))
            with live.counting(), self._agreeing(live, shapes, group):
                yield
            self._judge(live.found(f"{_in_words(shapes)}, counted"), group)
        self._first = False
        self._seen = [seen for seen in self._seen if not _covers(shapes, seen)] + [shapes]

    def _limit(self, shapes: Shapes, group: AxisGroup | None) -> Callable[[int], None]:
        def limit(nbytes: int) -> None:
            if group is None and self._room is not None and nbytes > self._room:
                raise self._refused(_so_far(nbytes, shapes))

        return limit

    def _agreeing(self, live: LiveBytes, shapes: Shapes, group: AxisGroup | None) -> AbstractContextManager[None]:
        """With several ranks, ask in front of each gather whether one of them has no more room."""
        if group is None:
            return nullcontext()
        return self._coordinator.asking(
            lambda unit: self._agree(_so_far(live.nbytes, shapes), group, f"room for activations before {unit}")
        )

    def _agree(self, found: Activations, group: AxisGroup | None, name: str = "room for activations") -> None:
        """CapacityError, on all ranks where there is a group, if one of them has no room for so much."""
        exceeds = self._room is not None and sum(self._taken(found)) > self._room
        if group is not None:
            mine = [float(exceeds), float(found.nbytes)]
            heard = agree_on_numbers(mine, group, name)
            rows = [row for row in heard if row[0]]
            if rows and not exceeds:
                exceeds, found = True, replace(found, nbytes=int(rows[0][1]), source="on another rank")
        if exceeds:
            error = self._refused(found)
            self._raised_on_all = None if group is None else error
            raise error

    def raised_on_all(self, error: BaseException) -> bool:
        """Whether all ranks raise this error, so that none of them waits for another."""
        return error is self._raised_on_all

    def _judge(self, found: Activations, group: AxisGroup | None) -> None:
        self._agree(found, group)
        reserve = self._with(found)
        predicted = reserve.peak_nbytes(self._plan)
        if predicted >= self._ledger.predicted_nbytes:
            self._ledger.forecast(predicted, reserve.activation_nbytes, reserve.activations)

    def _with(self, found: Activations) -> Any:
        question = self._question
        return with_activations(question.reserve, found, question.config, self._device, question.free)

    def _taken(self, found: Activations) -> tuple[int, int]:
        """What the activations take, and what the heap of a process loses in gaps between them."""
        reserve = self._with(found)
        return reserve.activation_nbytes, 0 if self._device.own_memory else reserve.gaps_nbytes

    def _refused(self, found: Activations) -> CapacityError:
        free, held = self._question.free, self._plan.nbytes_by_tier()
        nbytes, gaps = self._taken(found)
        beside = f" and {format_bytes(gaps)} of gaps in the heap" if gaps else ""
        return CapacityError(
            f"the activations of this micro-batch take {format_bytes(nbytes)} ({found.source}){beside}, "
            f"but {format_bytes(self._room or 0)} of {format_bytes(free.device or 0)} are left for "
            f"them beside the plan's {format_bytes(held[Tier.GPU])}. Weights and states are as they were: go on with a "
            f"smaller batch, or initialize again with less: {less_activations(self._question)}"
        )


def _covers(seen: Shapes, shapes: Shapes) -> bool:
    """Whether a call with `shapes` takes no more than one that was seen."""
    return len(seen) == len(shapes) and all(
        len(mine) == len(other) and all(each <= most for each, most in zip(other, mine, strict=True))
        for mine, other in zip(seen, shapes, strict=True)
    )


def _in_words(shapes: Shapes) -> str:
    """The first tensor's shape: "8 x 128"."""
    largest = max(shapes, key=len, default=())
    return " x ".join(f"{each:,}" for each in largest) or "no tensors"


def _so_far(nbytes: int, shapes: Shapes) -> Activations:
    return Activations(nbytes, {}, f"{_in_words(shapes)}, before the end of forward")
