"""Functions between ranks do what they say forwards and backwards, and sums have the same bits on all ranks."""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.groups import ProcessGroups, detect
from infinity.parallel import functions
from tests.parallel.groups import open_tensor_group


def seeded(seed: int, *shape: int) -> Tensor:
    # Whole numbers, so that sums are exact in any order.
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def both_ways(rank: int, world: int) -> list[str]:
    """The names of functions whose results or gradients are not the expected ones."""
    group = open_tensor_group(rank, world)
    wrong = []

    def check(name: str, function: Any, inputs: Tensor, expected: Any, grads: Tensor, expected_grad: Any) -> None:
        """inputs, grads: [rank, ...] of all ranks. expected, expected_grad: what this rank gets of them."""
        mine = inputs[rank].clone().requires_grad_()
        # Not a leaf, as activations are.
        output = function(mine * 1, group, "layers.0.mlp")
        output.backward(grads[rank])
        if not torch.equal(output.detach(), expected(inputs)) or not torch.equal(mine.grad, expected_grad(grads)):
            wrong.append(name)

    part, whole, flat = (world, 2, 3, 4), (world, 2, 3 * world, 4), (world, 3 * world, 4)
    wide = (world, 2, 3, 4 * world)
    total = lambda of: of.sum(0)  # noqa: E731
    mine = lambda of: of[rank]  # noqa: E731
    tokens = slice(3 * rank, 3 * rank + 3)
    columns = slice(4 * rank, 4 * rank + 4)
    check("copy", functions.copy_in, seeded(1, *part), mine, seeded(2, *part), total)
    check("sum", functions.sum_out, seeded(3, *part), total, seeded(4, *part), mine)
    side = lambda of: torch.cat(of.unbind(), -1)  # noqa: E731
    cut = lambda of: of[rank][..., columns]  # noqa: E731
    check("gather", functions.gather_columns, seeded(5, *part), side, seeded(6, *wide), cut)
    check("split", functions.split_columns, seeded(7, *wide), cut, seeded(8, *part), side)
    for shape, dim in ((whole, 1), (flat, 0)):
        short = list(shape)
        short[dim + 1] = 3
        behind = lambda of, dim=dim: torch.cat(of.unbind(), dim)  # noqa: E731
        own = lambda of, dim=dim: of[rank].narrow(dim, tokens.start, 3)  # noqa: E731
        own_total = lambda of, dim=dim: of.sum(0).narrow(dim, tokens.start, 3)  # noqa: E731
        few, many = seeded(9, *short), seeded(10, *shape)
        same = lambda *args: functions.gather_sequence(*args, partial=False)  # noqa: E731
        check(f"gather sequence {dim}", functions.gather_sequence, few, behind, many, own_total)
        check(f"gather same {dim}", same, few, behind, many, own)
        check(f"scatter sequence {dim}", functions.scatter_sequence, many, own, few, behind)
        check(f"reduce-scatter {dim}", functions.reduce_scatter_sequence, many, own_total, few, behind)
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_function_is_its_other_directions_backward(rank_pools, ranks):
    assert rank_pools[ranks].run(both_ways) == [[]] * ranks


def sums(rank: int, world: int, native: bool) -> list[tuple[bool, int]]:
    """Whether each sum is the one in the order of ranks, and a checksum of its bits. native: as NCCL would."""
    group = open_tensor_group(rank, world)
    before = collectives._is_gloo
    try:
        if native:
            collectives._is_gloo = lambda members: False
        found = []
        for numel in (5, 1 << 14, (1 << 16) + 7):
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                of_ranks = [torch.randn(numel, generator=torch.Generator().manual_seed(each)) for each in range(world)]
                rows = [row.to(dtype) for row in of_ranks]
                expected = rows[0].float()
                for row in rows[1:]:
                    expected = expected + row.float()
                mine = rows[rank].clone()
                assert collectives.sum_in_order(mine, group, "sum") is mine
                exact = torch.equal(mine, expected.to(dtype)) or (native and dtype is torch.float32)
                found.append((exact, zlib.crc32(mine.view(torch.uint8).numpy().tobytes())))
        return found
    finally:
        collectives._is_gloo = before


@pytest.mark.parametrize(("ranks", "native"), [(2, False), (3, False), (3, True)])
def test_sums_are_in_the_order_of_ranks_and_rounded_once(rank_pools, ranks, native):
    first, *others = rank_pools[ranks].run(sums, native)
    assert all(exact for exact, _ in first)
    assert others == [first] * (ranks - 1)


def names(rank: int, world: int) -> list[str]:
    """What the watchdog is told of a copy and of a sum."""
    groups = ProcessGroups(detect(), timeout_seconds=60)
    told = []
    start = AxisGroup.start

    def noted(self: AxisGroup, name: str, *args: Any, **kwargs: Any) -> Any:
        told.append(name)
        return start(self, name, *args, **kwargs)

    AxisGroup.start = noted
    try:
        values = torch.ones(3, requires_grad=True)
        copied = functions.copy_in(values, groups.data, "layers.1.mlp")
        functions.sum_out(copied, groups.data, "layers.1.mlp").sum().backward()
    finally:
        AxisGroup.start = start
    dist.barrier()
    groups.close()
    return told


def test_collectives_name_the_module(rank_pools):
    assert rank_pools[2].run(names) == [["sum of layers.1.mlp", "sum of gradients of layers.1.mlp"]] * 2
