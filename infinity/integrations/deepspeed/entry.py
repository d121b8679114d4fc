"""`deepspeed.initialize` and its siblings: DeepSpeed's arguments and conventions for `infinity.initialize`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

from torch import nn

from infinity.config import load_config
from infinity.config.conflicts import tensor_sizes
from infinity.config.schema import DEEPSPEED, Conventions
from infinity.distributed.groups import detect
from infinity.engine import initialize as engine
from infinity.engine.launch import configuration_of
from infinity.errors import ConfigError
from infinity.integrations.deepspeed import clients, ulysses

# Ranks among which `tp_model_init` was asked to divide a model.
_asked: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def installed() -> bool:
    """Return whether `import deepspeed` gives these names in this process."""
    return getattr(sys.modules.get("deepspeed"), "__infinity__", None) is not None


def conventions() -> Conventions:
    """Return DeepSpeed's conventions; parameters have its attributes only where `import deepspeed` finds these names,
    for that is what a program does that sees them.
    """
    return replace(DEEPSPEED, parameter_attributes=installed())


def initialize(
    args: Any = None, model: nn.Module | None = None, optimizer: Any = None, model_parameters: Any = None,
    training_data: Any = None, lr_scheduler: Any = None, distributed_port: int = 29500, mpu: Any = None,
    dist_init_required: bool | None = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:  # fmt: skip
    """Return (engine, optimizer, dataloader, lr_scheduler), as `infinity.initialize` does, with DeepSpeed's arguments.

    Raises ConfigError where accelerate runs each process for itself although the launcher has started several.
    """
    clients.adapt()
    _check_accelerate()
    given = config if config is not None else config_params
    # Scripts give both, of one file; DeepSpeed takes the argument of the call.
    read = load_config(configuration_of(given, None, args if given is None else None), conventions=conventions())
    read = ulysses.mpu.configured(read, model, mpu)
    asked = _asked.get(model, 1) if isinstance(model, nn.Module) else 1
    if asked not in {1, *tensor_sizes(read).values()}:
        raise ConfigError(
            f"tp_model_init(tp_size={asked}) was called, but the configuration of initialize(), which divides the "
            f"model, does not say so: set tensor_parallel.autotp_size to {asked} in it"
        )
    if (kept := clients.kept_engine(model, read)) is not None:
        vars(kept).update(lr_scheduler=engine.scheduler_of(kept.config, lr_scheduler, kept.optimizer))
        return kept, kept.optimizer, kept.training_dataloader, kept.lr_scheduler
    made = engine.initialize(
        model=model, config=read, model_parameters=model_parameters, optimizer=optimizer, lr_scheduler=lr_scheduler,
        training_data=training_data, collate_fn=collate_fn, dist_init_required=dist_init_required,
        distributed_port=distributed_port, mpu=None if mpu is ulysses.mpu else mpu, mesh_param=mesh_param,
        conventions=conventions(),
    )  # fmt: skip
    clients.made(made[0], read)
    if mpu is ulysses.mpu:
        mpu.made(made[0])
    return made


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **others: Any) -> nn.Module:
    """Return the model, which `initialize` divides itself: over `tensor_parallel.autotp_size` ranks, or ConfigError
    where its configuration has not the size that is given here. dtype: of the parameters, unless a configuration is
    given, whose precision `initialize` gives them.
    """
    _asked[model] = tp_size
    return model.to(dtype=dtype) if config is None else model


def init_inference(*args: Any, **kwargs: Any) -> NoReturn:
    """Raise ConfigError: there is no inference engine here."""
    raise ConfigError(
        "init_inference: there is no inference engine here. An engine without optimizer runs and generates with "
        "weights on any tier: deepspeed.initialize(model=model, config=...)"
    )


def _check_accelerate() -> None:
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, "PartialState", None), "_shared_state", None)
    started = detect().world_size
    if not shared or started == 1:
        return
    seen = shared.get("num_processes", started)
    if seen == 1:
        raise ConfigError(
            f"the launcher has started {started} processes (WORLD_SIZE), but accelerate runs each for itself "
            "(num_processes = 1): every rank would see all data and train a model of its own. accelerate does so where "
            "it finds no accelerator that it can communicate with: check torch.cuda.is_available(), or start one "
            "process"
        )
