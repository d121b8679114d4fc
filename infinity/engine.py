"""The engine: the training loop's verbs in their order. Mechanism lives below; here is only who is called when.

loss = engine(**batch)        forward: hooks gather and release
engine.backward(loss)         gradients go into partitions
engine.step()                 at the accumulation boundary: norm, clip, step, refresh, schedule
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from infinity.breakdown import Breakdown
from infinity.comm.agreement import agree_on_numbers
from infinity.comm.mesh import Mesh
from infinity.config.resolve import ResolvedConfig
from infinity.errors import StateError
from infinity.log import logger
from infinity.memory.device import Device
from infinity.memory.host import trim
from infinity.memory.ledger import Ledger
from infinity.memory.report import MemoryReport
from infinity.memory.store import TieredStore
from infinity.observer import Observer
from infinity.ops.adam import shutdown_threads
from infinity.optim.clip import clip_factor
from infinity.optim.loss_scale import LossScaler
from infinity.optim.optimizer import TieredOptimizer
from infinity.optim.skips import Skips
from infinity.optim.stepper import Stepper
from infinity.plan.plan import Plan
from infinity.progress import Progress
from infinity.timeline import Timeline
from infinity.zero import access
from infinity.zero.coordinator import Coordinator
from infinity.zero.gradients import Gradients, on_any_rank
from infinity.zero.hooks import ModuleHooks
from infinity.zero.nonfinite import first_nonfinite
from infinity.zero.parameter import whole_of
from infinity.zero.stopwatch import agree
from infinity.zero.unit import Unit

# The optimizer step after which a pass is timed.
_WATCHED_STEP = 2


@dataclass
class Parts:
    """What `initialize` has built: everything that an engine runs."""

    module: nn.Module
    config: ResolvedConfig
    plan: Plan
    device: Device
    mesh: Mesh
    ledger: Ledger
    store: TieredStore
    units: list[Unit]
    gradients: Gradients
    coordinator: Coordinator
    hooks: ModuleHooks
    stepper: Stepper


class Engine(nn.Module):
    """Trains a module whose parameters, gradients and optimizer states live on the tiers of a plan.

    Made by `infinity.initialize`. It behaves as the module that it trains: calling it runs forward and returns what the
    module returns. `close()` (or leaving a `with engine:` block) returns everything that it holds.
    """

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.module = parts.module
        self.config = parts.config
        self.plan = parts.plan
        self.mesh = parts.mesh
        self.store = parts.store
        self.coordinator = parts.coordinator
        self.gradients = parts.gradients
        self.units = parts.units
        self.optimizer: TieredOptimizer
        self.lr_scheduler: Any = None
        self.global_steps = 0
        self.micro_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self._device = parts.device
        self._hooks = parts.hooks
        self._stepper = parts.stepper
        self._scaler = _loss_scaler(parts.config)
        self._skips = Skips(limit=parts.config.config.max_skipped_steps, scaler=self._scaler)
        # Of the micro-steps since the latest boundary, unscaled; looked at when somebody asks.
        self._losses: list[Tensor] = []
        self._norm = 0.0
        self._applied = False
        self._grad_scale = 1.0
        self._arrived: dict[Unit, list[bool]] = {}
        # A gradient that is not finite skips the whole step, or (bf16 on request) leaves its own elements out.
        element_by_element = parts.stepper.guarded and parts.config.compute_dtype == "bf16"
        self._checked = not element_by_element or parts.config.config.bf16.check_grad_overflow
        self._early = not self._checked and not parts.config.clip_norm and not parts.plan.placement.grad_whole
        self._ahead = parts.config.config.overlap and not all(unit.placed.whole for unit in self.units)
        self._observer = Observer(
            Breakdown(parts.plan, parts.ledger, parts.store, parts.units, parts.device), parts.config.config,
            rank=parts.mesh.ranks.rank, world_size=parts.mesh.ranks.world_size,
        )  # fmt: skip
        self._closed = False
        every = parts.config.config.steps_per_print if parts.mesh.ranks.rank == 0 else None
        self._progress = Progress(every, parts.ledger, world_size=parts.mesh.ranks.world_size)
        self.gradients.landed = self._on_landed
        for unit in self.units:
            for param in unit.params:
                whole_of(param).__dict__["_infinity_owner"] = self

    def __getattr__(self, name: str) -> Any:
        """What the engine has not, the module may have: `engine.generate(...)`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # The loop.

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; returns what it returns."""
        self._alive("run forward")
        self._observer.begin_step(self.global_steps + 1)
        if self.training:
            self._progress.called(args, kwargs)
        with self._observer.phase("forward", self._abandon):
            return self.module(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of a scalar loss, scaled for gradient accumulation and for fp16. Returns the unscaled loss.

        May be called several times before a step; the gradients add up. A plain `loss.backward()` works too, without
        either scaling (and so not with fp16's loss scale).
        """
        self._alive("run backward")
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise StateError(
                "engine.backward needs a loss of one element that requires a gradient, got "
                + (
                    f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}"
                    if isinstance(loss, Tensor)
                    else repr(loss)
                )
            )
        factor = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor *= self._scaler.scale if self._scaler is not None else 1.0
        scaled = loss if factor == 1.0 else loss.float() * factor
        if self._early and self.is_gradient_accumulation_boundary():
            self._stepper.begin_early(self.optimizer.param_groups, grad_scale=self.grad_factor)
        self.coordinator.begin_backward(scaled=True)
        with self._observer.phase("backward", self._abandon):
            scaled.backward(retain_graph=retain_graph)
            self.coordinator.end_backward()
        self._losses.append(loss.detach())
        return loss

    def step(self) -> None:
        """At the accumulation boundary: average, check, clip and apply the gradients; otherwise only count."""
        self._alive("step")
        if not any(unit.layout.trainable for unit in self.units):
            raise StateError("nothing to step: every parameter was frozen when the engine was made")
        self._applied = False
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        with self._observer.phase("step", self.mesh.failed):
            self._apply_gradients()
        self._observer.end_step(self.global_steps)

    def _apply_gradients(self) -> None:
        """The step at the accumulation boundary."""
        if self._scaler is not None and self.coordinator.plain_backward:
            raise StateError("fp16 needs its loss scale: call engine.backward(loss) instead of loss.backward()")
        self._hooks.check_tree()
        self._settle_gradients()
        squares, nonfinite = self._global_stats()
        self.coordinator.next_step()
        self._time_prefetch()
        self._norm = math.sqrt(squares) * self.grad_factor if not nonfinite else math.inf
        skipped = bool(nonfinite) and self._checked
        self._skips.update(skipped)
        origin = self._report_nonfinite(nonfinite, skipped) if nonfinite else ""
        if skipped:
            self.skipped_steps += 1
        else:
            self._grad_scale = self.grad_factor * clip_factor(self._norm, self.config.clip_norm)
            self.optimizer.step()
            self._applied = True
        if self._scaler is not None:
            self._scaler.update(overflow=bool(nonfinite))
        self.gradients.reset()
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step()
        self._progress.stepped(
            self.global_steps, self.global_samples, losses=self._losses, lr=self.get_lr()[0], norm=self._norm,
            scale=self._scaler.scale if self._scaler is not None else None, skipped=self.skipped_steps,
        )  # fmt: skip
        self._losses.clear()
        if self._skips.too_many:
            self._give_up(origin)

    def synchronize(self) -> None:
        """Return when everything that `step()` has begun is done: with overlap it may go on beside the next forward.

        Nothing needs this for its result; it is for timing, and for meeting an I/O error here instead of there.
        """
        self._alive("synchronize")
        self._stepper.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away what has accumulated since the last step."""
        self.gradients.reset()
        self._losses.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Legal at every stage. Below stage 2 reductions wait for the boundary anyway; from stage 2 on gradients are
        partitioned as they arrive, which gives the same sums."""
        yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` will apply the gradients."""
        if not self.config.config.managed_gradient_accumulation:
            return True
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed the weights: false between boundaries and for a skipped step."""
        return self._applied

    # What it knows.

    @property
    def device(self) -> torch.device:
        return self._device.torch

    @property
    def world_size(self) -> int:
        return self.mesh.ranks.world_size

    @property
    def global_rank(self) -> int:
        return self.mesh.ranks.rank

    @property
    def local_rank(self) -> int:
        return self.mesh.ranks.local_rank

    @property
    def loss_scale(self) -> float:
        """The present loss scale of fp16; 1 in other precisions."""
        return self._scaler.scale if self._scaler is not None else 1.0

    @property
    def grad_factor(self) -> float:
        """What accumulated gradients are multiplied by: averaging over ranks, and fp16's unscaling."""
        ranks = self.world_size if self.config.config.gradient_allreduce_op == "mean" else 1
        return 1.0 / ranks / self.loss_scale

    def train_batch_size(self) -> int:
        return self.config.train_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.config.accumulation

    def zero_optimization_stage(self) -> int:
        return self.config.stage

    def get_lr(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        """The global gradient norm of the latest step, before clipping; infinite when a gradient was not finite."""
        return self._norm

    def memory(self, by_unit: bool = False) -> MemoryReport:
        """Where this rank's bytes are: tier x kind (x unit on request), now and at most; prints as a table."""
        return self._observer.report(by_unit=by_unit)

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Record what happens in a `with` block: where each step waits, what moves, what memory holds.

        path: a page (".html") or a Chrome trace (".json") that is written at the end; ranks above 0 put theirs beside
        it. The object has the figures, and writes the other kind, too. One at a time in a process.
        """
        self._alive("record a timeline")
        return self._observer.timeline(path)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's full tensors on rank 0's CPU, empty on other ranks; gathered unit by unit. Collective."""
        self._hooks.check_tree()
        return access.full_state_dict(self, self.module, wanted=self.global_rank == 0)

    # The end.

    def close(self) -> None:
        """Finish the step that goes on behind the program, then return memory, files, threads and process groups.

        Weights that are whole stay usable; call it as often as you like. Raises what went wrong with that step, once
        everything is returned.
        """
        self._close(at_once=False)

    def _close(self, *, at_once: bool) -> None:
        if self._closed:
            return
        self._closed = True
        with ExitStack() as stack:
            # Backwards.
            stack.callback(self._return_everything)
            stack.callback(self._observer.close)
            stack.callback(lambda: self._stepper.close(at_once=at_once))

    def _return_everything(self) -> None:
        self._hooks.remove()
        self.coordinator.abandon()
        self.coordinator.closed = True
        self.gradients.close()
        try:
            self.store.close()
        finally:
            for unit in self.units:
                unit.close()
            shutdown_threads()
            self.mesh.close()
            trim()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.mesh.failed(error)
        try:
            self._close(at_once=error is not None)
        except Exception as failure:
            if error is None:
                raise
            # The error under way is the one to see.
            logger.error("while closing the engine: %s", failure)

    # Steps of a step.

    def apply_step(self) -> None:
        """What `optimizer.step()` runs: step every sub-group, then bring whole units up to date."""
        arrived = {unit.layout.index: self._arrived[unit] for unit in self._arrived}
        self._stepper.step(self.optimizer.param_groups, grad_scale=self._grad_scale, arrived=arrived)
        for unit in self.units:
            if unit.placed.whole and unit.layout.trainable:
                unit.refresh()

    def _on_landed(self, unit: Unit) -> None:
        final = self.is_gradient_accumulation_boundary()
        self._stepper.landed(unit.layout.index, self.gradients.arrived[unit], final=final)

    def _settle_gradients(self) -> None:
        """Complete the gradient partitions: late ones first, and agree on which parameters have one at all."""
        late = self.gradients.leftovers()
        alone = self.world_size == 1
        if not alone:
            flags = [unit.layout.index in late for unit in self.units]
            agreed = on_any_rank(flags, self.mesh, "agreement on late gradients")
            late = [index for index, flag in enumerate(agreed) if flag]
        self.gradients.boundary(late)
        self._arrived = dict(self.gradients.arrived)
        if not alone:
            mine = [flag for flags in self._arrived.values() for flag in flags]
            anyone = iter(on_any_rank(mine, self.mesh, "agreement on gradients"))
            self._arrived = {unit: [next(anyone) for _ in flags] for unit, flags in self._arrived.items()}
            self.gradients.agree_on_order()

    def _time_prefetch(self) -> None:
        """Measure one warm training pass, and then prefetch as late as its times allow; once, on all ranks alike."""
        if not self._ahead or self.global_steps not in (_WATCHED_STEP, _WATCHED_STEP + 1):
            return
        if self.global_steps == _WATCHED_STEP:
            self.coordinator.watch(self._device)
            return
        # The drive is measured alone: a step that has begun in backward would share it.
        self._stepper.finish()
        found = agree(self.coordinator.use_times(), self.units, self.store, self._device, self.mesh)
        if found is not None:
            self.coordinator.retime(*found)

    def _global_stats(self) -> tuple[float, int]:
        """Sum of squares and number of non-finite elements of all ranks' gradients; the same bits on every rank."""
        squares, nonfinite = self._stepper.grad_stats()
        if self.world_size == 1:
            return squares, nonfinite
        rows = agree_on_numbers([squares, float(nonfinite)], self.mesh, "exchange of gradient norms")
        if self.config.stage == 0:
            # Nothing is cut: every rank has counted the same gradients.
            return rows[0][0], int(rows[0][1])
        return math.fsum(row[0] for row in rows), int(sum(row[1] for row in rows))

    def _report_nonfinite(self, count: int, skipped: bool) -> str:
        """Say which gradient is not finite; returns the words. An overflow that only settles fp16's scale is usual."""
        if skipped and self._skips.in_a_row == 0:
            return ""
        finite = all(bool(torch.isfinite(loss).all()) for loss in self._losses)
        origin = first_nonfinite(self.gradients, self.mesh, loss_is_finite=finite)
        logger.warning(
            "step %d%s: %d gradient elements are not finite, first in the gradient of %s; %s weights and moments are "
            "unchanged", self.global_steps, " skipped" if skipped else "", count, origin, "all" if skipped else "their",
        )  # fmt: skip
        return origin

    def _give_up(self, origin: str) -> None:
        """Too many steps were skipped. Everything is as the last good step left it, on every rank."""
        raise self._skips.error(self.global_steps - 1, origin)

    def _alive(self, verb: str) -> None:
        if self._closed:
            raise StateError(f"cannot {verb}: this engine was closed")
        if self._observer.broken:
            raise StateError(f"cannot {verb}: {self._observer.broken}")
        self._stepper.check()
        self.mesh.check()

    def _abandon(self, error: BaseException) -> None:
        """Forward or backward has raised: forget the pass, and have the other ranks told."""
        self.mesh.failed(error)
        self.coordinator.abandon()


def _loss_scaler(config: ResolvedConfig) -> LossScaler | None:
    return LossScaler.of(config.config.fp16.model_dump()) if config.compute_dtype == "fp16" else None
