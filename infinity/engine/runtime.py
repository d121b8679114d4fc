"""What `initialize` built, whether it can go on, and the order in which it is taken down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from infinity.base import trace
from infinity.config.resolve import ResolvedConfig
from infinity.distributed.groups import ProcessGroups
from infinity.distributed.interrupts import HELD
from infinity.engine.activation_forecast import FirstBatch, SharedCapacityError
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import trim
from infinity.observability.memory_report import Observer
from infinity.observability.progress import StepProgress
from infinity.ops.adam import shutdown_threads
from infinity.parallel.sequence import SequenceAxis
from infinity.parallel.tensor import Applied
from infinity.plan.capacity import addressable_nbytes
from infinity.plan.plan import Plan, model_params, place_of_buffer
from infinity.step.optimizer_step import OptimizerStep
from infinity.tiling.sparse_models import SparseModel
from infinity.zero.access import ParamAccess
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.experts import ExpertsDoor
from infinity.zero.gradients import Gradients
from infinity.zero.health import Health
from infinity.zero.hooks import ModuleHooks

# The share of what the process may hold beside its activations from which a plan leaves no room for growth.
_TIGHT = 0.8


@dataclass(frozen=True, eq=False)
class Attached:
    """What stands at the program's modules, the innermost first."""

    # What the tensor axis has set.
    exchanges: Applied
    blocks: SparseModel
    sequence: SequenceAxis
    experts: ExpertsDoor
    hooks: ModuleHooks
    checkpointing: Checkpointing
    compiled: CompiledModules


@dataclass(frozen=True, eq=False)
class Runtime:
    """Everything that an engine runs, in the order in which it was built."""

    module: nn.Module
    config: ResolvedConfig
    plan: Plan
    device: Device
    groups: ProcessGroups
    store: TieredStore
    gradients: Gradients
    coordinator: Coordinator
    access: ParamAccess
    attached: Attached
    step: OptimizerStep
    observer: Observer
    progress: StepProgress
    first_batch: FirstBatch
    health: Health

    @property
    def whole_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes before the tensor axis cuts them of the parameters that it does cut, by name."""
        return {name: param.shape for name, param in model_params(self.plan).items() if param.shard is not None}

    @property
    def stands_for_stage(self) -> bool:
        """Whether this rank stands for those of its stages where all have the same: the first on the other axes."""
        return self.groups.data.index == 0 and self.groups.tensor.index == 0

    def tells_buffer(self, name: str) -> bool:
        """Whether this rank's copy of one of the module's buffers is the one that is saved."""
        return self.stands_for_stage and place_of_buffer(self.plan, name) == self.groups.pipeline.index

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One verb of the loop: "forward", "backward" or "step".

        When the block raises, the other ranks are told, and the pass is abandoned: after a backward or a step the
        gradients that have accumulated are refused until they are dropped. An error for lack of memory becomes a
        MemoryRefused that shows the ledger.
        """
        with self.guarded(name), trace.span(trace.PHASE, name):
            yield
        if self.is_tight:
            trim()

    @cached_property
    def is_tight(self) -> bool:
        """Whether the process's memory has little room beside the plan, and activations lie in its heap. Small blocks
        that live on, such as those of kernels that are made once, keep the holes between freed activations apart, so
        that the heap would grow from pass to pass beyond the forecast; its free pages are given back then.
        """
        limit, held = self.store.ledger.limits.process, addressable_nbytes(self.plan.nbytes_by_tier())
        return not self.device.own_memory and limit is not None and held > _TIGHT * limit

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """The same without a span of its own, also for "pipeline": the forwards and backwards of a whole step."""
        health = self.health
        health.begin(f"its {name}")
        try:
            yield
        except BaseException as error:
            if not isinstance(error, SharedCapacityError):
                self.groups.failed(error)
            partial = name in ("backward", "pipeline") or (
                name == "step" and self.gradients.begun and not health.broken
            )
            if partial or name == "forward":
                self.coordinator.abandon()
            if name == "backward" and not self.gradients.begun:
                # It has raised before it added anything.
                self.gradients.reset()
            elif partial:
                self.step.forget()
                health.mark_partial(
                    f"its {name} has raised {type(error).__name__}, and the gradients that have accumulated are no "
                    "whole micro-batches now (weights and optimizer states are whole). Call engine.zero_grad(), which "
                    "drops them and begins the accumulation anew"
                )
            refused = self.observer.explain(error, name, broken=health.broken)
            self._end(error)
            if refused is None:
                raise
            raise refused from error
        self._end()

    @contextmanager
    def marked(self, verb: str) -> Iterator[None]:
        """A block that changes what it leaves in order when it raises. See [Note: interrupts] in `interrupts`."""
        self.health.begin(verb)
        try:
            yield
        except BaseException as error:
            self._end(error)
            raise
        self._end()

    def _end(self, error: BaseException | None = None) -> None:
        """Take the mark off where a block was not cut short."""
        if not HELD.has_cut(error):
            self.health.end()

    def close(self, *, at_once: bool) -> None:
        """Return memory, files, threads and process groups, the latest built first; each part is closed even if one
        before it raises.

        at_once: do not finish the optimizer step that goes on beside the program.
        """
        with ExitStack() as stack:
            # Last registered, first run.
            stack.callback(self._release)
            stack.callback(self.attached.exchanges.remove)
            stack.callback(self.attached.blocks.close)
            stack.callback(self.attached.sequence.close)
            stack.callback(self.attached.experts.close)
            stack.callback(self.attached.checkpointing.close)
            stack.callback(self.attached.compiled.close)
            stack.callback(self.observer.close)
            stack.callback(self.progress.close)
            # What the program keeps is stepped to its end.
            stack.callback(self.step.close, at_once=at_once and not self.coordinator.memory.outdated)

    def _release(self) -> None:
        """Take the module off the tiers and give the tiers back."""
        self.attached.hooks.remove()
        self.coordinator.close()
        self.gradients.close()
        try:
            self.store.close()
        finally:
            for unit in self.access.units:
                unit.close()
            shutdown_threads()
            self.groups.close()
            trim()
