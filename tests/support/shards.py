"""A runtime whose plan a tensor axis has cut, of any model and any cut: partitions and values without a forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infinity.config import ResolveContext, load_config, resolve
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import agree_on_plan
from infinity.distributed.process_groups import ProcessGroups, detect
from infinity.engine.build_runtime import build_runtime
from infinity.engine.model_init import groups_of
from infinity.engine.runtime import Runtime
from infinity.memory.ledger import Ledger
from infinity.memory.tiers.device import Device
from infinity.optim.factory import adam_from_params
from infinity.plan.capacity import Capacity
from infinity.plan.inputs import PlanInputs
from infinity.plan.shards import Replica, Shard
from infinity.plan.spec import module_tree
from infinity.plan.tensor_axis import TensorAxis
from infinity.plan.topology import Topology
from infinity.zero.deferred_init import merged_spool

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
# How a parameter is cut: along a dimension, in blocks of these sizes (one block: None); or what is replicated.
Cut = tuple[int, tuple[int, ...] | None] | Replica


def axis_of(model: nn.Module, cuts: dict[str, Cut], size: int) -> TensorAxis:
    """Return the axis that cuts the named parameters so; all others are replicated, with the same gradients."""
    params = {}
    for name, param in model.named_parameters():
        cut = cuts.get(name, Replica.SAME)
        if isinstance(cut, Replica):
            params[name] = (None, cut)
        else:
            dim, blocks = cut
            params[name] = (Shard(dim, blocks or (param.shape[dim],), size), Replica.NONE)
    return TensorAxis(size=size, params=params)


def shard_of(whole: Tensor, shard: Shard | None, index: int) -> Tensor:
    """Return what rank `index` of the tensor axis has of a whole tensor, by torch's own slices."""
    if shard is None:
        return whole
    parts = [block.chunk(shard.parts, shard.dim)[index] for block in whole.split(shard.blocks, shard.dim)]
    return torch.cat(parts, shard.dim)


@contextmanager
def sharded_runtime(model: nn.Module, axis: TensorAxis, config: dict[str, Any]) -> Iterator[Runtime]:
    """Build what `initialize` builds, with the tensor axis. Collective; the model has whole parameters."""
    ranks, data = detect(), detect().world_size // axis.size
    resolved = resolve(load_config(config), ResolveContext(world_size=data, detected=True))
    device = Device.detect(ranks.local_rank)
    spool = merged_spool(list(model.parameters()))
    groups = spool.groups if spool is not None else groups_of(resolved, ranks, device)
    _cut_groups(groups, axis.size)
    question = PlanInputs(
        node=axis.divide(module_tree(model, compute_dtype=resolved.compute_dtype)), config=resolved,
        topology=Topology(dp=data, tp=axis.size, local_size=ranks.local_size), accelerator=device.own_memory,
        capacity=Capacity(),
    )  # fmt: skip
    plan = question.plan()
    agree_on_plan(plan, groups.world)
    chosen = adam_from_params(ADAM, decoupled=True)
    with ExitStack() as undo, groups.telling():
        runtime = build_runtime(resolved, model, plan, groups, device, chosen, Ledger(), undo, ())
        undo.pop_all()
        undo.callback(runtime.close, at_once=True)
        runtime.access.own_parameters()
        yield runtime


def _cut_groups(groups: ProcessGroups, tensor: int) -> None:
    rank, world = groups.ranks.rank, groups.ranks.world_size
    rows = [list(range(first, first + tensor)) for first in range(0, world, tensor)]
    columns = [list(range(first, world, tensor)) for first in range(tensor)]
    groups.tensor = _group_of("tensor", rank, rows)
    groups.data, groups.reduction = _group_of("data", rank, columns), _group_of("data", rank, columns)


def _group_of(axis: str, rank: int, everyone: Sequence[list[int]]) -> AxisGroup:
    opened = [dist.new_group(members, backend="gloo") for members in everyone]
    mine = next(index for index, members in enumerate(everyone) if rank in members)
    members = everyone[mine]
    return AxisGroup(axis, members.index(rank), len(members), opened[mine] if len(members) > 1 else None)
