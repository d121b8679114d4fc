"""Checksums of partitions, taken as the sub-groups of one step are stepped.

Only of values that nobody but the store's writers can change: states, and parameters of units that are gathered before
use. What the program has before its eyes as a whole it may change in place at any time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from infinity.memory.partition import Partition
from infinity.ops.digest import Digest
from infinity.plan.placement import Placement
from infinity.plan.types import SAVE_BLOCK_NBYTES, Key, Kind


class Digests:
    """Of one step, if any are `wanted`."""

    def __init__(self, placement: Placement, *, wanted: bool) -> None:
        self._placement = placement
        self._wanted = wanted
        # A partition may be stepped by several sub-groups.
        self._under_way: dict[Key, Digest] = {}

    def of(self, partitions: Sequence[Partition]) -> list[Digest]:
        """What takes the checksums of these partitions, whose writers the step has, as they are stepped."""
        found = []
        for key, buffer in ((each.key, each.buffer) for each in partitions if self._wanted):
            hidden = key.kind is Kind.STATES or not self._placement.units[key.index].whole
            if hidden and buffer is not None and buffer.is_cpu:
                digest = self._under_way.setdefault(key, Digest(SAVE_BLOCK_NBYTES))
                digest.buffer = buffer
                found.append(digest)
        return found

    def leave(self, partitions: Sequence[Partition], done: Collection[Key]) -> None:
        """Leave checksums at those of these partitions that are `done`: nothing of them is to be stepped any more."""
        for partition in partitions:
            if partition.key in self._under_way and partition.key in done:
                partition.checksums = self._under_way.pop(partition.key).finish()
