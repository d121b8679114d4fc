"""A rank's place among the ranks along one axis: what code that sends nothing itself needs to know of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class AxisPlace:
    """This rank's place among the ranks along one axis.

    axis: "world" (every rank), "data" (ranks that share the partitions of a unit), "sequence" (those of them that share
        each sequence), "tensor" (ranks that share its layers), "pipeline" (ranks that run the stages of one model) or
        "stage" (ranks that run the same stages).
    index: 0 <= index < size; the source of a broadcast is such a place, too.
    process_group: torch's, over these ranks; None if this rank is alone on the axis or the group is closed.
    members: their global ranks by index; default: all ranks.
    """

    axis: str
    index: int = 0
    size: int = 1
    process_group: Any = None
    members: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.members = self.members or tuple(range(self.size))
