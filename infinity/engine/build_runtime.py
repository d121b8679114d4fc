"""Allocating what a plan says and moving a model into it: store -> units -> values -> gradients -> hooks -> stepper."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

from torch import nn

from infinity.distributed.process_groups import ProcessGroups
from infinity.engine.build_parts import make_checkpointing, make_observer, make_stepper
from infinity.engine.first_batch import FirstBatch
from infinity.engine.precision import widen_batch_norms
from infinity.engine.runtime import Runtime
from infinity.memory.ledger import Ledger
from infinity.memory.open_store import open_store
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import mappings_of_their_own
from infinity.observability.memory_breakdown import Breakdown
from infinity.observability.progress import StepProgress
from infinity.optim.factory import Chosen
from infinity.optim.loss_scaler import LossScaler, grad_factor
from infinity.parallel.tensor import apply
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.deferred_init import spool_of
from infinity.zero.foreign_attributes import publish_model
from infinity.zero.gradients import Gradients
from infinity.zero.hooks import ModuleHooks
from infinity.zero.materialize import Materializer
from infinity.zero.model_units import attach_units, make_units, taken_in_order
from infinity.zero.param_access import ParamAccess


@mappings_of_their_own()
def build_runtime(
    question: PlanInputs, model: nn.Module, plan: Plan, groups: ProcessGroups, device: Device, optimizer: Chosen,
    ledger: Ledger, undo: ExitStack,
) -> Runtime:  # fmt: skip
    """Allocate what the plan says and move the model into it. Each part registers its close in `undo`, in case a later
    one fails. question: what the plan was made of.
    """
    spool, ranks, config = spool_of(list(model.parameters())), groups.ranks, question.config
    if spool is not None:
        undo.callback(groups.close)
    store = open_store(config, plan, rank=ranks.rank, device=device, ledger=ledger)
    undo.callback(store.close)
    units = make_units(model, plan, store=store, device=device, group=groups.data, ledger=ledger)
    Materializer(
        units, plan=plan, store=store, groups=groups, spool=spool, every=taken_in_order(model, question.units),
        moments_start=optimizer.rule.start,
    ).run()
    if spool is not None:
        spool.close()
    stepper = make_stepper(config, plan, store, device, groups, optimizer)
    undo.callback(stepper.close)
    gradients = Gradients(
        units, plan=plan, store=store, device=device, groups=groups, ledger=ledger,
        sink=stepper, trains=optimizer.trains,
    )  # fmt: skip
    coordinator = Coordinator(
        units, plan=plan, store=store, gradients=gradients, group=groups.stage, spare=device.spare
    )
    coordinator.memory.refresh(units)
    attach_units(units, coordinator)
    if config.stage == 3 and config.config.provenance.conventions.parameter_attributes:
        publish_model(model, parts=groups.data.size)
    _place_buffers(model, device, config.compute_dtype)
    # Beneath the hooks, and beneath what computes blocks again.
    exchanges = apply(model, question.axis, groups.tensor, device.torch)
    undo.callback(exchanges.remove)
    hooks = ModuleHooks(model, units, coordinator, group=groups.stage, synced=plan.policy.collective_forward)
    undo.callback(hooks.remove)
    checkpointing = make_checkpointing(config, model, question.checkpointed, ranks, device, ledger)
    undo.callback(checkpointing.close)
    compiled = CompiledModules(model, hooks, plan, accelerator=device.is_accelerator)
    undo.callback(compiled.close)
    observer = make_observer(Breakdown(plan, ledger, store, units, device), config, groups)
    progress = StepProgress(
        config.config, ledger, accelerator=device.own_memory, rank=ranks.rank, data_size=groups.data.size
    )
    undo.callback(progress.close)
    first_batch = FirstBatch(question, plan, model, coordinator, compiled, groups.stage, device, ledger)
    scaler = LossScaler.of(config.config.fp16.model_dump()) if config.scales_loss else None
    averaged = groups.data.size if config.config.gradient_allreduce_op == "mean" else 1
    factor = partial(grad_factor, scaler, ranks=averaged)
    access = ParamAccess(plan, store, groups, units, gradients, coordinator, factor, lambda verb: runtime.check(verb))
    runtime = Runtime(
        module=model, config=config, plan=plan, exchanges=exchanges, device=device, groups=groups, ledger=ledger,
        store=store, units=units, gradients=gradients, coordinator=coordinator, access=access, hooks=hooks,
        stepper=stepper, checkpointing=checkpointing, compiled=compiled, observer=observer, progress=progress,
        scaler=scaler, first_batch=first_batch,
    )  # fmt: skip
    return runtime


def _place_buffers(model: nn.Module, device: Device, dtype: str) -> None:
    """Move them in their own dtypes, which the weights of batch norms follow."""
    if dtype != "fp32":
        widen_batch_norms(model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch)
