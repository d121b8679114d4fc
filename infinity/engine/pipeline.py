"""A step of a pipeline: all micro-batches through this rank's stages, in the order of the schedule's table.

The executor walks the table and moves what crosses boundaries; here is what an action does. A forward runs the model's
own forward of one stage, on the micro-batch that every rank of the pipeline has; a backward begins with the gradients
that came from the next stage, or with the loss, and gives those of what came from the stage before. To ZeRO the whole
step is one pass, whose uses of units the plan has scheduled.

What a rank of a pipeline holds between forwards and backwards, counted and booked as the step goes on.

Micro-batches in flight are counted as the plan counts them: from a forward until its gradients are complete. Tensors at
boundaries and deferred weight gradients are booked in the ledger; what autograd saves is torch's own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map_only

from infinity.base import trace
from infinity.distributed.collectives import exchange
from infinity.distributed.consistency import check_same_batch
from infinity.distributed.links import Boundary, Gradients, PipelineLinks
from infinity.engine import micro_batches
from infinity.engine.optimizer import TieredOptimizer
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.observability.memory_report import PipelineUse
from infinity.parallel.deferred_weights import DeferredWeights
from infinity.parallel.executor import PipelineExecutor
from infinity.parallel.layers import PipelineModule, StagedLayers
from infinity.parallel.random_state import draw_seed, has_dropout, seeded
from infinity.parallel.stage import StagedModel
from infinity.plan.pipeline import Action, ActionKind, forward_tables
from infinity.plan.stages import PipelinePart
from infinity.plan.types import Kind, Tier
from infinity.zero.unit import Unit

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
        storages = [tensor.untyped_storage() for tensor in (*held, *self._links.tensors())]
        self._book(boundary=sum({each.data_ptr(): each.nbytes() for each in storages}.values()))

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


# A model of which one stage at a time runs: see `infinity.parallel.stage`.
Staged = StagedModel | StagedLayers


@dataclass(frozen=True, slots=True)
class BatchArguments:
    """What a model is called with for one micro-batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> BatchArguments:
        """Read a micro-batch as a loader gives it: a mapping of keyword arguments, a sequence of positional ones
        (inputs, labels), or one tensor. Tensors come to the device.
        """
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Its tensors, those in tuples and mappings, too, by name: "[0][1]", "['input_ids']"."""
        named: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        found = tree_leaves_with_path(named)
        return {keystr(path): value for path, value in found if isinstance(value, Tensor)}

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of its tensors, by name: equal for micro-batches whose boundaries have equal shapes."""
        return tuple((name, tuple(value.shape)) for name, value in self.tensors.items())


def loss_of(output: Any) -> Tensor:
    """Return the loss that a model has returned: the output itself, its `loss`, or its first element. ConfigError where
    there is none.
    """
    if isinstance(output, Tensor):
        loss: Any = output
    elif isinstance(output, Mapping):
        loss = output.get("loss")
    else:
        loss = getattr(output, "loss", output[0] if isinstance(output, (tuple, list)) and output else None)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ConfigError(
            f"train_batch and eval_batch need a model that returns its loss, and it returned {type(output).__name__} "
            "without one: give the micro-batches labels, or have forward return a loss of one element"
        )
    return loss


def draw(batches: Any, count: int, verb: str) -> list[Any]:
    """Return the micro-batches of a step: a list of `count`, or the next ones of an iterator. ConfigError for fewer."""
    if isinstance(batches, (list, tuple)):
        drawn = list(batches)
    elif isinstance(batches, Iterable) and not isinstance(batches, Mapping):
        drawn = list(islice(iter(batches), count))
    else:
        raise ConfigError(
            f"engine.{verb} takes a list of {count} micro-batches or an iterator, got {type(batches).__name__}: a "
            "micro-batch is a mapping of the model's arguments, or (inputs, labels)"
        )
    if len(drawn) != count:
        raise ConfigError(
            f"engine.{verb} was given {len(drawn)} micro-batches, and a step has {count} "
            "(gradient_accumulation_steps): give as many, or an iterator that does not end in the middle of a step"
        )
    return drawn


class PipelineStep:
    """Runs the micro-batches of a step through this rank's stages."""

    def __init__(
        self, runtime: Runtime, staged: Staged, executor: PipelineExecutor, part: PipelinePart,
        deferred: DeferredWeights | None, memory: PipelineMemory,
    ) -> None:  # fmt: skip
        """deferred: for a schedule that splits backwards."""
        self.memory = memory
        self._runtime = runtime
        self._deferred = deferred
        self._staged = staged
        self._executor = executor
        self._part = part
        backwards = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
        mine = part.split.tables[part.index]
        runtime.attached.checkpointing.expect([(stage, index) for stage, kind, index in mine if kind in backwards])

    def train(self, batches: Sequence[BatchArguments], optimizer: TieredOptimizer) -> list[Tensor]:
        """Run forward and backward of all micro-batches. Returns their losses on the last stage, nothing elsewhere."""
        self._check_same(batches)
        self.memory.begin_step()
        actions = _Training(self._runtime, self._staged, self._part, batches, optimizer, self._deferred, self.memory)
        try:
            with self._runtime.coordinator.pass_of_step("train"):
                self._executor.run(self._part.split.tables, actions, keys=[batch.shapes for batch in batches])
        finally:
            if self._deferred is not None:
                # What an error has left; behind a whole step nothing.
                self._deferred.abandon()
            self.memory.end_step()
        actions.check_done()
        return actions.losses

    def evaluate(self, batches: Sequence[BatchArguments]) -> list[Tensor]:
        """Run forward of any number of micro-batches. Returns their losses on the last stage, nothing elsewhere."""
        self._check_same(batches)
        split = self._part.split
        actions = _Forwards(self._runtime, self._staged, self._part, batches)
        tables = forward_tables(split.pp, len(batches), split.virtual)
        with torch.no_grad(), self._runtime.coordinator.pass_of_step("eval"):
            self._executor.run(tables, actions, keys=[batch.shapes for batch in batches])
        return actions.losses

    def remove(self) -> None:
        """Leave the model as it was."""
        self._staged.remove()
        if self._deferred is not None:
            self._deferred.remove()

    def _check_same(self, batches: Sequence[BatchArguments]) -> None:
        named = {
            f"argument {name} of micro-batch {index}": value
            for index, batch in enumerate(batches)
            for name, value in batch.tensors.items()
        }
        for group in (self._runtime.groups.pipeline, self._runtime.groups.tensor):
            if group.size > 1:
                check_same_batch((), named, group)


class _Forwards:
    """What the forwards of one step do."""

    def __init__(self, runtime: Runtime, staged: Staged, part: PipelinePart, batches: Sequence[BatchArguments]) -> None:
        self._runtime = runtime
        self._staged = staged
        self._part = part
        self._batches = batches
        # With dropout each stage and micro-batch has random numbers of its own, which no schedule changes.
        self._seed = draw_seed() if has_dropout(runtime.module) and runtime.module.training else None
        self.losses: list[Tensor] = []

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        """Run a stage's forward of a micro-batch; returns what the next stage takes."""
        output = self._run(action, received)
        if action.stage < self._part.split.cut.last:
            return cast(Boundary, output)
        self.losses.append(loss_of(output).detach())
        return None

    def _run(self, action: Action, received: Boundary | None) -> Any:
        runtime, batch = self._runtime, self._batches[action.micro_batch]
        runtime.coordinator.use_micro_batch(action.micro_batch)
        args = micro_batches.half(batch.args) if runtime.config.casts_inputs else batch.args
        under = micro_batches.autocast(runtime.config.sections.torch_autocast, runtime.device.torch)
        numbers: AbstractContextManager[Any] = nullcontext()
        if self._seed is not None:
            own = self._seed + action.stage * len(self._batches) + action.micro_batch
            numbers = seeded(own, runtime.device.torch)
        with trace.span(trace.PHASE, "forward", action), under, numbers:
            return self._staged.forward(action.stage, received, args, batch.kwargs)

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        """Evaluation has none."""
        raise AssertionError(f"{action} in a table of forwards")

    def backward_weight(self, action: Action) -> None:
        """Evaluation has none."""
        raise AssertionError(f"{action} in a table of forwards")


class _Training(_Forwards):
    """What the actions of a training step do; holds what forwards leave for their backwards."""

    def __init__(
        self, runtime: Runtime, staged: Staged, part: PipelinePart, batches: Sequence[BatchArguments],
        optimizer: TieredOptimizer, deferred: DeferredWeights | None, memory: PipelineMemory,
    ) -> None:  # fmt: skip
        super().__init__(runtime, staged, part, batches)
        self._optimizer = optimizer
        self._deferred = deferred
        self._memory = memory
        self._chunks = {stage: chunk for chunk, stage in enumerate(part.stages)}
        # By stage and micro-batch: the tensors received, and what the forward returned.
        self._open: dict[tuple[int, int], tuple[Boundary, Boundary]] = {}

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        """Run a stage's forward of a micro-batch, and keep its graph; returns what the next stage takes."""
        stage, _, index = action
        self._memory.ran(action)
        self._runtime.attached.checkpointing.begin_forward((stage, index))
        if self._deferred is None:
            output = self._run(action, received)
        else:
            with self._deferred.collecting((stage, index)):
                output = self._run(action, received)
        if stage < self._part.split.cut.last:
            self._open[stage, index] = received or (), output
            self._memory.book(self._open.values())
            return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in output)
        loss = loss_of(output)
        self.losses.append(loss.detach())
        factor = self._runtime.step.loss_scale / len(self._batches)
        self._open[stage, index] = received or (), (micro_batches.scaled(loss, factor),)
        self._memory.book(self._open.values())
        return None

    def backward(self, action: Action, grads: Gradients | None) -> Gradients | None:
        """Run a stage's backward of a micro-batch, or its part for inputs; returns gradients of what was received."""
        stage, kind, index = action
        coordinator, chunk = self._runtime.coordinator, self._chunks[stage]
        self._memory.book([*self._open.values(), (grads or (), ())])
        received, outputs = self._open.pop((stage, index))
        split = kind is ActionKind.BACKWARD_INPUT
        if not split:
            self._complete(action)
        coordinator.use_micro_batch(index)
        with trace.span(trace.PHASE, "backward", action), ExitStack() as stack:
            if split:
                assert self._deferred is not None
                stack.enter_context(self._deferred.backward_input((stage, index), self._params(stage)))
            coordinator.begin_backward(scaled=True, chunk=chunk, collects=not split)
            rooted = [at for at, output in enumerate(outputs) if output.requires_grad]
            if rooted:
                gradients = None if grads is None else [grads[at] for at in rooted]
                torch.autograd.backward([outputs[at] for at in rooted], gradients)
            coordinator.end_backward()
            self._runtime.attached.checkpointing.settle()
        self._memory.ran(action)
        return tuple(tensor.grad for tensor in received) if stage > 0 else None

    def backward_weight(self, action: Action) -> None:
        """Compute the gradients of a stage's weights that its backward has deferred, and collect each unit's."""
        stage, _, index = action
        gradients, key = self._runtime.gradients, (stage, index)
        assert self._deferred is not None
        self._complete(action)
        waits = Counter(self._unit_of(param) for param in self._deferred.params(key))
        with trace.span(trace.PHASE, "backward", action):
            gradients.begin_backward(scaled=True, chunk=self._chunks[stage])
            for param in self._deferred.weights(key):
                unit = self._unit_of(param)
                waits[unit] -= 1
                if not waits[unit]:
                    gradients.ready(unit)
            gradients.end_backward()
        self._memory.ran(action)

    def check_done(self) -> None:
        """Every forward has had its backward."""
        assert not self._open, f"{len(self._open)} forwards without a backward"

    def _complete(self, action: Action) -> None:
        """Say whether the gradients at hand are a stage's last before the step, which may begin with them."""
        runtime, last = self._runtime, action.micro_batch == len(self._batches) - 1
        runtime.gradients.begin_micro_step(last=last)
        if last and runtime.plan.policy.step_in_backward:
            runtime.step.start_in_backward(self._optimizer.param_groups)

    def _params(self, stage: int) -> Iterator[nn.Parameter]:
        """What a stage trains."""
        for index in self._part.units_of(stage):
            unit = self._runtime.access.units[index]
            yield from unit.params if unit.layout.trainable else ()

    def _unit_of(self, param: nn.Parameter) -> Unit:
        return self._runtime.coordinator.unit_of(param)


def pipeline_of(runtime: Runtime) -> PipelineStep | None:
    """Return what runs the steps of a pipeline; None where the model is not cut into stages."""
    part, groups = runtime.plan.pipeline, runtime.groups
    if part is None:
        return None
    cut, staged = part.split.cut, cast(Staged, None)
    if isinstance(runtime.module, PipelineModule):
        staged = StagedLayers(runtime.module, cut, own=part.stages)
    else:
        dtype = DTYPES[runtime.config.compute_dtype]
        staged = StagedModel(runtime.module, cut, own=part.stages, dtype=dtype, answers=dict(cut.answers))
    links = PipelineLinks(
        groups.pipeline_forward, groups.pipeline_backward, groups.pipeline, device=runtime.device.torch
    )
    deferred = DeferredWeights(runtime.module) if part.split.schedule == "zero_bubble" else None
    memory = PipelineMemory(runtime.store.ledger, links, deferred)
    return PipelineStep(runtime, staged, PipelineExecutor(links, index=part.index), part, deferred, memory)


def step_loss(losses: Sequence[Tensor], runtime: Runtime, count: int) -> Tensor:
    """Return the mean over micro-batches and data ranks, in fp32 on the device; the same bits on every rank.
    Collective. losses: this rank's, none where it has not the last stage. count: micro-batches of each data rank.
    """
    groups = runtime.groups
    tells = bool(losses) and groups.tensor.index == 0
    mine = [float(loss) for loss in losses] if tells else [0.0] * count
    rows = exchange(mine, groups.world, "exchange of losses") if groups.world.size > 1 else [mine]
    total = math.fsum(value for row in rows for value in row)
    return torch.tensor(total / (count * groups.data.size), dtype=torch.float32, device=runtime.device.torch)
