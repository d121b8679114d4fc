"""The process groups of all ranks by number, so that a rank can tell who waits for whom in a group of others.

Messages between neighbours on the pipeline axis are counted by directed link: a rank takes part in four at most.
"""

from __future__ import annotations

from dataclasses import dataclass

from infinity.plan.pipeline import MessageLink
from infinity.plan.topology import Topology

# The axis of a channel that every rank is in, of one for the ranks that share a place on the pipeline axis, and of one
# for the first and the last rank along it.
WORLD, STAGE, ENDS = "world", "stage", "ends"


@dataclass(frozen=True, slots=True)
class Channels:
    """A channel is a number that every rank has for one of its process groups, or for a link between two of them.

    axes: by channel, the axis of the topology (`dp`, `tp`, `pp`) along which its groups lie, `WORLD`, `STAGE` or
    `ENDS`; or a link, whose group is its sender and its receiver. Ranks that differ on another axis have another
    group of the same channel, whose collectives, or messages, are numbered apart.
    """

    topology: Topology
    axes: tuple[str | MessageLink, ...] = (WORLD,)

    def members(self, rank: int, channel: int) -> tuple[int, ...]:
        """Return the global ranks of the group that `rank` has in a channel; none if it is not on that link."""
        axis, topology = self.axes[channel], self.topology
        if isinstance(axis, MessageLink):
            here = topology.coordinate(rank)
            ends = axis.sender, axis.receiver
            return tuple(topology.rank(here._replace(pp=end)) for end in ends) if here.pp in ends else ()
        if axis == ENDS:
            along = topology.axis_members(rank, "pp")
            return (along[0], along[-1]) if rank in (along[0], along[-1]) else ()
        if axis == STAGE:
            size = topology.dp * topology.tp
            return tuple(range(rank // size * size, (rank // size + 1) * size))
        return tuple(range(topology.world_size)) if axis == WORLD else topology.axis_members(rank, axis)

    def groups(self, channel: int) -> tuple[tuple[int, ...], ...]:
        """Return the members of each group of a channel."""
        axis = self.axes[channel]
        if axis in ("pp", "dp", "tp"):
            return self.topology.axis_groups(str(axis))
        ranks = (0,) if axis == WORLD else range(self.topology.world_size)
        return tuple(filter(None, dict.fromkeys(self.members(rank, channel) for rank in ranks)))

    @property
    def has_links(self) -> bool:
        """Whether ranks lie along a pipeline."""
        return any(isinstance(axis, MessageLink) for axis in self.axes)

    def of_link(self, link: MessageLink) -> int:
        """Return the channel of a link between two indices of the pipeline axis."""
        return self.axes.index(link)

    def place(self, rank: int) -> str:
        """Return a rank's number, with its place on each axis where ranks have several."""
        axes = [axis for axis in ("pp", "dp", "tp") if getattr(self.topology, axis) > 1]
        if len(axes) < 2:
            return str(rank)
        here = self.topology.coordinate(rank)
        return f"{rank} ({', '.join(f'{axis} {getattr(here, axis)}' for axis in axes)})"
