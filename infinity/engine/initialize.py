"""`initialize`: configuration -> specification -> plan -> store -> units -> engine, the whole way in one reading.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass_type
from torch.utils.data import DataLoader, Dataset

from infinity.config import STRICT, Config, Conventions, ResolveContext, ResolvedConfig, load_config, resolve, unfilled
from infinity.config.training import Adam, AdamW8bit, Muon
from infinity.distributed.consistency import agree_on_plan
from infinity.distributed.groups import ProcessGroups, Ranks, detect
from infinity.engine.activation_forecast import measure_activations
from infinity.engine.build_runtime import build_runtime
from infinity.engine.data import open_loader
from infinity.engine.engine import Engine, close_engines_of, refuse_parts
from infinity.engine.launch import check_arguments, configuration_of
from infinity.engine.liger import apply_liger
from infinity.engine.model_init import ConfigSource, all_ranks_read, groups_of
from infinity.engine.optimizer import TieredOptimizer
from infinity.engine.preflight import preflight, remarks, stages_asked
from infinity.engine.runtime import Runtime
from infinity.engine.step_records import find_run, records_of
from infinity.errors import ConfigError
from infinity.log import configure_logging, logger, warn_once
from infinity.memory.ledger import Ledger
from infinity.memory.tiers.device import Device
from infinity.observability.monitors import check_installed
from infinity.optim.factory import (
    Chosen,
    adam_from_params,
    coded_adamw,
    from_name,
    from_several,
    from_torch,
    muon_and_adamw,
    no_optimizer,
)
from infinity.optim.lr import build_scheduler, check_steps_alone
from infinity.plan.plan import Plan
from infinity.plan.spec import dtype_name, hidden_matrices, module_tree
from infinity.plan.types import Kind, Topology
from infinity.zero.access import gathered, modify, read
from infinity.zero.compiled import unwrapped
from infinity.zero.deferred_init import DeferredInit, merged_init
from infinity.zero.states import ParameterState

__all__ = ["GatheredParameters", "initialize", "measure_activations", "modify", "read", "state"]


def initialize(
    model: nn.Module | None = None,
    config: ConfigSource = None,
    model_parameters: Iterable[Any] | None = None,
    optimizer: Any = None,
    lr_scheduler: Any = None,
    training_data: Dataset[Any] | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    mesh: None = None, config_params: ConfigSource = None, args: Any = None, dist_init_required: bool | None = None,
    conventions: Conventions = STRICT,
    **others: Any,
) -> tuple[Engine, TieredOptimizer | None, DataLoader[Any] | None, Any]:  # fmt: skip
    """Make a model trainable on the memory that the machine has.

    model: any `nn.Module` with parameters, ordinary or made under `infinity.Init`; they move to their tiers.
    config: path, dict or JSON string with DeepSpeed's keys (aliases: `config_params`, `args.deepspeed_config`).
    others: arguments that only DeepSpeed has, each refused with the next step (`dist_init_required`: see launch).
    model_parameters: parameters or torch-style groups to train; default: all that require a gradient.
    optimizer: None (from the configuration), a class, factory or instance of an elementwise torch optimizer, or [Muon,
    another]. With none in either place (`"optimizer": null`) the engine only runs the model: no gradients or states.
    lr_scheduler: None (from the configuration), a class or factory that takes the optimizer, or an instance.
    conventions: how the configuration is read; `infinity.config.DEEPSPEED` for programs written for DeepSpeed.
    training_data: a dataset of which the loader (see the keys dataloader_...) draws each rank's batches on its device.

    Returns (engine, optimizer, dataloader, lr_scheduler), the last three None where there is none. Raises ConfigError
    for what cannot be meant, CapacityError for a plan that does not fit, before anything is allocated or written.
    """
    ranks = detect()
    with all_ranks_read() as patience:
        source = configuration_of(config, config_params, args)
        check_arguments({"mesh": mesh, **others}, dist_init_required, ranks)
        model, device = unwrapped(_checked(model)), Device.detect(ranks.local_rank)
        resolved = _resolve(load_config(source, conventions=conventions), model, ranks, optimizer, lr_scheduler)
        patience.last(resolved.sections.watchdog_seconds)
    _free(model, conventions)
    init = merged_init(list(model.parameters()))
    groups = _groups_of_init(init, resolved, device) if init is not None else groups_of(resolved, ranks, device)
    with ExitStack() as undo, groups.telling():
        if init is None:
            undo.callback(groups.close)
        trained = _trained(resolved, model, model_parameters, optimizer)
        chosen, loader = trained.optimizer, open_loader(resolved, model, training_data, collate_fn, groups, device)
        draw = None if loader is None else loader.example
        adopted, passed = find_run(resolved, groups) if chosen.trains else (None, [])
        wanted = chosen.spec_of(model)
        plan, inputs = preflight(resolved, model, trained.group_of(), device, groups, wanted, draw, adopted)
        agree_on_plan(plan, groups.stage, groups.world)
        liger = apply_liger(resolved.sections.kernels.liger, model, device.torch, plan.layouts, tensor=resolved.tensor)
        ledger = Ledger(inputs.limits, inputs.reserve.taken_nbytes, inputs.reserve.peak_nbytes(plan))
        left = None if adopted is None else adopted.left
        runtime = build_runtime(inputs, model, plan, groups, device, chosen, ledger, undo, left)
        stepped = optimizer_of(runtime, trained.groups, chosen, optimizer)
        scheduler = scheduler_of(resolved, lr_scheduler, stepped)
        engine = Engine(runtime, stepped, scheduler, loader, records_of(runtime, inputs, adopted, passed))
        runtime.access.own_parameters(model)
        undo.pop_all()
    for line in [*remarks(inputs, model, plan, device), *liger, _headline(resolved, plan, trained)]:
        logger.info(line)
    return engine, stepped, loader, scheduler


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
) -> Iterator[None]:
    """DeepSpeed's name: `modify(params)` with the values of `modifier_rank`, or without one `read(params)`. There a
    warning says of changes through `data` what is an error in `read`: programs merge adapters inside, and unmerge them.
    """
    if not enabled:
        yield
    elif modifier_rank is None:
        with gathered(params, data_too=False):
            yield
    else:
        with modify(params, source=modifier_rank):
            yield


def state(param: nn.Parameter) -> ParameterState:
    """Return a parameter's full master weight, moments and gradient, as properties that gather on read and scatter on
    assignment, from any tier.
    """
    return ParameterState(param)


@dataclass(slots=True)
class _Trained:
    """The parameter groups of the run, and the optimizer that steps them."""

    groups: list[dict[str, Any]]
    optimizer: Chosen

    def group_of(self) -> dict[int, int]:
        return {id(param): index for index, group in enumerate(self.groups) for param in group["params"]}


def _groups_of_init(init: DeferredInit, config: ResolvedConfig, device: Device) -> ProcessGroups:
    """Return the groups that a model was built with, or with another sequence axis, along which its parts are the same;
    ConfigError if the configuration has other axes now.
    """
    topology = init.groups.topology
    axes = (("tensor", topology.tp, config.tensor), ("pipeline", topology.pp, config.pipeline))
    for axis, built, given in axes:
        if built != given:
            raise ConfigError(
                f"the model was built with parallel.{axis} {built}, and initialize() is given {given}: give "
                f"infinity.Init or infinity.load_hf the same configuration, with parallel.{axis} in it"
            )
    if topology.sp != config.sequence:
        init.groups.close()
        init.meet_in(groups_of(config, init.groups.ranks, device))
    return init.groups


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
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ConfigError(
                f"{path or type(module).__name__} has max_norm={module.max_norm:g}: forward writes into its weight, "
                "which a partitioned weight loses and ranks would do each in its own way. Set max_norm to None, and "
                "bound the norms yourself after engine.step(), inside `with infinity.modify(weight):`"
            )
    return model


def _free(model: nn.Module, conventions: Conventions) -> None:
    """See to it that no engine has the model, or raise ConfigError. Collective."""
    if conventions.owned_model == "hand over":
        close_engines_of(model)
    refuse_parts(model)
    for name, param in model.named_parameters():
        owner = param.__dict__.get("_infinity_access")
        if owner is not None and not owner.coordinator.closed:
            raise ConfigError(
                f"{name} belongs to another engine: close() that one first, or give each engine a model of its own"
            )


def _not_a_model(given: object) -> str:
    """Describe what the program passes instead of a model, and say what to pass."""
    if isinstance(given, (str, os.PathLike)):
        return (
            f"{os.fspath(given)!r}: load it first, with infinity.load_hf(folder, config) from a local Hugging Face "
            "folder or with from_pretrained(), and pass the model"
        )
    if isinstance(given, type):
        return f"the class {given.__name__}: pass an instance of it"
    return f"{type(given).__name__}: pass the model to train"


def _resolve(config: Config, model: nn.Module, ranks: Ranks, optimizer: Any, scheduler: Any) -> ResolvedConfig:
    hidden = getattr(getattr(model, "config", None), "hidden_size", None)
    dtypes = [dtype_name(param.dtype) for param in model.parameters() if param.is_floating_point()]
    known = dtypes[0] if dtypes and dtypes[0] in ("fp32", "bf16", "fp16") else None
    lr = optimizer.defaults.get("lr") if isinstance(optimizer, torch.optim.Optimizer) else None
    if scheduler is not None and not _is_factory(scheduler):
        check_steps_alone(scheduler)
    context = ResolveContext(
        world_size=ranks.world_size, local_size=ranks.local_size, detected=True,
        hidden_size=hidden if isinstance(hidden, int) else None,
        model_dtype=known, optimizer_lr=float(lr) if lr is not None else None,  # type: ignore[arg-type]
        stages=stages_asked(model),
        no_auto=unfilled(optimizer=optimizer is not None, scheduler=scheduler is not None),
    )  # fmt: skip
    configure_logging(ranks.rank, config.log_level)
    if scheduler is not None and config.scheduler is not None:
        logger.info("scheduler: no effect here: the program passes its own")
        config = config.model_copy(update={"scheduler": None})
    resolved = resolve(config, context)
    check_installed(resolved.sections)
    for path, sentence in config.provenance.foreign.items():
        warn_once(f"foreign-key {path}", f"{config.provenance.origin}: {sentence}")
    return resolved


def _trained(config: ResolvedConfig, model: nn.Module, chosen: Iterable[Any] | None, optimizer: Any) -> _Trained:
    """Decide which parameters are trained, and with which hyper-parameters."""
    groups: list[dict[str, Any]]
    if chosen is None:
        groups = [{"params": [param for param in model.parameters() if param.requires_grad]}]
    else:
        listed = list(chosen)
        groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(groups)
    if optimizer is not None:
        several = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        for each in several:
            if not isinstance(each, torch.optim.Optimizer):
                raise ConfigError(
                    f"optimizer must be a torch.optim class, factory or instance, got {type(each).__name__}"
                )
            # torch's schedulers warn unless their optimizer was stepped; the engine steps in its place.
            vars(each)["_opt_called"] = True
        found = from_torch(several[0]) if len(several) == 1 else from_several(several)
    elif (section := config.sections.optimizer) is None:
        return _Trained([], no_optimizer())
    else:
        params = section.params.model_dump()
        if isinstance(section, Adam):
            found = adam_from_params(params, decoupled=section.decoupled)
        elif isinstance(section, AdamW8bit):
            found = coded_adamw(params, groups)
        elif isinstance(section, Muon):
            found = muon_and_adamw(params, groups, _hidden(config, model))
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


def _hidden(config: ResolvedConfig, model: nn.Module) -> frozenset[int]:
    """The ids of the weights that Muon is for, unless the program says which."""
    ask: Any = getattr(model, "get_output_embeddings", None)
    head = ask() if callable(ask) else None
    named = dict(model.named_parameters())
    heads = {id(param) for param in head.parameters()} if isinstance(head, nn.Module) else set[int]()
    found = hidden_matrices(
        module_tree(model, compute_dtype=config.compute_dtype),
        [name for name, param in named.items() if id(param) in heads],
        stacks=Topology.of(config).tp == 1,
    )
    return frozenset(id(named[name]) for name in found)


def optimizer_of(
    runtime: Runtime, groups: list[dict[str, Any]], chosen: Chosen, given: object
) -> TieredOptimizer | None:
    """Return the optimizer that the program holds; None where nothing is trained. given: what it has brought."""
    if not chosen.trains:
        return None
    return TieredOptimizer(
        groups, chosen.defaults, kind=chosen.name, step=runtime.step, memory=runtime.coordinator.memory,
        access=runtime.access, module=runtime.module,
        given=given if isinstance(given, torch.optim.Optimizer) else None,
    )  # fmt: skip


def scheduler_of(config: ResolvedConfig, given: Any, optimizer: TieredOptimizer | None) -> Any:
    """Return the schedule of an engine's optimizer: the program's own, the configuration's, or None."""
    if optimizer is None:
        if given is not None:
            raise ConfigError(
                "lr_scheduler has no optimizer whose rate it could set: name an optimizer in the configuration or pass "
                "one to initialize(), or leave the scheduler out of an engine that only runs its model"
            )
        if config.sections.scheduler is not None:
            logger.warning("scheduler has no effect: there is no optimizer whose rate it could set")
        return None
    if given is not None:
        scheduler = given(optimizer) if _is_factory(given) else given
        check_steps_alone(scheduler)
        return scheduler
    section = config.sections.scheduler
    return None if section is None else build_scheduler(section.type, section.params.model_dump(), optimizer)


def _is_factory(scheduler: Any) -> bool:
    return isinstance(scheduler, type) or (callable(scheduler) and not hasattr(scheduler, "step"))


def _headline(config: ResolvedConfig, plan: Plan, trained: _Trained) -> str:
    """Return the line that says what was decided, with the defaults that often surprise."""
    model = f"{plan.numel / 1e6:.1f} M parameters, stage {config.stage}"
    if not trained.optimizer.trains:
        return (
            f"{model}, {config.compute_dtype}, {plan.topology.in_words()}, no optimizer: the engine runs the model and "
            f"does not train it; parameters on {plan.homes(Kind.PARAM)}"
        )
    clip, bound = config.clip_norm, config.clip_value
    autocast = config.sections.torch_autocast
    precision = f"{config.compute_dtype}{f' under {autocast.dtype} autocast' if autocast.enabled else ''}"
    default = " (default)" if config.sources["gradient_clipping"] == "default" else ""
    return (
        f"{model}, {precision}, {plan.topology.in_words()}, "
        f"{trained.optimizer.name}{_rates(config, trained)}, stepped {trained.optimizer.way}; "
        f"parameters on {plan.homes(Kind.PARAM)}, "
        f"optimizer states on {plan.homes(Kind.STATES)}; "
        f"batch {config.train_batch} = {config.micro_batch} x {config.accumulation} x {plan.topology.replicas}; "
        + (f"clipping at {clip:g}{default}" if clip else "no clipping")
        + (f", each element at {bound:g}" if bound else "")
    )


def _rates(config: ResolvedConfig, trained: _Trained) -> str:
    """Return the groups' learning rates in words, before a schedule changes them."""
    own = trained.optimizer.defaults.get("lr")
    rates: list[Any] = list(dict.fromkeys(group.get("lr", own) for group in trained.groups))
    if None in rates:
        return ""
    unset = not trained.optimizer.given and config.sources.get("optimizer.params.lr", "default") == "default"
    default = " (default)" if unset and rates == [own] else ""
    return f" at {' and '.join(f'{float(rate):g}' for rate in rates)}{default}"
