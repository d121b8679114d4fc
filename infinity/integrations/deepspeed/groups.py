"""`deepspeed.utils.groups`: the ranks of the data-parallel axis, which is all of them without another axis."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from infinity.distributed.groups import ProcessGroups, latest_groups
from infinity.integrations.deepspeed import comm, ulysses


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that have batches of their own."""
    return groups.topology.replicas if (groups := _divided()) is not None else comm.get_world_size()


def get_data_parallel_rank() -> int:
    """Return this process's place among them."""
    return groups.replica if (groups := _divided()) is not None else comm.get_rank()


def get_data_parallel_group() -> Any:
    """Return their group."""
    if (groups := _divided()) is None:
        return comm.get_world_group()
    if groups.data.process_group is not None and groups.topology.sp == 1:
        return groups.data.process_group
    # Of one rank, too: torch takes None for all ranks.
    own = groups.data.members[groups.sequence.index :: groups.topology.sp]
    return dist.new_group(list(own), use_local_synchronization=True)


def get_tensor_model_parallel_world_size() -> int:
    """Return the number of ranks among which each layer is divided."""
    return groups.tensor.size if (groups := _divided()) is not None else 1


def get_tensor_model_parallel_rank() -> int:
    """Return this process's place among them."""
    return groups.tensor.index if (groups := _divided()) is not None else 0


_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_group = get_data_parallel_group


def _get_sequence_parallel_world_size() -> int:
    return groups.sequence.size if (groups := _divided()) is not None else 1


def _get_sequence_parallel_rank() -> int:
    return groups.sequence.index if (groups := _divided()) is not None else 0


def _get_sequence_parallel_group() -> Any:
    if ulysses.mpu.get_sequence_parallel_world_size() > 1:
        return ulysses.mpu.get_sequence_parallel_group()
    return groups.sequence.process_group if (groups := _divided()) is not None else None


def _divided() -> ProcessGroups | None:
    """Return the groups of the latest engine, if it has a tensor or a sequence axis."""
    groups = latest_groups()
    return groups if groups is not None and groups.tensor.size * groups.sequence.size > 1 else None
