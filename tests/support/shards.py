"""A runtime whose plan a tensor axis has cut, of any model and any cut: partitions and values without a forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from infinity.config import ResolveContext, load_config, resolve
from infinity.distributed.consistency import agree_on_plan
from infinity.distributed.groups import detect
from infinity.engine.build_runtime import build_runtime
from infinity.engine.engine import Engine
from infinity.engine.initialize import optimizer_of
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
from infinity.zero.deferred_init import merged_init

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


def engine_of(runtime: Runtime) -> Engine:
    """Return an engine of a runtime that nothing else closes."""
    chosen = adam_from_params(ADAM, decoupled=True)
    trained = [param for param in runtime.module.parameters() if param.requires_grad]
    return Engine(runtime, optimizer_of(runtime, [{"params": trained}], chosen, None))


@contextmanager
def sharded_runtime(model: nn.Module, axis: TensorAxis, config: dict[str, Any]) -> Iterator[Runtime]:
    """Build what `initialize` builds, with the tensor axis. Collective; the model has whole parameters.

    config: its `parallel.tensor` is the axis' size.
    """
    ranks = detect()
    context = ResolveContext(world_size=ranks.world_size, local_size=ranks.local_size, detected=True)
    resolved = resolve(load_config(config), context)
    assert resolved.tensor == axis.size
    device = Device.detect(ranks.local_rank)
    init = merged_init(list(model.parameters()))
    groups = init.groups if init is not None else groups_of(resolved, ranks, device)
    inputs = PlanInputs(
        node=axis.divide(module_tree(model, compute_dtype=resolved.compute_dtype)), config=resolved,
        topology=groups.topology, accelerator=device.own_memory, capacity=Capacity(), axis=axis,
    )  # fmt: skip
    plan = inputs.plan()
    agree_on_plan(plan, groups.stage, groups.world)
    chosen = adam_from_params(ADAM, decoupled=True)
    with ExitStack() as undo, groups.telling():
        runtime = build_runtime(inputs, model, plan, groups, device, chosen, Ledger(), undo)
        undo.pop_all()
        undo.callback(runtime.close, at_once=True)
        runtime.access.own_parameters(model)
        yield runtime

