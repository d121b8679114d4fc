"""The public verbs: `initialize`, and whole parameters outside the loop.

`initialize` is the whole engine in one reading: configuration -> specification -> plan -> store -> units -> engine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils.data import DataLoader, Dataset

from infinity.config import ResolveContext, ResolvedConfig, load_config, resolve, unfilled
from infinity.config.optimizer import Adam
from infinity.distributed.collectives import exchange
from infinity.distributed.consistency import agree_on_plan
from infinity.distributed.process_groups import ProcessGroups, Ranks, detect
from infinity.engine.data import Loader, Workers
from infinity.engine.engine import Engine
from infinity.engine.launch import check_arguments, configuration_of
from infinity.engine.model_init import ConfigSource, groups_of
from infinity.engine.preflight import checkpointed_blocks, preflight, remarks
from infinity.engine.runtime import Runtime
from infinity.errors import ConfigError
from infinity.log import configure_logging, logger
from infinity.memory.activation_tier import ActivationTier
from infinity.memory.ledger import Ledger
from infinity.memory.queue_options import queue_options
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory, mappings_of_their_own, trim
from infinity.observability.monitors import check_installed
from infinity.ops.adam import set_threads
from infinity.ops.cores import share_of_cores, thread_count
from infinity.optim.factory import Chosen, adam_from_params, from_name, from_torch
from infinity.optim.lr import build_scheduler, check_steps_alone
from infinity.optim.optimizer_view import TieredOptimizer
from infinity.optim.stepper import Stepper
from infinity.plan.plan import Plan
from infinity.plan.spec import dtype_name
from infinity.plan.types import Kind
from infinity.zero import parameter, weight_tiles
from infinity.zero.activation_checkpoint import Checkpointing
from infinity.zero.activation_measurement import measure_activations
from infinity.zero.compiled import CompiledModules, unwrapped
from infinity.zero.coordinator import Coordinator
from infinity.zero.deferred_init import spool_of
from infinity.zero.gradients import Gradients
from infinity.zero.hooks import ModuleHooks
from infinity.zero.materialize import Materializer
from infinity.zero.param_access import modify, read
from infinity.zero.states import ParameterState
from infinity.zero.unit import Unit

__all__ = ["GatheredParameters", "initialize", "measure_activations", "modify", "read", "state"]


def initialize(
    model: nn.Module | None = None,
    config: ConfigSource = None,
    model_parameters: Iterable[Any] | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: None = None,
    config_params: ConfigSource = None,
    args: Any = None,
    dist_init_required: bool | None = None,
    **others: Any,
) -> tuple[Engine, TieredOptimizer, DataLoader[Any] | None, Any]:
    """Make a model trainable on the memory that the machine has.

    model: any `nn.Module` with real parameters, ordinary or made under `infinity.Init`; they move to their tiers.
    config: path, dict or JSON string with DeepSpeed's keys (aliases: `config_params`, `args.deepspeed_config`).
    others: arguments that only DeepSpeed has, each refused with the next step (`dist_init_required`: see launch).
    model_parameters: parameters or torch-style groups to train; default: all that require a gradient.
    optimizer: None (from the configuration), or a class, factory or instance of an elementwise torch optimizer.
    lr_scheduler: None (from the configuration), a class or factory that takes the optimizer, or an instance.
    training_data: a dataset of which the loader (see the keys dataloader_...) draws each rank's batches on its device.

    Returns (engine, optimizer, dataloader, lr_scheduler); the last two are None without data or scheduler. Raises
    ConfigError for what the configuration or the arguments cannot mean, CapacityError for a plan that does not fit.
    Nothing is allocated or written before the plan has been checked.
    """
    source, ranks = configuration_of(config, config_params, args), detect()
    check_arguments({"mesh": mesh, **others}, dist_init_required, ranks)
    model = unwrapped(_checked(model))
    resolved = _resolve(source, model, ranks, optimizer, lr_scheduler)
    configure_logging(ranks.rank, resolved.config.log_level)
    device = Device.detect(ranks.local_rank)
    spool = spool_of(list(model.parameters()))
    # First of all: from here on what one rank raises ends the others too.
    groups = spool.groups if spool is not None else groups_of(resolved, ranks, device)
    with ExitStack() as undo, groups.telling():
        if spool is None:
            undo.callback(groups.close)
        trained = _trained(resolved, model, model_parameters, optimizer)
        plan, question = preflight(resolved, model, trained.group_of(), device, groups, trained.optimizer.spec)
        agree_on_plan(plan, groups.world)
        ledger = Ledger(question.limits, question.reserve.taken_nbytes, question.reserve.peak_nbytes(plan))
        parts = _build(resolved, model, plan, groups, device, trained, ledger, undo)
        engine = Engine(parts)
        undo.callback(engine._progress.close)
        engine.optimizer = TieredOptimizer(
            trained.groups, trained.optimizer.defaults, engine.apply_step, kind=trained.optimizer.name
        )
        engine.lr_scheduler = _scheduler(resolved, lr_scheduler, engine.optimizer)
        loader = engine.training_dataloader = _loader(resolved, training_data, collate_fn, groups, device)
        undo.pop_all()
    trim()
    for line in [*remarks(question, model, plan, device), _headline(resolved, plan, trained)]:
        logger.info(line)
    return engine, engine.optimizer, loader, engine.lr_scheduler


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """DeepSpeed's name: `read(params)`, or `modify(params)` with the values of `modifier_rank`."""
    if not enabled:
        yield
    elif modifier_rank is None:
        with read(params):
            yield
    else:
        with modify(params, source=modifier_rank):
            yield


def state(param: nn.Parameter) -> ParameterState:
    """A parameter's full master weight, moments and gradient, from any tier: properties that gather and scatter."""
    return ParameterState(param)


@dataclass(slots=True)
class _Trained:
    """Parameter groups of the run, and what steps them."""

    groups: list[dict[str, Any]]
    optimizer: Chosen

    def group_of(self) -> dict[int, int]:
        return {id(param): index for index, group in enumerate(self.groups) for param in group["params"]}


def _checked(model: nn.Module | None) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError(f"initialize(model=...) needs a torch.nn.Module, got {_not_a_model(model)}")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{path or 'the model'} is a ScriptModule (torch.jit), whose weights cannot be taken away between its "
                "calls: pass the Python module that was scripted or traced"
            )
    for name, param in model.named_parameters():
        if isinstance(param, nn.UninitializedParameter):
            raise ConfigError(f"{name} is a lazy parameter: run one forward to give it a shape before initialize()")
        kind = type(param)
        if is_traceable_wrapper_subclass_type(kind):
            raise ConfigError(
                f"{name} is a {kind.__name__}, which wraps other tensors and cannot be partitioned as plain bytes: "
                "pass a model with plain weights, or quantized ones whose parameters are plain int8 or uint8 tensors"
            )
        owner = param.__dict__.get("_infinity_owner")
        if owner is not None and not owner._closed:
            raise ConfigError(
                f"{name} belongs to another engine: close() that one first, or give each engine a model of its own"
            )
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{path or type(module).__name__} has max_norm={module.max_norm:g}: forward writes into its weight, "
                "which a partitioned weight loses and ranks would do each in its own way. Set max_norm to None, and "
                "bound the norms yourself after engine.step(), inside `with infinity.modify(weight):`"
            )
    return model


def _not_a_model(given: object) -> str:
    """What a program passes instead, and what to pass."""
    if isinstance(given, (str, os.PathLike)):
        return (
            f"{os.fspath(given)!r}: load it first, with infinity.load_hf(folder, config) from a local Hugging Face "
            "folder or with from_pretrained(), and pass the model"
        )
    if isinstance(given, type):
        return f"the class {given.__name__}: pass an instance of it"
    return f"{type(given).__name__}: pass the model to train"


def _resolve(source: ConfigSource, model: nn.Module, ranks: Ranks, optimizer: Any, scheduler: Any) -> ResolvedConfig:
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    dtypes = [dtype_name(param.dtype) for param in model.parameters() if param.is_floating_point()]
    known = dtypes[0] if dtypes and dtypes[0] in ("fp32", "bf16", "fp16") else None
    lr = optimizer.defaults.get("lr") if isinstance(optimizer, torch.optim.Optimizer) else None
    if scheduler is not None and not _is_factory(scheduler):
        check_steps_alone(scheduler)
    context = ResolveContext(
        world_size=ranks.world_size, detected=True, hidden_size=hidden if isinstance(hidden, int) else None,
        model_dtype=known, optimizer_lr=float(lr) if lr is not None else None,  # type: ignore[arg-type]
        no_auto=unfilled(optimizer=optimizer is not None, scheduler=scheduler is not None),
    )  # fmt: skip
    resolved = resolve(load_config(source), context)
    check_installed(resolved.config)
    return resolved


def _trained(config: ResolvedConfig, model: nn.Module, chosen: Iterable[Any] | None, optimizer: Any) -> _Trained:
    """Which parameters are trained, with which hyper-parameters."""
    groups: list[dict[str, Any]]
    if chosen is None:
        groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    else:
        listed = list(chosen)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(groups)
    if optimizer is not None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer must be a torch.optim class, factory or instance, got {type(optimizer).__name__}"
            )
        # A scheduler that watches the program's own optimizer sees that it is stepped, by the engine.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        found = from_torch(optimizer)
    else:
        section = config.config.optimizer
        assert section is not None
        params = section.params.model_dump()
        if isinstance(section, Adam):
            found = adam_from_params(params, decoupled=section.decoupled)
        else:
            found = from_name(section.type, params)
    trained = _Trained(found.groups or [dict(group) for group in groups], found)
    trains = any(param.requires_grad for group in trained.groups for param in group["params"])
    if not trains and (chosen is not None or optimizer is not None):
        raise ConfigError("no parameter that is given to train requires a gradient")
    mine = {id(param) for param in model.parameters()}
    if any(id(param) not in mine for group in trained.groups for param in group["params"]):
        raise ConfigError("model_parameters (or the optimizer) name a parameter that is not in the model")
    return trained


@mappings_of_their_own()
def _build(
    config: ResolvedConfig,
    model: nn.Module,
    plan: Plan,
    groups: ProcessGroups,
    device: Device,
    trained: _Trained,
    ledger: Ledger,
    undo: ExitStack,
) -> Runtime:
    """Allocate what the plan says and move the model into it. What was built is taken down again when a later part
    fails.
    """
    spool, ranks = spool_of(list(model.parameters())), groups.ranks
    if spool is not None:
        undo.callback(groups.close)
    store = _store(config, plan, ranks, device, ledger)
    undo.callback(store.close)
    by_name = dict(model.named_parameters())
    units = [
        Unit(
            layout, placed, weight_tiles.params_of(layout, by_name), store=store, device=device, group=groups.data,
            ledger=ledger,
        )  # fmt: skip
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True)
    ]
    Materializer(
        units, plan=plan, store=store, groups=groups, spool=spool,
        moments_start=trained.optimizer.method.start,
    ).run()
    if spool is not None:
        spool.close()
    gradients = Gradients(units, plan=plan, store=store, device=device, groups=groups, ledger=ledger)
    coordinator = Coordinator(
        units, plan=plan, store=store, gradients=gradients, group=groups.world, spare=device.spare
    )
    for unit in units:
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            parameter.attach(param, coordinator, slot.name)
    weight_tiles.adopt_tiles(units, coordinator)
    for buffer_owner in model.modules():
        for name, buffer in buffer_owner._buffers.items():
            if buffer is not None:
                buffer_owner._buffers[name] = buffer.to(device.torch)
    hooks = ModuleHooks(model, units, coordinator, group=groups.world, synced=plan.policy.collective_forward)
    undo.callback(hooks.remove)
    checkpointing = _checkpointing(config, model, ranks, device, ledger)
    undo.callback(checkpointing.close)
    compiled = CompiledModules(model, hooks, plan, accelerator=device.is_accelerator)
    undo.callback(compiled.close)
    stepper = _stepper(config, plan, store, groups, trained)
    undo.callback(stepper.close)
    return Runtime(
        module=model, config=config, plan=plan, device=device, groups=groups, ledger=ledger, store=store, units=units,
        gradients=gradients, coordinator=coordinator, hooks=hooks, stepper=stepper, checkpointing=checkpointing,
        compiled=compiled,
    )  # fmt: skip


def _checkpointing(
    config: ResolvedConfig, model: nn.Module, ranks: Ranks, device: Device, ledger: Ledger
) -> Checkpointing:
    """What of the model is computed again in backward, and the tier of its checkpoints where that is not the device."""
    section = config.config.activation_checkpointing
    blocks = checkpointed_blocks(config, model)
    if section.every and not blocks:
        raise ConfigError(
            f"activation_checkpointing.every is {section.every}, but {type(model).__name__} has no blocks that it "
            "repeats: leave the key out, and call torch.utils.checkpoint in the model"
        )
    tier, path = None, config.checkpoint_nvme_path
    if config.checkpoint_tier != "gpu":
        open_file = None
        if path is not None:
            options = queue_options(config, path)
            open_file = lambda nbytes: NvmeTier.open(path, nbytes=nbytes, rank=ranks.rank, options=options)  # noqa: E731
        tier = ActivationTier(
            device, ledger=ledger, pin=section.offload.pin_memory, buffer_count=section.offload.buffer_count,
            overlap=config.config.overlap, open_file=open_file,
        )  # fmt: skip
    return Checkpointing(model, blocks, keep_ops=section.keep_ops, tier=tier)


def _stepper(
    config: ResolvedConfig, plan: Plan, store: TieredStore, groups: ProcessGroups, trained: _Trained
) -> Stepper:
    # Ranks of one node share its cores; the result does not depend on how many there are.
    ranks = groups.ranks
    cores = share_of_cores(ranks.local_rank % ranks.local_size, ranks.local_size)
    set_threads(thread_count(len(cores), ranks.local_size), cores)
    return Stepper(
        plan, store, index=groups.data.index, method=trained.optimizer.method, grad_bound=config.clip_value or math.inf
    )


def _store(config: ResolvedConfig, plan: Plan, ranks: Ranks, device: Device, ledger: Ledger) -> TieredStore:
    """The partitions' memory and, where the plan has extents, this rank's swap file."""
    nvme = None
    if plan.nvme_nbytes:
        assert config.nvme_path is not None
        options = queue_options(config, config.nvme_path)
        nvme = NvmeTier.open(config.nvme_path, nbytes=plan.nvme_nbytes, rank=ranks.rank, options=options)
    sections = (config.zero.offload_param, config.zero.offload_optimizer)
    pin = all(section is None or section.pin_memory for section in sections)
    try:
        return TieredStore(
            plan.partitions,
            device=device,
            host=HostMemory(device, pin=pin, ledger=ledger),
            ledger=ledger,
            pools=plan.pools,
            nvme=nvme,
            rank=ranks.rank,
            overlap=plan.policy.overlap,
        )
    except BaseException:
        if nvme is not None:
            nvme.close()
        raise


def _scheduler(config: ResolvedConfig, given: Any, optimizer: TieredOptimizer) -> Any:
    if given is not None:
        scheduler = given(optimizer) if _is_factory(given) else given
        check_steps_alone(scheduler)
        return scheduler
    section = config.config.scheduler
    return None if section is None else build_scheduler(section.type, section.params.model_dump(), optimizer)


def _is_factory(scheduler: Any) -> bool:
    return isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step"))


def _loader(
    config: ResolvedConfig, data: Dataset[Any] | None, collate: Any, groups: ProcessGroups, device: Device
) -> Loader | None:
    if data is None:
        return None
    # Rank 0's, so that `torch.manual_seed` says the order whatever the other ranks were seeded with.
    seed = exchange([float(torch.initial_seed() % 2**32)], groups.world, "seed of the data")
    given = config.config
    workers = Workers(
        given.dataloader_num_workers, given.dataloader_prefetch_factor, persistent=given.dataloader_persistent_workers,
        pin_memory=given.dataloader_pin_memory,
    )  # fmt: skip
    return Loader(
        data, rank=groups.data.index, ranks=groups.data.size, batch=config.micro_batch, seed=int(seed[0][0]),
        collate=collate, drop_last=given.dataloader_drop_last, device=device.torch, workers=workers,
    )  # fmt: skip


def _headline(config: ResolvedConfig, plan: Plan, trained: _Trained) -> str:
    """The one line that says what was decided, defaults that people trip over included."""
    clip, bound = config.clip_norm, config.clip_value
    autocast = config.config.torch_autocast
    precision = f"{config.compute_dtype}{f' under {autocast.dtype} autocast' if autocast.enabled else ''}"
    default = " (default)" if config.sources["gradient_clipping"] == "default" else ""
    return (
        f"{plan.numel / 1e6:.1f} M parameters, stage {config.stage}, {precision}, {plan.topology.dp} "
        f"rank(s), {trained.optimizer.name}{_rates(config, trained)}; parameters on {plan.homes(Kind.PARAM)}, "
        f"optimizer states on {plan.homes(Kind.STATES)}; "
        f"batch {config.train_batch} = {config.micro_batch} x {config.accumulation} x {plan.topology.dp}; "
        + (f"clipping at {clip:g}{default}" if clip else "no clipping")
        + (f", each element at {bound:g}" if bound else "")
    )


def _rates(config: ResolvedConfig, trained: _Trained) -> str:
    """The groups' learning rates, before a schedule changes them."""
    own = trained.optimizer.defaults.get("lr")
    rates: list[Any] = list(dict.fromkeys(group.get("lr", own) for group in trained.groups))
    if None in rates:
        return ""
    nobodys = trained.optimizer.groups is None and config.sources.get("optimizer.params.lr", "default") == "default"
    default = " (default)" if nobodys and rates == [own] else ""
    return f" at {' and '.join(f'{float(rate):g}' for rate in rates)}{default}"
