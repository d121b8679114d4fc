"""The engine: the training loop's verbs in their order. Mechanism lives below; here is only who is called when.

loss = engine(**batch)        forward: hooks gather and release
engine.backward(loss)         gradients go into partitions
engine.step()                 at the accumulation boundary: norm, clip, step, refresh, schedule
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.background import Background
from infinity.engine import exporting, loading, precision, saving
from infinity.engine.loading import Wanted
from infinity.engine.preemption import PreemptionHandler
from infinity.engine.runtime import Runtime
from infinity.engine.step import Boundary, StepVerdict
from infinity.errors import StateError
from infinity.log import logger
from infinity.memory.memory_report import MemoryReport
from infinity.memory.tiers.pinned import trim
from infinity.observability.memory_breakdown import Breakdown
from infinity.observability.observer import Observer
from infinity.observability.progress import StepProgress
from infinity.observability.step_timing import StepTimes
from infinity.observability.timeline import Timeline
from infinity.ops.adam import shutdown_threads
from infinity.optim.optimizer_view import TieredOptimizer
from infinity.zero import guards, param_access
from infinity.zero.compiled import eager_backward, untraced
from infinity.zero.parameter import whole_of
from infinity.zero.unit import Unit


class Engine(nn.Module):
    """Trains a module whose parameters, gradients and optimizer states live on the tiers of a plan.

    Made by `infinity.initialize`. It behaves as the module that it trains: calling it runs forward and returns what the
    module returns. `close()` (or leaving a `with engine:` block) returns everything that it holds.
    """

    __reduce_ex__ = guards.refuse_pickle

    def __init__(self, parts: Runtime) -> None:
        super().__init__()
        self.module = parts.module
        self.config = parts.config
        self.plan = parts.plan
        self.groups = parts.groups
        self.store = parts.store
        self.coordinator = parts.coordinator
        self.gradients = parts.gradients
        self.units = parts.units
        self.optimizer: TieredOptimizer
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None  # made of `initialize`'s training data
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        # What the program wants back from checkpoints: a mapping, or a function that returns one when asked.
        self.client_state: Any = None
        self._device = parts.device
        self._hooks, self._stepper = parts.hooks, parts.stepper
        self._checkpointing = parts.checkpointing
        self._parts = parts
        checkpoint, alone = parts.config.config.checkpoint, parts.groups.world.size == 1
        self._background = Background(parts.store, parts.groups)
        self._preemption = PreemptionHandler(checkpoint.path, checkpoint.on_signal, self._background, alone=alone)
        self._boundary = Boundary(parts, self._preemption.says)
        # Of the micro-steps since the latest boundary, unscaled; looked at when somebody asks.
        self._losses: list[Tensor] = []
        self._applied = self._closed = False
        place = {"rank": parts.groups.ranks.rank, "world_size": parts.groups.ranks.world_size}
        self._observer = Observer(
            Breakdown(parts.plan, parts.ledger, parts.store, parts.units, parts.device), parts.config.config, **place
        )
        self._progress = StepProgress(parts.config.config, parts.ledger, **place)
        self.gradients.on_accumulated = self._on_landed
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

    @untraced
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; returns what it returns."""
        self._alive("run forward")
        self._observer.begin_step(self.global_steps + 1)
        if self.training:
            self._progress.called(args, kwargs)
        under = precision.autocast(self.config.config.torch_autocast, self.device)
        with self._observer.phase("forward", self._abandon), under:
            return self.module(*args, **kwargs)

    @eager_backward
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of a scalar loss, scaled for gradient accumulation and for fp16. Returns the unscaled loss.

        May be called several times before a step; the gradients add up. A plain `loss.backward()` works too, without
        either scaling (and so not with fp16's loss scale).
        """
        self._alive("run backward")
        factor = 1.0 / self.gradient_accumulation_steps() if scale_wrt_gas else 1.0
        factor *= self.loss_scale
        scaled = precision.scaled(loss, factor)
        if self._boundary.early and self.is_gradient_accumulation_boundary():
            self._stepper.start_in_backward(self.optimizer.param_groups, grad_scale=self.grad_factor)
        with self._observer.phase("backward", self._abandon_backward):
            self.coordinator.begin_backward(scaled=True)
            scaled.backward(retain_graph=retain_graph)
            self.coordinator.end_backward()
            self._checkpointing.settle()
        self._losses.append(loss.detach())
        return loss

    @untraced
    def step(self) -> None:
        """At the accumulation boundary: average, check, clip and apply the gradients; otherwise only count."""
        self._alive("step")
        with self.groups.telling():
            self._boundary.check()
        self._applied = False
        boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        if not boundary:
            return
        with self._observer.phase("step", self.groups.failed):
            verdict = self._apply_gradients()
        self._observer.end_step(self.global_steps)
        with self.groups.telling():
            if self._boundary.should_abort:
                error = partial(self._boundary.abort_error, self.global_steps - 1, verdict)
                self._preemption.abort_with_save(self, error)
            self._preemption.after_step(self, verdict)

    def _apply_gradients(self) -> StepVerdict:
        """The step at the accumulation boundary."""
        self._hooks.check_tree()
        self.coordinator.check_unchanged()
        self._checkpointing.settle()
        verdict = self._boundary.reduce_and_check(self.global_steps, self._losses)
        self.skipped_steps += verdict.skipped
        if not verdict.skipped:
            self.optimizer.step()
            self._applied = True
        self._boundary.finish(verdict)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step()
        self._progress.stepped(
            self.global_steps, self.global_samples, losses=self._losses, lr=self.get_lr()[0], norm=verdict.norm,
            scale=self.loss_scale if self._boundary.scaler is not None else None, skipped=self.skipped_steps,
        )  # fmt: skip
        self._losses.clear()
        return verdict

    def synchronize(self) -> None:
        """Return when everything that `step()` has begun is done: with overlap it may go on beside the next forward.

        Nothing needs this for its result; it is for timing, and for meeting an I/O error here instead of there.
        """
        self._alive("synchronize")
        self._stepper.finish()

    def finish_saving(self) -> None:
        """Return when a checkpoint that is saved behind the program is complete; raises what went wrong with it."""
        self._alive("finish saving")
        self._background.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away what has accumulated since the last step."""
        self._alive("throw gradients away")
        self._stepper.forget()
        self.gradients.reset()
        self._losses.clear()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Legal at every stage. Below stage 2 reductions wait for the boundary anyway; from stage 2 on gradients are
        partitioned as they arrive, which gives the same sums."""
        yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` will apply the gradients."""
        managed = self.config.config.managed_gradient_accumulation
        return not managed or (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def was_step_applied(self) -> bool:
        """Whether the latest `step()` changed the weights: false between boundaries and for a skipped step."""
        return self._applied

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the module with `torch.compile`'s arguments; block by block where weights are gathered inside."""
        self._alive("compile")
        self._parts.compiled.compile_model(*args, **options)

    # What it knows.

    @property
    def device(self) -> torch.device:
        return self._device.torch

    @property
    def world_size(self) -> int:
        return self.groups.ranks.world_size

    @property
    def global_rank(self) -> int:
        return self.groups.ranks.rank

    @property
    def local_rank(self) -> int:
        return self.groups.ranks.local_rank

    @property
    def loss_scale(self) -> float:
        """The present loss scale of fp16; 1 in other precisions."""
        return self._boundary.scaler.scale if self._boundary.scaler is not None else 1.0

    @property
    def grad_factor(self) -> float:
        """What accumulated gradients are multiplied by: averaging over ranks, and fp16's unscaling."""
        return self._boundary.grad_factor

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
        return self._boundary.norm

    def get_grad_norms(self) -> dict[str, float]:
        """The same by parameter, where there was a gradient. After `step()`, before the next backward. Collective."""
        self._alive("tell the norms of gradients")
        return self._boundary.grad_norms()

    def memory(self, by_unit: bool = False) -> MemoryReport:
        """Where this rank's bytes are: tier x kind (x unit on request), now and at most; prints as a table."""
        self._checkpointing.settle()
        return self._observer.report(by_unit=by_unit)

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Record what happens in a `with` block: where each step waits, what moves, what memory holds.

        path: a page (".html") or a Chrome trace (".json") that is written at the end; ranks above 0 put theirs beside
        it. The object has the figures, and writes the other kind, too. One at a time in a process.
        """
        self._alive("record a timeline")
        return self._observer.timeline(path)

    def step_times(self) -> StepTimes:
        """Where the time of the latest optimizer step went: parts and waits that add up to it. StateError where nothing
        in the configuration has it counted (docs/monitoring.md)."""
        return self._progress.step_times()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """The module's full tensors on rank 0's CPU, empty on other ranks; gathered unit by unit. Collective."""
        self._hooks.check_tree()
        return param_access.full_state_dict(self, self.module, wanted=self.global_rank == 0)

    # Checkpoints.

    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: object = None, client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, asynchronous: bool | None = None,
    ) -> str:  # fmt: skip
        """Save weights, optimizer states and the state of the run below `save_dir`; returns the tag. Collective.

        tag: name of the folder in `save_dir`, by default "global_step" and the number. client_state: what the program
        wants back from `load_checkpoint` (rank 0's counts), by default its `engine.client_state`.
        exclude_frozen_parameters: leave out what is not trained. asynchronous: return as soon as the state is captured
        (by default what checkpoint.async says); errors come with the next verb, with several ranks at the next step.

        Raises alike on all ranks, and leaves what was saved before: StateError while gradients accumulate,
        TransferError where the drive fails or is full, CheckpointError for what cannot be saved.
        """
        self._alive("save a checkpoint")
        behind = self.config.config.checkpoint.asynchronous if asynchronous is None else asynchronous
        return saving.save(
            self, self._parts, self._boundary, self._background, os.fspath(save_dir), tag, client_state,
            latest=save_latest, exclude_frozen=exclude_frozen_parameters, behind=behind,
        )  # fmt: skip

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: object = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """Take a run up where `save_checkpoint` left it, with any number of ranks, stage, tiers and precision; returns
        (the checkpoint's folder, what was given as client_state), or (None, {}) where there is none and no tag was
        given. Collective.

        tag: by default what `latest` in `load_dir` names; one that is given has to be there. load_module_strict:
        tensors that are missing or too many are an error. load_optimizer_states, load_lr_scheduler_states: False leaves
        the engine's own. load_module_only: weights and buffers alone. A folder of safetensors files serves, too, for
        the weights.

        Raises alike on all ranks. CheckpointError: nothing was changed, unless the message says otherwise.
        """
        self._alive("load a checkpoint", broken_is_fine=True)
        self._background.finish()
        wanted = Wanted(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        return loading.load_checkpoint(
            self, self._parts, self._boundary, self._observer, os.fspath(load_dir), tag, wanted
        )

    def resume(self, load_dir: str | os.PathLike[str] | None = None) -> tuple[str | None, Any]:
        """Load the newest checkpoint below `load_dir` (by default checkpoint.path) that is complete and whose bytes are
        those that were written; returns what `load_checkpoint` does. Says which ones it has passed over and why.
        Collective.

        (None, {}) where there is none. CheckpointError where there are some and none can be loaded.
        """
        self._alive("resume", broken_is_fine=True)
        return loading.resume(self.load_checkpoint, self._parts, load_dir)

    def export(
        self, folder: str | os.PathLike[str], dtype: str = "bf16", *, max_shard_size: int | str = "5GB",
        one_file: bool = False, tokenizer: Any = None,
    ) -> Path:  # fmt: skip
        """Write the model as a Hugging Face folder for `from_pretrained`; returns it. Collective, in bounded memory.

        Weights as safetensors, in files of at most `max_shard_size` or in one; config.json, generation_config.json, and
        tokenizer files as they are in the folder that the model came from, or of `tokenizer`. Of a peft model its
        adapters. dtype: "fp32" (of the master weights), "bf16" or "fp16". All ranks must see the folder, which becomes
        what it is in the end by a rename; other files in it stay.
        """
        self._alive("export")
        return exporting.export_folder(
            self._parts, os.fspath(folder), dtype=dtype, max_shard_size=max_shard_size, one_file=one_file,
            tokenizer=tokenizer,
        )  # fmt: skip

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """DeepSpeed's name for `export` in 16 bits. Nothing is pickled: "pytorch_model.bin" is "model.safetensors"."""
        self._alive("export")
        exporting.export_16bit(self._parts, save_dir, save_filename, frozen=not exclude_frozen_parameters)
        return True

    # The end.

    def close(self) -> None:
        """Finish the step that goes on behind the program, then return memory, files, threads and process groups.

        Weights that are whole stay usable; call it as often as you like, a forked child in vain. Raises what went wrong
        with that step, once everything is returned.
        """
        self._close(at_once=False)

    def _close(self, *, at_once: bool) -> None:
        if self._closed or self.store.is_elsewhere:
            return
        self._closed = True
        with ExitStack() as stack:
            # Backwards.
            stack.callback(self._return_everything)
            stack.callback(self._checkpointing.close)
            stack.callback(self._parts.compiled.close)
            stack.callback(self._observer.close)
            stack.callback(self._progress.close)
            stack.callback(lambda: self._stepper.close(at_once=at_once))
            stack.callback(lambda: self._background.close(at_once=at_once))
            stack.callback(self._preemption.close)

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
            self.groups.close()
            trim()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if error is not None:
            self.groups.failed(error)
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
        self._boundary.apply(self.optimizer.param_groups)

    def _on_landed(self, unit: Unit) -> None:
        # What was copied out of its partition arrived before its gradients: a step may begin to write it.
        unit.release_lease(wait=True)
        final = self.is_gradient_accumulation_boundary()
        self._stepper.on_accumulated(unit.layout.index, self.gradients.arrived[unit], final=final)

    def _alive(self, verb: str, *, broken_is_fine: bool = False) -> None:
        self.store.check_process(verb)
        if self._closed:
            raise StateError(f"cannot {verb}: this engine was closed")
        if self._observer.broken and not broken_is_fine:
            raise StateError(f"cannot {verb}: {self._observer.broken}")
        self._stepper.check()
        self._preemption.check()
        self.groups.check()

    def _abandon(self, error: BaseException) -> None:
        """Forward or backward has raised: forget the pass, and have the other ranks told."""
        self.groups.failed(error)
        self.coordinator.abandon()

    def _abandon_backward(self, error: BaseException) -> None:
        self._abandon(error)
        self._stepper.forget()
