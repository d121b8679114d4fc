"""The engine: the training loop's verbs in their order. Mechanism lies below; here is only what is called when.

loss = engine(**batch)        forward: hooks gather and release
engine.backward(loss)         gradients go into partitions
engine.step()                 at the accumulation boundary: norm, clip, step, refresh, schedule
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from infinity.checkpoint.pieces import tied_names
from infinity.checkpoint.run_state import ClientState, Counters, Run
from infinity.config.resolve import ResolvedConfig
from infinity.distributed.collectives import exchange_values
from infinity.distributed.groups import ProcessGroups
from infinity.distributed.interrupts import HELD, PreemptionHandler, verb
from infinity.engine import data, export, micro_batches
from infinity.engine.checkpoints import CheckpointManager, LoadOptions, SaveRequest
from infinity.engine.deepspeed_names import CONFIGURED, REFUSED, DeepSpeedNames, LossScale
from infinity.engine.handover import WeightKeeper, why_not_kept
from infinity.engine.idle_states import IdleStates
from infinity.engine.micro_batches import Accumulation
from infinity.engine.optimizer import TieredOptimizer
from infinity.engine.pipeline import BatchArguments, draw, loss_of, pipeline_of, step_loss
from infinity.engine.runtime import Runtime
from infinity.engine.step_records import StepRecords
from infinity.errors import ConfigError, StateError, UnknownNameError
from infinity.log import logger
from infinity.memory.store import TieredStore
from infinity.observability.memory_report import MemoryReport
from infinity.observability.progress import StepTimes
from infinity.observability.timeline import Timeline
from infinity.parallel import layers, sequence
from infinity.plan.plan import Plan
from infinity.step.norms import StepFlags
from infinity.step.optimizer_step import EarlyGroups, StepVerdict
from infinity.zero import access, guards
from infinity.zero.compiled import eager_backward, untraced
from infinity.zero.coordinator import Coordinator
from infinity.zero.unit import Unit


def _counter(name: str, what: str) -> Any:
    """Return a property for a counter of the run; the program may set it."""

    def get(engine: Engine) -> int:
        return int(getattr(engine._counters, name))

    def put(engine: Engine, value: int) -> None:
        setattr(engine._counters, name, value)

    return property(get, put, doc=what)


class Engine(DeepSpeedNames, nn.Module):
    """Trains a module whose parameters, gradients and optimizer states live on the tiers of a plan.

    `infinity.initialize` makes it. Calling it runs the module's forward and returns the module's output. `close()` (or
    the end of a `with engine:` block) returns all memory, files, threads and process groups. Not thread-safe: one
    training thread calls it.
    """

    __reduce_ex__ = guards.refuse_pickle

    def __init__(
        self, runtime: Runtime, optimizer: TieredOptimizer | None, lr_scheduler: Any = None,
        training_dataloader: Any = None, records: StepRecords | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.module = runtime.module
        # None: the engine runs the module and does not train it.
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        # Made of `initialize`'s training data.
        self.training_dataloader = training_dataloader
        # What the program wants back from checkpoints: a mapping, or a function that returns one when a save calls it.
        self.client_state: ClientState = None
        self._runtime = runtime
        # Of the parameter whose gradient was not finite in the latest step, where that was worth a warning.
        self._nonfinite_at = ""
        # None: every rank runs the whole model.
        self._pipeline = pipeline_of(runtime)
        self._counters = Counters()
        self._checkpoints = CheckpointManager(runtime, records)
        self._preemption = PreemptionHandler(runtime.config.sections.checkpoint.on_signal)
        self._accumulation = Accumulation(runtime.config, self._counters)
        self._applied = False
        # What `train_batch` draws from where it is given nothing.
        self._drawing: Iterator[Any] | None = None
        guards.name_engine(runtime.module, self)

    def __getattr__(self, name: str) -> Any:
        """Look up in the module what the engine does not have: `engine.generate(...)`."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "_runtime"):
                raise
        if name in CONFIGURED:
            return partial(CONFIGURED[name], self.config)
        try:
            return getattr(self.module, name)
        except AttributeError as error:
            if name.startswith("__"):
                raise
            why = REFUSED.get(name) or f"neither the engine nor its module {type(self.module).__name__} has it"
            raise UnknownNameError(f"engine.{name}: {why}") from error

    # The loop.

    @untraced
    @verb("run forward")
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; return what it returns."""
        self._check_whole("engine(...)")
        runtime = self._runtime
        runtime.observer.begin_step(self.global_steps + 1)
        if self.training:
            runtime.progress.called(args, kwargs)
            runtime.gradients.begin_micro_step(last=self._accumulation.at_boundary)
        under = micro_batches.autocast(runtime.config.sections.torch_autocast, self.device)
        if runtime.config.casts_inputs:
            args = micro_batches.half(args)
        with runtime.phase("forward"), under:
            runtime.attached.exchanges.check_batch(args, kwargs)
            with runtime.first_batch.forward(args, kwargs) if self.training else nullcontext():
                return self.module(*args, **kwargs)

    @eager_backward
    @verb("run backward", gradients=True)
    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward of a scalar loss, scaled for gradient accumulation and for fp16. Return the loss divided by
        `gradient_accumulation_steps`, without fp16's scale.

        retain_graph: as in torch. scale_wrt_gas: False for a loss that the program has divided by the number of
        micro-batches itself; then it is returned as it is.

        May be called several times before a step; the gradients add up. A plain `loss.backward()` works too, without
        either scaling (and so not with fp16's loss scale).
        """
        self._check_whole("engine.backward(loss)")
        runtime, count, optimizer = self._runtime, self._accumulation.steps, self._stepped_by("run backward")
        factor = 1.0 / count if scale_wrt_gas else 1.0
        scaled = micro_batches.scaled(loss, factor * self.loss_scale)
        early = runtime.plan.policy.step_in_backward and self._accumulation.at_boundary
        if early:
            with runtime.groups.telling():
                optimizer.check()
        with runtime.phase("backward"):
            if early:
                if (records := self._checkpoints.records) is not None and records.outdated:
                    records.renew()
                runtime.step.start_in_backward(optimizer.param_groups)
            runtime.coordinator.begin_backward(scaled=True)
            scaled.backward(retain_graph=retain_graph)
            runtime.coordinator.end_backward()
            runtime.attached.checkpointing.settle()
            self._accumulation.ran_backward(loss, scaled=scale_wrt_gas)
        return loss / count if scale_wrt_gas and count > 1 else loss

    @untraced
    @verb("step", gradients=True)
    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """At the accumulation boundary: average, check, clip and apply the gradients; otherwise only count.

        lr_kwargs: for the scheduler's own `step()`, such as {"metrics": loss} of ReduceLROnPlateau.
        """
        self._check_whole("engine.step()")
        self._bring_back()
        runtime, optimizer = self._runtime, self._stepped_by("step")
        boundary = self._accumulation.at_boundary
        with runtime.groups.telling():
            runtime.step.check_trains(unscaled=runtime.gradients.unscaled)
            if boundary:
                optimizer.check()
        self._applied = False
        if boundary:
            self._end_step(optimizer, lr_kwargs or {}, calls=1)
            return
        with runtime.marked("its step"):
            self._accumulation.count(1)

    @untraced
    @verb("train a batch", gradients=True)
    def train_batch(self, batches: Any = None, *, data_iter: Any = None) -> Tensor:
        """Run all micro-batches of a step, forward and backward, and the step; the way to train with a pipeline.

        batches: a list of `gradient_accumulation_steps` micro-batches or an iterator, of which as many are drawn; each
        a mapping of the model's arguments, a sequence of them such as (inputs, labels), or one tensor. All ranks of a
        pipeline and of a tensor group are given the same. Default: drawn from the loader of `initialize`'s training
        data, epoch after epoch. data_iter: DeepSpeed's name of the same.

        Returns the mean of the losses over micro-batches and data ranks (fp32, no gradient), the same on every rank.
        The model must return its loss: as output, as its `loss`, or as its first element.
        """
        optimizer, count = self._stepped_by("train a batch"), self._accumulation.steps
        batches = data_iter if batches is None else batches
        given = self._own_data() if batches is None else batches
        drawn = [BatchArguments.of(batch, self.device) for batch in draw(given, count, "train_batch")]
        if self._pipeline is None:
            losses = []
            for batch in drawn:
                loss = loss_of(self(*batch.args, **batch.kwargs))
                self.backward(loss)
                losses.append(loss.detach())
                self.step()
            return step_loss(losses, self._runtime, count)
        runtime = self._runtime
        self._bring_back()
        with runtime.groups.telling():
            runtime.step.check_trains(unscaled=runtime.gradients.unscaled)
            optimizer.check()
        runtime.observer.begin_step(self.global_steps + 1)
        self._applied = False
        for batch in drawn:
            runtime.progress.called(batch.args, dict(batch.kwargs))
        with runtime.guarded("pipeline"):
            losses = self._pipeline.train(drawn, optimizer)
        mean = step_loss(losses, runtime, count)
        self._accumulation.ran_backward(mean, scaled=True)
        self._end_step(optimizer, {}, calls=count)
        return mean

    @untraced
    @verb("evaluate a batch")
    def eval_batch(self, batches: Any = None, *, data_iter: Any = None) -> Tensor:
        """Run forward of micro-batches, without gradients and in evaluation mode; the way to evaluate with a pipeline.

        batches: a list of any number of micro-batches, or an iterator, of which `gradient_accumulation_steps` are
        drawn; otherwise as for `train_batch`, without a default. Returns the mean of the losses as `train_batch` does.
        """
        batches = data_iter if batches is None else batches
        count = len(batches) if isinstance(batches, (list, tuple)) else self._accumulation.steps
        drawn = [BatchArguments.of(batch, self.device) for batch in draw(batches, count, "eval_batch")]
        training = self.training
        self.eval()
        try:
            if self._pipeline is not None:
                with self._runtime.guarded("forward"):
                    losses = self._pipeline.evaluate(drawn)
            else:
                with torch.no_grad():
                    losses = [loss_of(self(*batch.args, **batch.kwargs)) for batch in drawn]
        finally:
            self.train(training)
        return step_loss(losses, self._runtime, count)

    def sequence_batches(self, batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """Yield this rank's part of each batch, on the engine's device, for training along a sequence axis
        (`sequence_parallel_size`).

        batches: mappings of tensors [batch, tokens], such as those of a loader, the same on all ranks that share a
        sequence: rank `data_rank` of `data_size` of the data. ConfigError where they are not. See `SequenceCutter.cut`
        for what a part has. In evaluation mode batches stay whole. The loader of `initialize`'s training data yields
        parts by itself.
        """
        cutter = sequence.SequenceCutter(self.module, self.groups.sequence)
        for batch in batches:
            here = data.moved(batch, self.device)
            yield cutter.cut(here) if self.training else here

    def _end_step(self, optimizer: TieredOptimizer, lr_kwargs: Mapping[str, Any], *, calls: int) -> None:
        """Take the step at the accumulation boundary, and do what the ranks have told each other with it. calls: of
        `step()`, that its micro-batches count as.
        """
        runtime = self._runtime
        runtime.attached.hooks.check_tree()
        runtime.coordinator.check_unchanged()
        with runtime.phase("step"):
            verdict = self._apply_gradients(optimizer, lr_kwargs, calls)
        runtime.observer.end_step(self.global_steps)
        with runtime.groups.telling():
            if runtime.step.skips.too_many:
                self._abort()
            self._obey(verdict.flags)

    def _apply_gradients(self, optimizer: TieredOptimizer, lr_kwargs: Mapping[str, Any], calls: int) -> StepVerdict:
        """Take the step at the accumulation boundary, or skip it; count it."""
        runtime, counters, losses = self._runtime, self._counters, [*self._accumulation.losses]
        runtime.attached.checkpointing.settle()
        arrived, elsewhere = runtime.gradients.settle()
        verdict = runtime.step.decide(arrived, elsewhere, self._flags(), optimizer.param_groups)
        records = self._checkpoints.records
        if records is not None and verdict.flags.changed:
            records.renew()
            runtime.step.synchronize()
            if self.world_size > 1:
                # Behind this every rank has: see [Note: fence].
                exchange_values(None, runtime.groups.world, "records of a change")
        runtime.coordinator.next_step()
        runtime.coordinator.prefetcher.count_step(runtime.step, runtime.device, runtime.groups.stage)
        self._nonfinite_at = self._report_nonfinite(verdict, losses) if verdict.nonfinite else ""
        if not verdict.skipped:
            runtime.health.mark_broken(
                f"step {counters.global_steps + 1} was cut short, with some of the weights stepped. Call "
                "engine.load_checkpoint() or engine.resume() before anything else"
            )
            optimizer.step()
            self._applied = True
        runtime.step.finish()
        runtime.gradients.reset()
        self._accumulation.end_step(calls, skipped=verdict.skipped)
        runtime.health.mark_whole()
        if self.lr_scheduler is not None and self._applied:
            self.lr_scheduler.step(**lr_kwargs)
        lr = next((group["lr"] for group in optimizer.param_groups if "lr" in group), 0.0)
        runtime.progress.stepped(
            counters.global_steps, counters.global_samples, losses=losses, lr=lr, norm=verdict.norm,
            scale=self.loss_scale if runtime.step.scaler is not None else None, skipped=counters.skipped_steps,
        )  # fmt: skip
        if records is not None:
            records.note(self._run, self.client_state)
        return verdict

    def _report_nonfinite(self, verdict: StepVerdict, losses: Sequence[Tensor]) -> str:
        """Warn which gradient is not finite, and return its name; "" for an overflow that only settles fp16's scale.
        Collective.
        """
        runtime, skipped = self._runtime, verdict.skipped
        if skipped and runtime.step.skips.in_a_row == 0:
            return ""
        finite = all(bool(torch.isfinite(loss).all()) for loss in losses)
        origin = runtime.gradients.first_nonfinite(loss_is_finite=finite)
        logger.warning(
            "step %d%s: %d gradient elements are not finite, first in the gradient of %s; %s weights and moments are "
            "unchanged", self.global_steps, " skipped" if skipped else "", verdict.nonfinite, origin,
            "all" if skipped else "their",
        )  # fmt: skip
        return origin

    def _flags(self) -> StepFlags:
        records = self._checkpoints.records
        return StepFlags(
            preempted=bool(self._preemption.received), save_failed=self._checkpoints.background.pending,
            changed=records is not None and records.outdated,
        )  # fmt: skip

    def _obey(self, flags: StepFlags) -> None:
        """Raise the error of a failed save, and end the process with status 0 behind a checkpoint when a rank was told
        to end. Collective: with several ranks, what came after they exchanged `flags` waits for the next step.
        """
        flags = self._flags() if self.world_size == 1 else flags
        if flags.save_failed:
            # The save's thread comes to the same end on every rank, a moment sooner or later.
            self._checkpoints.background.finish()
        if not flags.preempted:
            return
        folder = self.config.sections.checkpoint.path
        assert folder is not None, "the configuration names a folder with the signals"
        tag = self.save_checkpoint(folder, asynchronous=False)
        told = self._preemption.received or "a signal on another rank"
        logger.warning("%s: step %d is saved as %s in %s; the program ends", told, self.global_steps, tag, folder)
        self.close()
        raise SystemExit(0)

    def _abort(self) -> None:
        """Save the last good step, and raise NonFiniteError, which says what became of the weights. Collective."""
        folder = self.config.sections.checkpoint.path
        number = self.global_steps - 1
        refused = partial(self._runtime.step.skips.error, number, self._nonfinite_at)
        if folder is None:
            raise refused("Name a folder in checkpoint.path to have them saved when this happens.")
        try:
            tag = self.save_checkpoint(folder, f"global_step{self.global_steps}-emergency", asynchronous=False)
        except Exception as failure:
            raise refused(f"They could not be saved: {failure}") from failure
        raise refused(f"They are saved as {tag} in {folder}.")

    def synchronize(self) -> None:
        """Block until everything that `step()` has begun is done: with overlap it may go on beside the next forward.

        No result depends on this call. It serves timing, and raises an I/O error here instead of at a later verb.
        """
        self._check("synchronize")
        self._runtime.step.synchronize()

    def finish_saving(self) -> None:
        """Block until a checkpoint that is saved behind the program is complete; raise the error that it ended with."""
        self._check("finish saving")
        self._checkpoints.background.finish()

    # While the program does something else.

    @verb("offload states")
    def offload_states(
        self, include: Iterable[Any] | None = None, device: Any = "cpu", pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:  # fmt: skip
        """Move the states of an idle engine to a slower tier, and free their memory. Every rank calls it.

        include: DeepSpeed's names ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer");
        default: all. device: "cpu" for what lies on an accelerator, "nvme" for that and what lies in CPU memory.
        pin_memory: whether CPU memory is pinned for it. non_blocking: accepted; the call returns when all has moved.

        `reload_states` brings everything back, and so does whatever needs it (docs/engine_life.md). Raises StateError
        while gradients accumulate, TransferError or CapacityError where the drive fails or is full, TierMemoryError
        without CPU memory: what has not moved stays where it was, and the engine goes on.
        """
        self._checkpoints.background.finish()
        with self.groups.telling(), self._runtime.marked("engine.offload_states()"):
            IdleStates(self._runtime).offload(include, device, pin=pin_memory)

    @verb("reload states")
    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` has moved; nothing otherwise. Collective.

        non_blocking: accepted; the call returns when all is back. An error leaves the rest offloaded.
        """
        with self.groups.telling(), self._runtime.marked("engine.reload_states()"):
            IdleStates(self._runtime).reload()

    @verb("throw gradients away")
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Throw away what has accumulated since the last step, and begin the accumulation anew: the next micro-batch is
        the first of `gradient_accumulation_steps`. Every rank calls it. set_to_none: accepted.

        This is what to call after an error under accumulation. One in forward leaves the micro-batches before it, and
        the program may go on with the next. One in backward, or in a step that has changed no weight yet, leaves sums
        that are no whole micro-batches: `backward` and `step` are refused until this call, or a load.
        """
        with self._runtime.marked("engine.zero_grad()"):
            if self._accumulation.begun or self._runtime.gradients.begun:
                self.groups.world.note("engine.zero_grad()")
            self._runtime.step.forget()
            self._runtime.gradients.reset()
            self._accumulation.begin_anew()
            self._runtime.health.drop_gradients()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing; legal at every stage. Below stage 2 reductions wait for the boundary anyway; from stage 2 on
        gradients are partitioned on arrival, which gives the same sums, unless `parallel.reduce` is "step".
        """
        yield

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` applies the gradients."""
        return self._accumulation.at_boundary

    @verb("set the accumulation boundary")
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Say whether the micro-batch at hand is the last of its optimizer step, in place of the engine's count.

        Called before its backward. Each backward is a micro-batch then, and `step()` may be called once, after the last
        one, however many there were. It holds for every further micro-batch until it is called again. The divisor of
        `backward` stays `gradient_accumulation_steps`.

        Raises ConfigError where `managed_gradient_accumulation` is false.
        """
        self._accumulation.set_boundary(is_boundary)
        self._runtime.gradients.begin_micro_step(last=self._accumulation.at_boundary)

    def was_step_applied(self) -> bool:
        """Return whether the latest `step()` changed the weights: False between boundaries and for a skipped step."""
        return self._applied

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the module with `torch.compile`'s arguments; block by block where weights are gathered inside."""
        self._check("compile")
        self._runtime.attached.compiled.compile_model(*args, **options)

    # What it shows.

    @property
    def config(self) -> ResolvedConfig:
        return self._runtime.config

    @property
    def plan(self) -> Plan:
        known = self._runtime.store.ledger.activations_in_words()
        return replace(self._runtime.plan, activations=known) if known else self._runtime.plan

    @property
    def groups(self) -> ProcessGroups:
        return self._runtime.groups

    @property
    def store(self) -> TieredStore:
        return self._runtime.store

    @property
    def units(self) -> list[Unit]:
        return self._runtime.access.units

    @property
    def coordinator(self) -> Coordinator:
        return self._runtime.coordinator

    @property
    def device(self) -> torch.device:
        return self._runtime.device.torch

    @property
    def world_size(self) -> int:
        return self.groups.world.size

    @property
    def data_size(self) -> int:
        """Ranks with samples of their own: into so many parts a program divides its data set."""
        return self.groups.topology.replicas

    @property
    def data_rank(self) -> int:
        """This rank's part of the data set. Ranks of a tensor group, or of a sequence, have the same."""
        return self.groups.replica

    @property
    def global_rank(self) -> int:
        return self.groups.ranks.rank

    @property
    def local_rank(self) -> int:
        return self.groups.ranks.local_rank

    global_steps: int = _counter("global_steps", "Optimizer steps of the run, skipped ones included.")
    micro_steps: int = _counter("micro_steps", "Micro-batches, as `step()` counts them.")
    global_samples: int = _counter("global_samples", "Samples that all ranks have trained on.")
    skipped_steps: int = _counter("skipped_steps", "Optimizer steps that were skipped.")

    @property
    def loss_scale(self) -> LossScale:
        """The present loss scale of fp16; 1 in other precisions. A call of it gives it, too, as in DeepSpeed."""
        return LossScale(self._runtime.step.loss_scale)

    @property
    def early_groups(self) -> EarlyGroups:
        """This rank's sub-groups that were stepped in backward, before `step()`, by what became of them."""
        return self._runtime.step.early_groups

    def is_first_stage(self) -> bool:
        """Return whether this rank runs the first stage of the model: always without a pipeline."""
        return self.groups.pipeline.index == 0

    def is_last_stage(self) -> bool:
        """Return whether this rank runs the last stage of the model: always without a pipeline."""
        return self.groups.pipeline.index == self.groups.pipeline.size - 1

    def get_global_grad_norm(self) -> float:
        """Return the global gradient norm of the latest step, before clipping; infinite where an element was not
        finite.
        """
        return self._runtime.step.norm

    @verb("tell the norms of gradients")
    def get_grad_norms(self) -> dict[str, float]:
        """Return the gradient norm of every parameter that had a gradient in the latest step, by name. Collective.

        StateError unless it is called after `step()` and before the next backward.
        """
        return self._runtime.step.norms_by_parameter(begun=self._runtime.gradients.begun)

    def memory(self, by_unit: bool = False) -> MemoryReport:
        """Return this rank's bytes by tier and kind (and unit on request), now and at most; it prints as a table."""
        self._runtime.attached.checkpointing.settle()
        report = self._runtime.observer.report(by_unit=by_unit)
        return report if self._pipeline is None else replace(report, pipeline=self._pipeline.memory.use)

    def timeline(self, path: str | os.PathLike[str] | None = None) -> Timeline:
        """Record what happens in a `with` block: where each step waits, what moves, what memory holds.

        path: a page (".html") or a Chrome trace (".json") that is written at the end; ranks above 0 put theirs beside
        it. The object has the figures, and writes the other kind, too. One at a time in a process.

        With a pipeline all ranks record the same steps, because the block's end is collective: each page shows the
        forwards and backwards of all ranks of its pipeline.
        """
        self._check("record a timeline")
        return self._runtime.observer.timeline(path)

    def step_times(self) -> StepTimes:
        """Return the parts and waits that the time of the latest optimizer step adds up from. StateError where no key
        of the configuration has it counted (docs/monitoring.md).
        """
        return self._runtime.progress.step_times()

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's full tensors on rank 0's CPU, gathered unit by unit; {} on other ranks. Collective."""
        return self._whole_tensors(frozen=True)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """DeepSpeed's name for `state_dict`, at stage 3 only, which accelerate and transformers call; None on ranks
        above 0. Collective.
        """
        if self.config.stage != 3:
            raise ConfigError(f"the weights are whole at stage {self.config.stage}: use the module's state_dict()")
        return self._consolidated_16bit_state_dict(exclude_frozen_parameters)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The same at every stage, which accelerate calls with a tensor axis."""
        tensors = self._whole_tensors(frozen=not exclude_frozen_parameters)
        return tensors if self.global_rank == 0 else None

    def _whole_tensors(self, *, frozen: bool) -> dict[str, Any]:
        self._check("take the state_dict() of its model")
        self._runtime.attached.hooks.check_tree()
        wanted = self.global_rank == 0
        found = access.full_state_dict(self._runtime.access, wanted=wanted, frozen=frozen)
        found.update(export.whole_buffers(self._runtime, wanted=wanted))
        return {**found, **{name: found[first] for name, first in tied_names(self.module).items() if first in found}}

    # Checkpoints.

    @verb("save a checkpoint")
    def save_checkpoint(
        self, save_dir: str | os.PathLike[str], tag: object = None, client_state: ClientState = None,
        save_latest: bool = True, exclude_frozen_parameters: bool = False, asynchronous: bool | None = None,
    ) -> str:  # fmt: skip
        """Save weights, optimizer states and the state of the run below `save_dir`; return the tag. Collective.

        tag: name of the folder in `save_dir`, by default "global_step" and the number. client_state: the values
        that `load_checkpoint` returns (rank 0's are kept), by default `engine.client_state`.
        exclude_frozen_parameters: leave out parameters that are not trained. asynchronous: return once the state is
        captured (default: checkpoint.async); the next verb raises its errors, with several ranks the next step.

        While gradients accumulate, it saves the latest complete step and warns that they are not part of it.

        Raises on all ranks alike, and keeps the older checkpoints: TransferError where the drive fails or is full,
        CheckpointError for a value that cannot be saved.
        """
        self._bring_back()
        behind = self.config.sections.checkpoint.asynchronous if asynchronous is None else asynchronous
        request = SaveRequest(
            Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag), latest=save_latest,
            frozen=not exclude_frozen_parameters, behind=behind,
        )  # fmt: skip
        own = self.client_state if client_state is None else client_state
        with self._runtime.marked("engine.save_checkpoint()"):
            return self._checkpoints.save(self._run, request, own)

    @verb("load a checkpoint", broken_is_fine=True)
    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: object = None, load_module_strict: bool = True,
        load_optimizer_states: bool = True, load_lr_scheduler_states: bool = True, load_module_only: bool = False,
    ) -> tuple[str | None, Any]:  # fmt: skip
        """Resume the run that `save_checkpoint` saved, with any number of ranks, stage, tiers, precision. Collective.

        Returns (the checkpoint's folder, its client_state), or (None, {}) without a checkpoint and a tag. A checkpoint
        of DeepSpeed's ZeRO serves, too, and for the weights a folder of safetensors files.

        tag: default: the one that `latest` in `load_dir` names; a given tag must exist. load_module_strict: missing or
        unexpected tensors are an error. load_optimizer_states, load_lr_scheduler_states: False keeps the engine's own.
        load_module_only: weights and buffers alone.

        Raises CheckpointError on all ranks alike; nothing has changed then, unless the message says otherwise.
        """
        self._bring_back()
        options = LoadOptions(load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        with self._runtime.marked("engine.load_checkpoint()"):
            found = self._checkpoints.load(self._run, Path(load_dir), None if tag is None else str(tag), options)
            return self._begin_anew(found)

    @verb("resume", broken_is_fine=True)
    def resume(self, load_dir: str | os.PathLike[str] | None = None) -> tuple[str | None, Any]:
        """Load the newest checkpoint below `load_dir` (default: checkpoint.path) that is complete and undamaged; warn
        about each one that is passed over, and why. Collective.

        Returns what `load_checkpoint` does; (None, {}) without any. CheckpointError where none of them can be loaded.
        """
        self._bring_back()
        with self._runtime.marked("engine.resume()"):
            return self._begin_anew(self._checkpoints.resume(self._run, load_dir))

    def _begin_anew(self, found: tuple[str | None, Any]) -> tuple[str | None, Any]:
        """A load has dropped the gradients: forget the micro-batches that they are of."""
        if found[0] is not None:
            self._accumulation.forget()
            self._runtime.health.drop_gradients()
            if isinstance(self.module, layers.PipelineModule):
                self.module.count_from(self._counters.micro_steps)
            if (records := self._checkpoints.records) is not None and records.dropped:
                records.note(self._run, self.client_state)
        return found

    @verb("export")
    def export(
        self, folder: str | os.PathLike[str], dtype: str = "bf16", *, max_shard_size: int | str = "5GB",
        one_file: bool = False, tokenizer: Any = None,
    ) -> Path:  # fmt: skip
        """Write the model as a Hugging Face folder for `from_pretrained`; return it. Collective, in bounded memory.

        The folder has safetensors files of at most `max_shard_size` (or one file), config.json, generation_config.json,
        and the tokenizer files of `tokenizer` or of the folder that the model came from; of a peft model the adapters.
        dtype: "fp32" (the master weights), "bf16" or "fp16". All ranks must see the folder. It is renamed into place
        when complete; other files in it stay.
        """
        with self._runtime.marked("engine.export()"):
            return export.export_folder(
                self._runtime, Path(folder), dtype=dtype, max_shard_size=max_shard_size, one_file=one_file,
                tokenizer=tokenizer,
            )  # fmt: skip

    @verb("export")
    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:  # fmt: skip
        """DeepSpeed's name for `export` in 16 bits. Nothing is pickled: "pytorch_model.bin" is "model.safetensors"."""
        with self._runtime.marked("engine.save_16bit_model()"):
            export.export_16bit(self._runtime, Path(save_dir), save_filename, frozen=not exclude_frozen_parameters)
        return True

    @property
    def _run(self) -> Run:
        """The parts of the run that a checkpoint keeps besides tensors."""
        return Run(
            self.module, self._counters, self.optimizer, self._runtime.step, self.lr_scheduler,
            self.training_dataloader,
        )  # fmt: skip

    # The end.

    def close(self, *, keep_weights: bool = False) -> None:
        """Finish the step that goes on behind the program, then return memory, files, threads and process groups.

        keep_weights: leave the weights in the module, in the precision that the engine computes in, so that the program
        or another engine goes on with it (docs/engine_life.md). Collective then; an error leaves the engine open, as a
        tensor or a pipeline axis does, of which a rank has a part. Without it only weights that are whole stay usable.

        Further calls, and calls in a forked child, do nothing. Raise the error of that step, once everything is
        returned.
        """
        if self._runtime.health.closed or self._runtime.store.is_elsewhere:
            return
        if keep_weights and (reason := why_not_kept(self._runtime)) is not None:
            raise StateError(
                f"the module cannot keep its weights: {reason}. Write them with engine.export(folder), or take them on "
                "rank 0 with engine.state_dict(), then call engine.close()"
            )
        owner = WeightKeeper(self._runtime) if keep_weights else None
        if owner is not None:
            self._check("hand the weights to the module")
            self._checkpoints.background.finish()
            with self.groups.telling():
                owner.take()
        try:
            self._close(at_once=False)
        finally:
            if owner is not None:
                owner.finish()
                self._runtime.health.mark_handed_over()

    def destroy(self) -> None:
        """DeepSpeed's name for `close(keep_weights=True)`; an engine that an error has broken, or whose ranks have
        parts of the model, is closed without the weights, with a warning: programs call this when they end, however
        that comes.
        """
        reason = self._runtime.health.refusal or why_not_kept(self._runtime)
        if reason:
            logger.warning("the engine is closed, and its weights are not left in the module: %s", reason)
        self.close(keep_weights=not reason)

    def _close(self, *, at_once: bool) -> None:
        runtime = self._runtime
        if runtime.health.closed or runtime.store.is_elsewhere:
            return
        with HELD, ExitStack() as stack:
            runtime.health.mark_closed()
            if (reason := why_not_kept(runtime)) is not None:
                guards.mark_parts(runtime.module, reason)
            # Last registered, first run.
            if (records := self._checkpoints.records) is not None and not at_once:
                stack.callback(records.clean_up)
                records.finish()
            stack.callback(runtime.close, at_once=at_once)
            if self._pipeline is not None:
                stack.callback(self._pipeline.remove)
            stack.callback(self._checkpoints.background.close, at_once=at_once)
            stack.callback(self._preemption.close)

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
            # The error under way is the one that the program sees.
            logger.error("while closing the engine: %s", failure)

    def _bring_back(self) -> None:
        """Reload what is offloaded, on every rank alike."""
        if self._runtime.store.offloaded():
            self.reload_states()

    def _stepped_by(self, verb: str) -> TieredOptimizer:
        if self.optimizer is None:
            raise StateError(
                f"cannot {verb}: this engine was made without an optimizer, runs its model and keeps neither gradients "
                "nor optimizer states. To train, name one in the configuration or pass one to infinity.initialize()"
            )
        return self.optimizer

    def _own_data(self) -> Iterator[Any]:
        """Batches of the loader of `initialize`'s training data, epoch after epoch."""
        if self.training_dataloader is None:
            raise ConfigError(
                "engine.train_batch() without batches draws them from the training data that initialize() was given, "
                "and it was given none: pass train_batch a list or an iterator of micro-batches"
            )
        if self._drawing is None:
            self._drawing = chain.from_iterable(repeat(self.training_dataloader))
        return self._drawing

    def _check_whole(self, verb: str) -> None:
        if self._pipeline is not None:
            raise StateError(
                f"{verb} runs a whole model, and this rank has stages of one (parallel.pipeline "
                f"{self.config.pipeline}): call engine.train_batch(batches) with the {self.config.accumulation} "
                "micro-batches of a step, and engine.eval_batch(batches) to evaluate"
            )

    def _check(
        self, verb: str, *, broken_is_fine: bool = False, gradients: bool = False, inside: bool | None = None
    ) -> None:
        self._runtime.health.check(verb, broken_is_fine=broken_is_fine, gradients=gradients, inside=inside)
        if self.world_size == 1:
            # With other ranks, every rank raises it at the end of the same step.
            self._checkpoints.background.check()


def close_engines_of(model: nn.Module) -> None:
    """Close the engines that the program has left open, with their weights in the model. Collective."""
    for engine in guards.engines_of(model):
        logger.info("the model goes to another engine: the one that it had is closed, and the model keeps its weights")
        engine.close(keep_weights=True)


def refuse_parts(model: nn.Module) -> None:
    """Raise ConfigError for a model in which an engine has left parts of its weights."""
    if (reason := guards.why_parts(model)) is not None:
        raise ConfigError(
            f"the model had another engine, which is closed, and its weights are parts: {reason}. Make the model "
            "again, or load it from what engine.export(folder) has written"
        )
