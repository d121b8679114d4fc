"""Ranks and axes: a pure map between a global rank and its coordinate. Creates no process group.

Pipeline is the outermost axis and tensor the innermost, so that the ranks of one tensor group are neighbours on a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from infinity.config.resolve import ResolvedConfig


class Coordinate(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    dp: int
    tp: int


@dataclass(frozen=True, slots=True)
class Topology:
    """Sizes of the parallel axes; `world_size` is their product. `local_size` is the number of ranks on one node."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    local_size: int = 1

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "local_size"):
            if getattr(self, axis) < 1:
                raise ValueError(f"the {axis} axis has size {getattr(self, axis)}; it must be at least 1")

    @property
    def world_size(self) -> int:
        return self.dp * self.pp * self.tp

    @classmethod
    def of(cls, config: ResolvedConfig) -> Topology:
        """The axes that a resolved configuration divides its ranks into."""
        return cls(dp=config.data, pp=config.pipeline, tp=config.tensor, local_size=config.local_size)

    def in_words(self) -> str:
        """The ranks, and where there is more than the data axis how they are divided: "8 ranks (data 2 x tensor 4)"."""
        axes = {"pipeline": self.pp, "data": self.dp, "tensor": self.tp}
        along = f" ({' x '.join(f'{name} {size}' for name, size in axes.items() if size > 1)})"
        ranks = f"{self.world_size} rank{'s' if self.world_size > 1 else ''}"
        return ranks + (along if self.world_size > self.dp else "")

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of global `rank`; raises ValueError when the rank is outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside a world of {self.world_size}")
        return Coordinate(pp=rank // (self.dp * self.tp), dp=rank // self.tp % self.dp, tp=rank % self.tp)

    def rank(self, coordinate: Coordinate) -> int:
        """The global rank at `coordinate`: the inverse of `coordinate()`."""
        return (coordinate.pp * self.dp + coordinate.dp) * self.tp + coordinate.tp

    def axis_members(self, rank: int, axis: str) -> tuple[int, ...]:
        """Global ranks that differ from `rank` on `axis` only, in the axis' order."""
        here = self.coordinate(rank)
        return tuple(self.rank(here._replace(**{axis: index})) for index in range(getattr(self, axis)))

    def axis_groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The members of every group along `axis`, in the order of their first ranks: each rank is in one."""
        return tuple(dict.fromkeys(self.axis_members(rank, axis) for rank in range(self.world_size)))
