"""Allocating what a plan says and moving a model into it: store -> units -> values -> step -> gradients ->
hooks.
"""

from __future__ import annotations

from contextlib import ExitStack, closing

from torch import nn

from infinity.config import ResolvedConfig
from infinity.distributed.groups import ProcessGroups
from infinity.engine.activation_forecast import FirstBatch
from infinity.engine.micro_batches import widen_batch_norms
from infinity.engine.runtime import Attached, Runtime
from infinity.memory.ledger import Ledger
from infinity.memory.store import Left, TieredStore, open_store
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import mappings_of_their_own, trim
from infinity.observability.memory_report import Observer
from infinity.observability.progress import StepProgress
from infinity.ops.adam import set_threads
from infinity.ops.cores import share_of_cores, thread_count
from infinity.optim.factory import Chosen
from infinity.parallel import sequence, tensor
from infinity.plan.inputs import PlanInputs
from infinity.plan.plan import Plan
from infinity.step.loss_scaler import LossScaler
from infinity.step.optimizer_step import OptimizerStep
from infinity.tiling.sparse_models import SparseModel
from infinity.zero.access import ParamAccess
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.compiled import CompiledModules
from infinity.zero.coordinator import Coordinator
from infinity.zero.deferred_init import init_of
from infinity.zero.gradients import Gradients
from infinity.zero.health import Health
from infinity.zero.hooks import ModuleHooks
from infinity.zero.materialize import Materializer, attach_units, make_units, taken_in_order
from infinity.zero.parameter import publish_model


def make_step(
    config: ResolvedConfig, plan: Plan, store: TieredStore, device: Device, groups: ProcessGroups, optimizer: Chosen
) -> OptimizerStep:
    """Make what steps the partitions, with this rank's share of the cores."""
    # Ranks of one node share its cores. The result does not depend on the number of threads.
    ranks = groups.ranks
    cores = share_of_cores(ranks.local_rank % ranks.local_size, ranks.local_size)
    set_threads(thread_count(len(cores), ranks.local_size), cores)
    scaler = LossScaler.of(config.sections.fp16.model_dump()) if config.scales_loss else None
    return OptimizerStep(plan, store, groups, config, device=device, rules=optimizer.rules, scaler=scaler)


@mappings_of_their_own()
def build_runtime(
    inputs: PlanInputs, model: nn.Module, plan: Plan, groups: ProcessGroups, device: Device, optimizer: Chosen,
    ledger: Ledger, undo: ExitStack, left: Left | None = None,
) -> Runtime:  # fmt: skip
    """Allocate what the plan says and move the model into it. Each part registers its close in `undo`, in case a later
    one fails. inputs: what the plan was made of. left: by a run that was killed, whose values replace the model's.
    """
    init, ranks, config = init_of(list(model.parameters())), groups.ranks, inputs.config
    if init is not None:
        undo.callback(groups.close)
    store = open_store(config, plan, rank=ranks.rank, device=device, ledger=ledger, left=left)
    undo.callback(store.close)
    units = make_units(model, plan, store=store, device=device, group=groups.data, ledger=ledger)
    Materializer(
        units, plan=plan, store=store, groups=groups, init=init, every=taken_in_order(model, inputs.units),
        moments_start=optimizer.rules[0].start,
    ).run(left)
    if init is not None:
        init.close()
    step = make_step(config, plan, store, device, groups, optimizer)
    undo.callback(step.close)
    gradients = Gradients(
        units, plan=plan, store=store, device=device, groups=groups, ledger=ledger,
        step=step, trains=optimizer.trains,
    )  # fmt: skip
    coordinator = Coordinator(
        units, plan=plan, store=store, gradients=gradients, group=groups.stage, spare=device.spare
    )
    coordinator.memory.refresh(units)
    experts = attach_units(model, units, coordinator)
    undo.callback(experts.close)
    if config.stage == 3 and config.sections.provenance.conventions.parameter_attributes:
        publish_model(model, parts=groups.data.size)
    _place_buffers(model, device, config.compute_dtype)
    # Beneath the hooks, and beneath what computes blocks again.
    exchanges = tensor.apply(model, inputs.axis, groups.tensor, device.torch)
    undo.callback(exchanges.remove)
    blocks = undo.enter_context(closing(SparseModel.of(config, model, groups, device)))
    parts = undo.enter_context(closing(sequence.SequenceAxis(model, groups.sequence)))
    hooks = ModuleHooks(model, units, coordinator, group=groups.stage, synced=plan.policy.collective_forward)
    undo.callback(hooks.remove)
    checkpointing = Checkpointing.of(config, model, inputs.checkpointed, ranks, device, ledger)
    undo.callback(checkpointing.close)
    compiled = undo.enter_context(closing(CompiledModules(model, hooks, plan, accelerator=device.is_accelerator)))
    observer = Observer(plan, store, units, device, config.sections, groups)
    progress = StepProgress(
        config.sections, ledger, accelerator=device.own_memory, rank=ranks.rank, data_size=groups.data.size
    )
    undo.callback(progress.close)
    first_batch = FirstBatch(inputs, plan, model, coordinator, compiled, groups.stage, device, ledger)
    health = Health(store, step, groups)
    access = ParamAccess(plan, store, groups, units, gradients, coordinator, step, health)
    trim()
    return Runtime(
        module=model, config=config, plan=plan, device=device, groups=groups, store=store, gradients=gradients,
        coordinator=coordinator, access=access, step=step,
        attached=Attached(exchanges, blocks, parts, experts, hooks, checkpointing, compiled), observer=observer,
        progress=progress, first_batch=first_batch, health=health,
    )  # fmt: skip


def _place_buffers(model: nn.Module, device: Device, dtype: str) -> None:
    """Move them in their own dtypes, which the weights of batch norms follow."""
    if dtype != "fp32":
        widen_batch_norms(model)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device.torch)
