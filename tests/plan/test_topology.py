"""Ranks and coordinates are two names of one thing."""

from __future__ import annotations

import pytest

from infinity.plan.types import Coordinate, Topology

SHAPES = [(1, 1, 1), (4, 1, 1), (1, 3, 1), (2, 3, 4), (3, 2, 1)]


@pytest.mark.parametrize(("dp", "pp", "tp"), SHAPES)
def test_rank_and_coordinate_are_inverse(dp, pp, tp):
    topology = Topology(dp=dp, pp=pp, tp=tp)
    coordinates = [topology.coordinate(rank) for rank in range(topology.world_size)]
    assert topology.world_size == dp * pp * tp == len(set(coordinates))
    assert [topology.rank(coordinate) for coordinate in coordinates] == list(range(topology.world_size))
    # Pipeline outermost, tensor innermost.
    assert coordinates == sorted(coordinates)


@pytest.mark.parametrize(("dp", "pp", "tp"), SHAPES)
@pytest.mark.parametrize("axis", ["dp", "pp", "tp"])
def test_members_of_an_axis_partition_the_world(dp, pp, tp, axis):
    topology = Topology(dp=dp, pp=pp, tp=tp)
    groups = topology.axis_groups(axis)
    assert all(topology.axis_members(rank, axis) in groups for rank in range(topology.world_size))
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    for group in groups:
        assert [getattr(topology.coordinate(rank), axis) for rank in group] == list(range(getattr(topology, axis)))


def test_tensor_ranks_are_neighbours():
    assert Topology(dp=2, tp=2).axis_members(2, "tp") == (2, 3)
    assert Topology(dp=2, tp=2).axis_members(2, "dp") == (0, 2)
    assert Topology(pp=2, dp=2, tp=2).coordinate(5) == Coordinate(pp=1, dp=0, tp=1)


def test_what_is_outside_is_refused():
    with pytest.raises(ValueError, match="rank 2 is outside a world of 2"):
        Topology(dp=2).coordinate(2)
    with pytest.raises(ValueError, match="dp axis has size 0"):
        Topology(dp=0)
