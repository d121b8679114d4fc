"""`deepspeed.comm`: the names of torch.distributed, and DeepSpeed's own before a process group is open."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from infinity.distributed.groups import detect
from infinity.engine import launch
from infinity.integrations.deepspeed.clients import adapt
from infinity.log import logger


def init_distributed(
    dist_backend: str | None = None, auto_mpi_discovery: bool = True, distributed_port: int = 29500,
    verbose: bool = True, timeout: timedelta | None = None, init_method: str | None = None,
    dist_init_required: bool | None = None, config: Any = None, rank: int = -1, world_size: int = -1,
) -> None:  # fmt: skip
    """Open the group of all ranks, unless one is open: see `infinity.init_distributed`.

    The launcher has chosen port, rank and world size, so these arguments say nothing; `init_method`, `rank` and
    `world_size` that contradict it are torch's to open a group with, before.
    """
    adapt()
    if dist_init_required is False:
        launch.check_arguments({}, dist_init_required, detect())
        return
    launch.init_distributed(dist_backend, timeout)


def is_initialized() -> bool:
    """Return whether a process group is open."""
    return bool(dist.is_available() and dist.is_initialized())


def get_rank(group: Any = None) -> int:
    """Return this process's rank; before a group is open, the launcher's."""
    return dist.get_rank(group) if is_initialized() else detect().rank


def get_world_size(group: Any = None) -> int:
    """Return the number of ranks; before a group is open, the launcher's."""
    return dist.get_world_size(group) if is_initialized() else detect().world_size


def get_local_rank() -> int:
    """Return this process's rank on its machine."""
    return detect().local_rank


def get_world_group() -> Any:
    """Return the group of all ranks."""
    return dist.group.WORLD


def get_all_ranks_from_group(group: Any = None) -> list[int]:
    """Return the global ranks of a group."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def inference_all_reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None) -> Any:
    """Add up a tensor over the ranks of a group, in place."""
    return dist.all_reduce(tensor, op=op, group=group)


def log_summary(*args: Any, **kwargs: Any) -> None:
    """Say where the times of collectives are."""
    logger.info("times of collectives are in the timeline: set trace in the configuration (docs/timeline.md)")


def __getattr__(name: str) -> Any:
    """Return torch.distributed's object of that name."""
    try:
        return getattr(dist, name)
    except AttributeError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}, nor has torch.distributed") from None
