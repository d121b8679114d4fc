"""What `initialize` built, whether it can go on, and the order in which it is taken down."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from torch import nn

from infinity.config.resolve import ResolvedConfig
from infinity.distributed.process_groups import ProcessGroups
from infinity.engine.first_batch import FirstBatch
from infinity.errors import StateError
from infinity.memory.ledger import Ledger
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import trim
from infinity.observability import trace
from infinity.observability.observer import Observer
from infinity.observability.progress import StepProgress
from infinity.ops.adam import shutdown_threads
from infinity.optim.loss_scaler import LossScaler
from infinity.optim.stepper import Stepper
from infinity.parallel.tensor import Applied
from infinity.plan.model_params import model_params, place_of_buffer
from infinity.plan.plan import Plan
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.gradients import Gradients
from infinity.zero.hooks import ModuleHooks
from infinity.zero.param_access import ParamAccess
from infinity.zero.unit import Unit


class Health:
    """Whether the engine can go on.

    `broken` is the reason why it cannot, after a step or a load that failed in the middle; "" while it can. `closed`:
    everything was returned. `handed_over`: the module has the weights.
    """

    def __init__(self) -> None:
        self.broken = ""
        self.closed = False
        self.handed_over = False

    def mark_broken(self, reason: str) -> None:
        """Refuse every further verb with `reason`, until `mark_whole`."""
        self.broken = reason

    def mark_whole(self) -> None:
        """A load has replaced every value: the engine can go on again."""
        self.broken = ""

    def mark_closed(self) -> None:
        """Refuse every further verb for good."""
        self.closed = True

    def mark_handed_over(self) -> None:
        """Have the refusals say where the weights are."""
        self.handed_over = True


@dataclass(frozen=True, eq=False)
class Runtime:
    """Everything that an engine runs, in the order in which it was built."""

    module: nn.Module
    config: ResolvedConfig
    plan: Plan
    exchanges: Applied
    device: Device
    groups: ProcessGroups
    ledger: Ledger
    store: TieredStore
    units: list[Unit]
    gradients: Gradients
    coordinator: Coordinator
    access: ParamAccess
    hooks: ModuleHooks
    checkpointing: Checkpointing
    compiled: CompiledModules
    stepper: Stepper
    # fp16's; None in other precisions.
    scaler: LossScaler | None
    observer: Observer
    progress: StepProgress
    first_batch: FirstBatch
    health: Health = field(default_factory=Health)

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

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by: fp16's present loss scale, 1 in other precisions."""
        return self.scaler.scale if self.scaler is not None else 1.0

    @property
    def grad_factor(self) -> float:
        """What accumulated gradients are multiplied by: averaging over data-parallel ranks, and fp16's unscaling."""
        return self.access.grad_factor()

    @property
    def skips_nonfinite(self) -> bool:
        """Whether a gradient that is not finite skips the whole step, or (on request) leaves its own elements out."""
        return self.config.checks_gradients or not self.stepper.rule.guarded

    def check(self, verb: str, *, broken_is_fine: bool = False) -> None:
        """Raise what stands against `verb`: StateError in a forked child, for a closed or a broken engine; the error of
        the optimizer step that goes on beside the program; DesyncError when the ranks have lost each other.
        """
        self.store.check_process(verb)
        if self.health.closed:
            again = ", and its model has the weights: give the model to initialize() again"
            further = again if self.health.handed_over else ""
            raise StateError(f"cannot {verb}: this engine was closed{further}")
        if self.health.broken and not broken_is_fine:
            raise StateError(f"cannot {verb}: {self.health.broken}")
        self.stepper.check()
        self.groups.check()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """One verb of the loop: "forward", "backward" or "step".

        When the block raises, the other ranks are told, and the pass is abandoned. An error for lack of memory becomes
        a MemoryRefused that shows the ledger; in the step it breaks the engine, for some weights are stepped then.
        """
        with self.guarded(name), trace.span(trace.PHASE, name):
            yield

    @contextmanager
    def guarded(self, name: str) -> Iterator[None]:
        """The same without a span of its own, also for "pipeline": the forwards and backwards of a whole step."""
        try:
            yield
        except BaseException as error:
            if not self.first_batch.raised_on_all(error):
                self.groups.failed(error)
            if name != "step":
                self.coordinator.abandon()
            if name in ("backward", "pipeline"):
                self.stepper.forget()
            refused = self.observer.explain(error, name, broken=self.health.broken)
            if refused is None:
                raise
            if name == "step":
                self.health.mark_broken("its latest step ended for lack of memory, with some of the weights stepped")
            raise refused from error

    def close(self, *, at_once: bool) -> None:
        """Return memory, files, threads and process groups, the latest built first; each part is closed even if one
        before it raises.

        at_once: do not finish the optimizer step that goes on beside the program.
        """
        with ExitStack() as stack:
            # Last registered, first run.
            stack.callback(self._release)
            stack.callback(self.exchanges.remove)
            stack.callback(self.checkpointing.close)
            stack.callback(self.compiled.close)
            stack.callback(self.observer.close)
            stack.callback(self.progress.close)
            # What the program keeps is stepped to its end.
            stack.callback(self.stepper.close, at_once=at_once and not self.coordinator.memory.outdated)

    def _release(self) -> None:
        """Take the module off the tiers and give the tiers back."""
        self.hooks.remove()
        self.coordinator.close()
        self.gradients.close()
        try:
            self.store.close()
        finally:
            for unit in self.units:
                unit.close()
            shutdown_threads()
            self.groups.close()
            trim()
