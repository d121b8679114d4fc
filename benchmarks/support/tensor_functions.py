"""Task: the host time of a training step of a model that is divided over two ranks, beside its collectives."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.parallel import tensor
from infinity.plan.tensor_axis import Region, Role, TensorAxis
from support.machine import median

WIDTH, HEADS = 64, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = [each(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(hidden)) * self.up(hidden))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(), Mlp()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norms[0](hidden))
        return hidden + self.mlp(self.norms[1](hidden))


def run(options: dict[str, Any]) -> dict[str, Any]:
    """`layers`, `rounds`.

    Returns medians in seconds of a step for `shard` (each rank computes with its part and nobody sums: what the
    arithmetic takes), `ours` and `dtensor`, which take turns: `wall`, and, with collectives that return at once,
    `wall beside` and `cpu beside` (of the thread). Also the number of collectives of a step, and the difference between
    the losses of the last two.
    """
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    group = AxisGroup("tensor", rank, world, dist.group.WORLD)
    layers = options["layers"]
    models = {"shard": _divided(layers, group), "ours": _divided(layers, group), "dtensor": _model(layers)}
    tensor.apply(models["ours"], _axis(layers, world), group)
    mesh = init_device_mesh("cpu", (world,))
    for layer in models["dtensor"]:
        parallelize_module(layer, mesh, {
            **{f"attention.{name}": ColwiseParallel() for name in "qkv"}, "attention.o": RowwiseParallel(),
            "mlp.gate": ColwiseParallel(), "mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel(),
        })  # fmt: skip
    hidden = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    rows: dict[str, list[tuple[float, ...]]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    calls: dict[str, int] = {}
    for index in range(options["rounds"] + 5):
        for name, model in models.items():
            dist.barrier()
            wall, _, losses[name] = _step(model, hidden)
            with _without_collectives() as count:
                beside, cpu, _ = _step(model, hidden)
            calls[name] = len(count)
            if index >= 5:
                rows[name].append((wall, beside, cpu))
    heads = ("wall", "wall beside", "cpu beside")
    medians = {
        name: dict(zip(heads, (median(column) for column in zip(*found, strict=True)), strict=True))
        for name, found in rows.items()
    }
    return {"medians": medians, "calls": calls, "apart": abs(losses["ours"] - losses["dtensor"])}


def _step(model: nn.Module, hidden: Tensor) -> tuple[float, float, float]:
    """Wall clock and the thread's CPU time of forward and backward, which on the CPU is this thread's; the loss."""
    wall, cpu = time.perf_counter(), time.thread_time()
    loss = model(hidden).square().mean()
    loss.backward()
    wall, cpu = time.perf_counter() - wall, time.thread_time() - cpu
    model.zero_grad()
    return wall, cpu, float(loss.detach())


@contextmanager
def _without_collectives() -> Iterator[list[str]]:
    """In the block our sum, and those that DTensor asks for, return at once; yield a list that counts them."""
    count: list[str] = []

    def nothing(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        count.append("sum")
        return tensor

    with (
        patch.object(collectives, "sum_in_order", nothing),
        patch.object(functional, "all_reduce", nothing),
        patch.object(functional, "wait_tensor", lambda tensor: tensor),
    ):
        yield count


def _model(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(layers)))


def _divided(layers: int, group: AxisGroup) -> nn.Sequential:
    """The model with this rank's shards."""
    model = _model(layers)
    for path, role in _axis(layers, group.size).roles.items():
        module: Any = model.get_submodule(path)
        dim = 1 if role is Role.ROWWISE else 0
        module.weight.data = module.weight.data.chunk(group.size, dim)[group.index].clone()
        if dim == 0:
            module.bias.data = module.bias.data.chunk(group.size)[group.index].clone()
    return model


def _axis(layers: int, size: int) -> TensorAxis:
    columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    roles = {f"{index}.{name}": Role.COLWISE for index in range(layers) for name in columns}
    roles |= {f"{index}.{name}": Role.ROWWISE for index in range(layers) for name in ("attention.o", "mlp.down")}
    regions = tuple(Region(f"{index}.{name}") for index in range(layers) for name in ("attention", "mlp"))
    return TensorAxis(size, {}, roles, regions)
