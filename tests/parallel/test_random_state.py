"""Dropout draws the same on all ranks between regions and differently within, however often a block is computed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from infinity.distributed.axis_group import AxisGroup
from infinity.parallel import tensor
from infinity.parallel.random_state import has_dropout, share_random_state
from infinity.plan.tensor_axis import Region, Role, TensorAxis
from tests.parallel.groups import open_tensor_group

WIDTH = 16


class Noted(nn.Dropout):
    """A dropout that remembers which elements it kept."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.kept: list[list[bool]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        output = super().forward(hidden)
        self.kept.append((super().forward(torch.ones_like(hidden)) != 0).flatten().tolist())
        return output


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(WIDTH, WIDTH), Noted(), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, hidden: Tensor) -> Tensor:
        if self.fails:
            raise ArithmeticError
        return self.down(self.dropout(self.up(hidden)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.same, self.dropout = Mlp(), Mlp(), Noted()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.dropout(hidden + self.mlp(hidden) + self.same(hidden))


class Model(nn.Module):
    """Blocks with a divided region, a region that all ranks compute alike, and a dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reentrant: bool | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            if self.reentrant is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.reentrant)
        return hidden


def divided(group: AxisGroup, sequence: bool) -> Model:
    torch.manual_seed(0)
    model = Model()
    roles, regions = {}, []
    for index, block in enumerate(model.blocks):
        path = f"blocks.{index}"
        roles |= {
            f"{path}.mlp.up": Role.COLWISE, f"{path}.mlp.down": Role.ROWWISE,
            f"{path}.same.up": Role.COLWISE_GATHER, f"{path}.same.down": Role.ROWWISE_SPLIT,
        }  # fmt: skip
        regions += [Region(f"{path}.mlp"), Region(f"{path}.same", divided=False)]
        for mlp in (block.mlp, block.same):
            for param in (mlp.up.weight, mlp.up.bias):
                param.data = param.data.chunk(group.size, 0)[group.index].clone()
            mlp.down.weight.data = mlp.down.weight.data.chunk(group.size, 1)[group.index].clone()
    blocks = ("blocks.0", "blocks.1") if sequence else None
    tensor.apply(model, TensorAxis(group.size, {}, roles, tuple(regions), None, blocks), group)
    return model


def masks(model: Model, reentrant: bool | None) -> tuple[dict[str, Any], int]:
    """What each dropout has kept in one step, each time that it was called, and the next shared number."""
    model.reentrant = reentrant
    dropouts = {path: each for path, each in model.named_modules() if isinstance(each, Noted)}
    for each in dropouts.values():
        each.kept.clear()
    torch.manual_seed(5)
    hidden = torch.randn(2, 4, WIDTH, requires_grad=True)
    model(hidden).sum().backward()
    return {path: copy.copy(each.kept) for path, each in dropouts.items()}, int(torch.randint(1 << 40, ()))


def steps(rank: int, world: int, sequence: bool) -> list[Any]:
    group = open_tensor_group(rank, world)
    torch.manual_seed(rank)
    share_random_state(group, torch.device("cpu"))
    shared = int(torch.randint(1 << 40, ()))
    model = divided(group, sequence)
    found = [masks(model, reentrant) for reentrant in (None, None, False, True)]
    # After an error within a region the shared numbers go on.
    torch.manual_seed(9)
    model.blocks[0].mlp.fails = True
    with pytest.raises(ArithmeticError):
        model(torch.zeros(2, 4, WIDTH))
    return [shared, found, int(torch.randint(1 << 40, ()))]


@pytest.mark.parametrize("sequence", [False, True])
def test_masks_differ_within_divided_regions_only_and_are_drawn_again_alike(rank_pools, sequence):
    first, second = rank_pools[2].run(steps, sequence)
    assert (first[0], first[2]) == (second[0], second[2])
    for (mine, following), (other, following_there) in zip(first[1], second[1], strict=True):
        assert following == following_there == first[1][0][1]
        for path, kept in mine.items():
            # Along a cut sequence the ranks' tokens differ, and so do their masks.
            alike = ".same." in path or (".mlp." not in path and not sequence)
            assert (kept == other[path]) is alike, path
            # A recomputation, and a step from the same state, repeat the masks.
            assert all(each == kept[0] for each in kept), path
            assert kept[0] == first[1][0][0][path][0], path
    counts = [{len(kept) for path, kept in found.items() if "." in path[len("blocks.0.") :]} for found, _ in first[1]]
    # The last dropout of a block needs no recomputation.
    assert counts == [{1}, {1}, {2}, {2}]


def test_a_model_has_dropout_by_a_module_or_by_a_number():
    assert has_dropout(nn.Sequential(nn.Dropout(0.1)))
    assert not has_dropout(nn.Sequential(nn.Dropout(0.0), nn.Linear(1, 1)))
    model = nn.Linear(1, 1)
    model.attention_dropout = 0.0
    assert not has_dropout(model)
    model.attention_dropout = 0.2
    assert has_dropout(model)
