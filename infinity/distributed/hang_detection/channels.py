"""The process groups of all ranks by number, so that a rank can tell who waits for whom in a group of others."""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.topology import Topology

# The axis of a channel that every rank is in.
WORLD = "world"


@dataclass(frozen=True, slots=True)
class Channels:
    """A channel is a number that every rank has for one of its process groups.

    axes: by channel, the axis of the topology (`dp`, `tp`) along which its groups lie, or `WORLD`. Ranks that differ on
    another axis have another group of the same channel, whose collectives are numbered apart.
    """

    topology: Topology
    axes: tuple[str, ...] = (WORLD,)

    def members(self, rank: int, channel: int) -> tuple[int, ...]:
        """Return the global ranks of the group that `rank` has in a channel."""
        axis = self.axes[channel]
        return tuple(range(self.topology.world_size)) if axis == WORLD else self.topology.axis_members(rank, axis)

    def groups(self, channel: int) -> tuple[tuple[int, ...], ...]:
        """Return the members of each group of a channel."""
        axis = self.axes[channel]
        return (self.members(0, channel),) if axis == WORLD else self.topology.axis_groups(axis)

    def place(self, rank: int) -> str:
        """Return a rank's number, with its place on each axis where ranks have several."""
        axes = [axis for axis in ("pp", "dp", "tp") if getattr(self.topology, axis) > 1]
        if len(axes) < 2:
            return str(rank)
        here = self.topology.coordinate(rank)
        return f"{rank} ({', '.join(f'{axis} {getattr(here, axis)}' for axis in axes)})"
