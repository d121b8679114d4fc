"""Ranks of a tensor group, and of a pipeline, compute one batch together: the program must give them the same."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange_values
from infinity.errors import ConfigError

# Bytes of a tensor that are compared.
_COMPARED_NBYTES = 1 << 20


def check_same_batch(args: Sequence[Any], kwargs: Mapping[str, Any], group: AxisGroup) -> None:
    """Raise ConfigError on every rank unless all ranks of the group have the same tensors among the arguments of a
    forward. Collective. Compares shapes, dtypes and the first MiB of each.
    """
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    mine = {name: _digest(value) for name, value in named.items() if isinstance(value, Tensor)}
    everyone = exchange_values(mine, group, "exchange of digests of a batch")
    apart = [name for name in {name: None for each in everyone for name in each} if _differs(name, everyone)]
    if apart:
        raise ConfigError(
            f"the {group.size} ranks of a {group.axis} group were given different batches ({', '.join(apart)}): "
            f"{', '.join(group.places)}. They compute one batch together. Divide the data set over the data axis: rank "
            "engine.data_rank of engine.data_size (a DistributedSampler takes both), or let "
            "initialize(training_data=...) do it"
        )


def _differs(name: str, everyone: Sequence[Mapping[str, str]]) -> bool:
    return len({each.get(name) for each in everyone}) > 1


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    head = flat[: max(_COMPARED_NBYTES // flat.dtype.itemsize, 1)].cpu().contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(head.view(torch.uint8).numpy().data)}"
