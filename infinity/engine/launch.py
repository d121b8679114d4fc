"""DeepSpeed's ways to start a script: the process group, the command line, the arguments of `initialize`.

Each is translated into its meaning here, or refused with the next step.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import nn

from infinity.distributed.groups import Ranks, detect, open_group
from infinity.engine.model_init import ConfigSource
from infinity.errors import ConfigError
from infinity.memory.tiers.device import Device

_NO_AXES = (
    "infinity makes the groups of its axes itself: leave it out, and set parallel.tensor and parallel.pipeline in the "
    "configuration"
)
# Arguments of DeepSpeed's `initialize` that have no meaning here: the reason, and values that are ignored.
_REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "mesh": (_NO_AXES, (None,)),
    "mesh_param": (_NO_AXES, (None,)),
    "mpu": (_NO_AXES, (None,)),
    "distributed_port": ("the launcher chooses the port; leave it out, and give torchrun --master-port", (None, 29500)),
}


def init_distributed(dist_backend: str | None = None, timeout: timedelta | None = None) -> None:
    """Open torch.distributed's group of all ranks, unless one is open; without a launcher it has this rank alone.

    For scripts that communicate or ask for their rank before `initialize`, which opens the groups that it needs itself.
    dist_backend: torch's name of a back end; default: gloo, with nccl for tensors on an accelerator.
    """
    ranks = detect()
    if dist_backend is not None:
        _check_backend(dist_backend)
    open_group(ranks, backends=dist_backend or Device.detect(ranks.local_rank).backends, timeout=timeout)


def _check_backend(asked: str) -> None:
    """Raise ConfigError for a back end that this torch does not have. asked: "gloo", or "cpu:gloo,cuda:nccl"."""
    built = {name: getattr(dist, f"is_{name}_available", lambda: True)() for name in dist.Backend.backend_list}
    here = [name for name, available in built.items() if available and name != dist.Backend.UNDEFINED]
    for name in (part.rpartition(":")[2].lower() for part in asked.split(",")):
        if name not in here:
            raise ConfigError(
                f"init_distributed({asked!r}): this torch has no back end {name!r}; it has {', '.join(here)}. Leave "
                "the argument out: collectives take gloo, and on an accelerator the one that torch has for it"
            )


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add DeepSpeed's options to a script's own; `initialize(args=...)` reads the file of --deepspeed_config."""
    group = parser.add_argument_group("training engine")
    group.add_argument("--deepspeed", action="store_true", help="for the script to ask; the engine needs no switch")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the configuration (JSON)")
    return parser


def configuration_of(config: ConfigSource, config_params: ConfigSource, args: Any) -> ConfigSource:
    """Return the configuration from the one of three arguments that the script has used."""
    if isinstance(config, nn.Module):
        raise ConfigError(
            "initialize(args, model, ...): by position the model comes first here, and its configuration second; name "
            "the arguments: initialize(args=args, model=model)"
        )
    places = {
        "config": config, "config_params": config_params,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
    }  # fmt: skip
    given = {place: source for place, source in places.items() if source is not None}
    if len(given) > 1:
        raise ConfigError(f"initialize() is given {' and '.join(given)}: keep one of them")
    if args is not None and not given:
        raise ConfigError(
            "initialize(args=...) is given no configuration: start the script with --deepspeed_config FILE, which "
            "infinity.add_config_arguments(parser) adds, or pass config="
        )
    return next(iter(given.values()), None)


def check_arguments(others: Mapping[str, Any], dist_init_required: bool | None, ranks: Ranks) -> None:
    """Raise ConfigError for arguments of DeepSpeed's `initialize` that this one refuses, TypeError for unknown ones."""
    for name, value in others.items():
        if name not in _REFUSED:
            raise TypeError(f"initialize() got an unexpected keyword argument {name!r}")
        why, says_nothing = _REFUSED[name]
        if value not in says_nothing:
            raise ConfigError(f"{name}: {why}")
    if dist_init_required is False and ranks.world_size > 1 and not dist.is_initialized():
        raise ConfigError(
            "dist_init_required is False, but no process group is open: call infinity.init_distributed() before, or "
            "leave it out"
        )
