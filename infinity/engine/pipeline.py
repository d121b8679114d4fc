"""A step of a pipeline: all micro-batches through this rank's stages, in the order of the schedule's table.

The executor walks the table and moves what crosses boundaries; here is what an action does. A forward runs the model's
own forward of one stage, on the micro-batch that every rank of the pipeline has; a backward begins with the gradients
that came from the next stage, or with the loss, and gives those of what came from the stage before. To ZeRO the whole
step is one pass, whose uses of units the plan has scheduled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from infinity.distributed.collectives import exchange
from infinity.distributed.links import PipelineLinks
from infinity.engine import precision
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError
from infinity.memory.partition import DTYPES
from infinity.observability import trace
from infinity.optim.optimizer_view import TieredOptimizer
from infinity.parallel.executor import PipelineExecutor
from infinity.parallel.same_batch import check_same_batch
from infinity.parallel.stage import Boundary, StagedModel
from infinity.plan.pipeline import Action, ActionKind, forward_tables
from infinity.plan.stages import PipelinePart


class Staged(Protocol):
    """A model of which one stage at a time runs: see `infinity.parallel.stage`."""

    def forward(
        self, stage: int, received: Boundary | None, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Boundary | Any: ...

    def remove(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a model is called with for one micro-batch."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, batch: Any, device: torch.device) -> MicroBatch:
        """Read a micro-batch as a loader gives it: a mapping of keyword arguments, a sequence of positional ones
        (inputs, labels), or one tensor. Tensors come to the device.
        """
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        if isinstance(batch, Mapping):
            return cls((), dict(batch))
        return cls(tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {})

    @property
    def shapes(self) -> tuple[Any, ...]:
        """The shapes of its tensors, by name: equal for micro-batches whose boundaries have equal shapes."""
        named: dict[Any, Any] = {**dict(enumerate(self.args)), **self.kwargs}
        return tuple((name, tuple(value.shape)) for name, value in named.items() if isinstance(value, Tensor))


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
            f"engine.{verb} takes a list of {count} micro-batches or an iterator of them, got {type(batches).__name__}: a "
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

    def __init__(self, runtime: Runtime, staged: Staged, executor: PipelineExecutor, part: PipelinePart) -> None:
        self._runtime = runtime
        self._staged = staged
        self._executor = executor
        self._part = part

    def train(self, batches: Sequence[MicroBatch], optimizer: TieredOptimizer) -> list[Tensor]:
        """Run forward and backward of all micro-batches. Returns their losses on the last stage, nothing elsewhere."""
        self._check_same(batches)
        actions = _Actions(self._runtime, self._staged, self._part, batches, optimizer)
        with self._runtime.coordinator.pass_of_step("train"):
            self._executor.run(self._part.split.tables, actions, keys=[batch.shapes for batch in batches])
        actions.check_done()
        return actions.losses

    def evaluate(self, batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Run forward of any number of micro-batches. Returns their losses on the last stage, nothing elsewhere."""
        self._check_same(batches)
        split = self._part.split
        actions = _Actions(self._runtime, self._staged, self._part, batches, None)
        tables = forward_tables(split.pp, len(batches), split.virtual)
        with torch.no_grad(), self._runtime.coordinator.pass_of_step("eval"):
            self._executor.run(tables, actions, keys=[batch.shapes for batch in batches])
        return actions.losses

    def remove(self) -> None:
        """Leave the model as it was."""
        self._staged.remove()

    def _check_same(self, batches: Sequence[MicroBatch]) -> None:
        named = {
            f"{name} of micro-batch {index}": value
            for index, batch in enumerate(batches)
            for name, value in {**{f"argument {at}": each for at, each in enumerate(batch.args)}, **batch.kwargs}.items()
        }
        for group in (self._runtime.groups.pipeline, self._runtime.groups.tensor):
            if group.size > 1:
                check_same_batch((), named, group)


class _Actions:
    """What the actions of one step do; holds what forwards leave for their backwards."""

    def __init__(
        self, runtime: Runtime, staged: Staged, part: PipelinePart, batches: Sequence[MicroBatch],
        optimizer: TieredOptimizer | None,
    ) -> None:  # fmt: skip
        """optimizer: None where nothing is trained."""
        self._runtime = runtime
        self._staged = staged
        self._batches = batches
        self._optimizer = optimizer
        self._chunks = {stage: chunk for chunk, stage in enumerate(part.stages)}
        self._last = part.split.cut.last
        # By stage and micro-batch: the tensors received, and what the forward returned.
        self._open: dict[tuple[int, int], tuple[Boundary, Boundary]] = {}
        self.losses: list[Tensor] = []

    def forward(self, action: Action, received: Boundary | None) -> Boundary | None:
        """Run a stage's forward of a micro-batch; returns what the next stage takes."""
        runtime, (stage, _, index) = self._runtime, action
        runtime.coordinator.use_micro_batch(index)
        batch, training = self._batches[index], self._optimizer is not None
        leaves = received or ()
        args = precision.half(batch.args) if runtime.config.casts_inputs else batch.args
        under = precision.autocast(runtime.config.config.torch_autocast, runtime.device.torch)
        with trace.span(trace.PHASE, "forward"), under:
            output = self._staged.forward(stage, received, args, batch.kwargs)
        if stage == self._last:
            loss = loss_of(output)
            self.losses.append(loss.detach())
            if training:
                factor = runtime.loss_scale / len(self._batches)
                self._open[stage, index] = leaves, (precision.scaled(loss, factor),)
            return None
        if training:
            self._open[stage, index] = leaves, output
        return tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in output)

    def backward(self, action: Action, grads: Boundary | None) -> Boundary | None:
        """Run a stage's backward of a micro-batch; returns the gradients of what it had received."""
        runtime, (stage, _, index) = self._runtime, action
        leaves, outputs = self._open.pop((stage, index))
        self._begin_last(action)
        runtime.coordinator.use_micro_batch(index)
        with trace.span(trace.PHASE, "backward"):
            runtime.coordinator.begin_backward(scaled=True, chunk=self._chunks[stage])
            rooted = [at for at, output in enumerate(outputs) if output.requires_grad]
            if rooted:
                torch.autograd.backward(
                    [outputs[at] for at in rooted], None if grads is None else [grads[at] for at in rooted]
                )
            runtime.coordinator.end_backward()
            runtime.checkpointing.settle()
        return tuple(leaf.grad for leaf in leaves) or None

    def backward_weight(self, action: Action) -> None:
        """Compute the gradients of a stage's weights that its backward has deferred."""
        raise NotImplementedError

    def check_done(self) -> None:
        """Every forward has had its backward."""
        assert not self._open, f"{len(self._open)} forwards without a backward"

    def _begin_last(self, action: Action) -> None:
        """Say whether the backward is its stage's last before the step, which may begin with what it completes."""
        runtime, last = self._runtime, action.micro_batch == len(self._batches) - 1
        runtime.gradients.begin_micro_step(last=last)
        if last and runtime.plan.policy.step_in_backward and self._optimizer is not None:
            runtime.stepper.start_in_backward(self._optimizer.param_groups, grad_scale=runtime.grad_factor)


def pipeline_of(runtime: Runtime) -> PipelineStep | None:
    """Return what runs the steps of a pipeline; None where the model is not cut into stages."""
    part, groups = runtime.plan.pipeline, runtime.groups
    if part is None:
        return None
    dtype = DTYPES[runtime.config.compute_dtype]
    staged = StagedModel(runtime.module, part.split.cut, own=part.stages, dtype=dtype)
    links = PipelineLinks(
        groups.pipeline_forward, groups.pipeline_backward, groups.pipeline, device=runtime.device.torch
    )
    return PipelineStep(runtime, staged, PipelineExecutor(links, index=part.index), part)


def mean_loss(losses: Sequence[Tensor], runtime: Runtime, count: int) -> Tensor:
    """Return the mean over micro-batches and data ranks, in fp32 on the device; the same bits on every rank.
    Collective. losses: this rank's, none where it has not the last stage. count: micro-batches of each data rank.
    """
    groups = runtime.groups
    tells = bool(losses) and groups.tensor.index == 0
    mine = [float(loss) for loss in losses] if tells else [0.0] * count
    rows = exchange(mine, groups.world, "exchange of losses") if groups.world.size > 1 else [mine]
    total = math.fsum(value for row in rows for value in row)
    return torch.tensor(total / (count * groups.data.size), dtype=torch.float32, device=runtime.device.torch)
