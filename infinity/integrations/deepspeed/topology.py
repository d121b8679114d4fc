"""`deepspeed.runtime.pipe.topology`: ranks and their places on named axes, the last of which varies fastest.

The axes pipe, data and model in this order are those of an engine's ranks.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

__all__ = ["PipeDataParallelTopology", "PipeModelDataParallelTopology", "ProcessTopology"]


class ProcessTopology:
    """Places of `prod(dims)` ranks on axes of these names and sizes."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes = list(axes)
        self.dims = list(dims)
        self.ProcessCoord = _places_on(axes)
        self._coords = [self.ProcessCoord(*place) for place in product(*map(range, dims))]

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self.dims)

    def get_axis_names(self) -> list[str]:
        """Return the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the size of an axis; 0 where there is no such axis."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a place, given by one number for each axis."""
        return self._coords.index(self.ProcessCoord(**coord_kwargs))

    def get_coord(self, rank: int) -> Any:
        """Return a rank's place, with an attribute for each axis."""
        return self._coords[rank]

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks at these numbers along these axes."""
        return [
            rank
            for rank, coord in enumerate(self._coords)
            if all(getattr(coord, axis) == index for axis, index in filter_kwargs.items())
        ]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at one place along an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along one axis only."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        places = product(*(range(self.get_dim(other)) for other in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]


class PipeDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, and data parallelism within each."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Stages of a pipeline, data parallelism, and tensor parallelism innermost."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _places_on(axes: Sequence[str]) -> Any:
    """Return the class of the places on these axes, which has a field for each."""
    return namedtuple("ProcessCoord", axes)
