"""Two orders that the engine and the simulator share: which buffer is given up next, and which sub-group is stepped.

`EvictionOrder` says which buffers go when their arena is full; every method takes constant time.

`ReadyQueue` says which sub-group a step that goes on behind the program steps next. First what is in memory or on its
way there: it takes room until it is stepped. Then the rest of a unit that has begun, whose parameters would else be
written in between, and read again. Then what the next forward needs first: gradients arrive in the opposite order, and
the program, should it have to wait, waits for those that arrived last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from infinity.plan.layout import SubGroup

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


With = TypeVar("With")


class ReadyQueue(Generic[With]):
    """Sub-groups that are ready to be stepped, each with something of its step.

    order: all that may be, those that are needed first in front. The program adds while another thread takes.
    """

    def __init__(self, order: Iterable[SubGroup]) -> None:
        self._rank = {group.index: rank for rank, group in enumerate(order)}
        self._soon: deque[tuple[SubGroup, With]] = deque()
        # By rank, which is of one alone; and heaps of those ranks, of all and by unit, with some that are gone.
        self._later: dict[int, tuple[SubGroup, With]] = {}
        self._ranks: list[int] = []
        self._ranks_of: dict[int, list[int]] = {}
        # The latest that left those.
        self._latest: SubGroup | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._soon) + len(self._later)

    def add(self, groups: Sequence[SubGroup], what: With, in_memory: Callable[[SubGroup], bool]) -> None:
        """These are ready. in_memory: whether one is there, or on its way."""
        with self._lock:
            for group in groups:
                if in_memory(group):
                    self._soon.append((group, what))
                    continue
                rank = self._rank[group.index]
                self._later[rank] = group, what
                heappush(self._ranks, rank)
                for piece in group.slices:
                    heappush(self._ranks_of.setdefault(piece.unit, []), rank)

    def fetch(self, count: int, begin: Callable[[SubGroup], bool]) -> None:
        """Have `count` in memory or on their way. begin: asks for one to be brought there, or to stay; False where
        there is no room.
        """
        with self._lock:
            for group, _ in islice(self._soon, count):
                if not begin(group):
                    return
            while self._later and len(self._soon) < count and begin(self._later[self._first()][0]):
                self._soon.append(self._pop())

    def take(self) -> tuple[SubGroup, With]:
        """The next one. As often as one was added."""
        with self._lock:
            return self._soon.popleft() if self._soon else self._pop()

    def _pop(self) -> tuple[SubGroup, With]:
        found = self._later.pop(self._first())
        self._latest = found[0]
        return found

    def _first(self) -> int:
        """The rank of the one that leaves `_later` next."""
        begun = self._latest.slices if self._latest is not None else ()
        for ranks in (*(self._ranks_of.get(piece.unit, []) for piece in begun), self._ranks):
            while ranks and ranks[0] not in self._later:
                heappop(ranks)
            if ranks:
                return ranks[0]
        raise IndexError("no sub-group is ready")
