"""The order in which buffers are given up when their arena is full. Every method takes constant time.

The store's eviction (`infinity.memory.eviction`) and the arenas of the simulator go by this one class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class EvictionOrder(Generic[Item]):
    """Items in `ranks` ranks. A lower rank goes first; within a rank, the item that was used or moved there first."""

    def __init__(self, ranks: int = 1) -> None:
        self._queues: tuple[dict[Item, None], ...] = tuple({} for _ in range(ranks))
        self._ranks: dict[Item, int] = {}

    def __contains__(self, item: Item) -> bool:
        return item in self._ranks

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Item]:
        return (item for queue in self._queues for item in queue)

    def use(self, item: Item, rank: int = 0) -> None:
        """Make an item the last of a rank."""
        self.remove(item)
        self._ranks[item] = rank
        self._queues[rank][item] = None

    def move(self, item: Item, rank: int) -> None:
        """Make an item the last of a rank, unless it stands there already."""
        if self._ranks.get(item) != rank:
            self.use(item, rank)

    def remove(self, item: Item) -> None:
        """Take an item out, if it is there."""
        rank = self._ranks.pop(item, None)
        if rank is not None:
            del self._queues[rank][item]

    def rank(self, item: Item) -> int | None:
        """The rank of an item; None where it is not there."""
        return self._ranks.get(item)

    def queue(self, rank: int) -> Iterator[Item]:
        """The items of one rank in the order in which they go."""
        return iter(self._queues[rank])
