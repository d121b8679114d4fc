"""`deepspeed.utils.groups`: ranks of the data-parallel axis, which is all of them."""

from __future__ import annotations

from typing import Any

from infinity.integrations.deepspeed import comm


def get_data_parallel_world_size() -> int:
    """Return the number of ranks that share the data."""
    return comm.get_world_size()


def get_data_parallel_rank() -> int:
    """Return this process's place among them."""
    return comm.get_rank()


def get_data_parallel_group() -> Any:
    """Return their group."""
    return comm.get_world_group()


_get_data_parallel_world_size = get_data_parallel_world_size
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_group = get_data_parallel_group


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0
