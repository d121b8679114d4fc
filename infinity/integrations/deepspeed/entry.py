"""`deepspeed.initialize` and its siblings: DeepSpeed's arguments and conventions for `infinity.initialize`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any, NoReturn

from torch import nn

from infinity.config.conventions import DEEPSPEED, Conventions
from infinity.distributed.process_groups import detect
from infinity.engine import initialize as engine
from infinity.errors import ConfigError

DIVIDES = (
    "initialize() divides the model itself: leave this call out, and set tensor_parallel.autotp_size in its "
    "configuration"
)


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
    _check_accelerate()
    given = config if config is not None else config_params
    if given is not None and getattr(args, "deepspeed_config", None) is not None:
        # Scripts give both, of one file; DeepSpeed takes the argument of the call.
        args = None
    return engine.initialize(
        model=model, config=given, model_parameters=model_parameters, optimizer=optimizer, lr_scheduler=lr_scheduler,
        training_data=training_data, collate_fn=collate_fn, args=args if given is None else None,
        dist_init_required=dist_init_required, distributed_port=distributed_port, mpu=mpu, mesh_param=mesh_param,
        conventions=conventions(),
    )  # fmt: skip


def tp_model_init(model: nn.Module, tp_size: int, dtype: Any, config: Any = None, **others: Any) -> nn.Module:
    """Return the model for one tensor-parallel rank; ConfigError for more, because `initialize` divides it itself."""
    if tp_size > 1:
        raise ConfigError(
            f"tp_model_init(tp_size={tp_size}): {DIVIDES} to {tp_size}"
        )
    return model.to(dtype=dtype)


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
