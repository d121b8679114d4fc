"""Which sub-group a step that goes on behind the program steps next.

First what is in memory or on its way there: it takes room until it is stepped. Then what the next forward needs first:
gradients arrive in the opposite order, and the program, should it have to wait, waits for those that arrived last.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import Generic, TypeVar

from infinity.plan.layout import SubGroup

With = TypeVar("With")


class Turns(Generic[With]):
    """Sub-groups that are ready to be stepped, each with something of its step.

    order: all that may be, those that are needed first in front. fetch: asks for one to be brought into memory, or to
    stay there; False where there is no room. in_memory: whether one is there, or on its way. The program adds while
    another thread takes.
    """

    def __init__(
        self, order: Iterable[SubGroup], *, fetch: Callable[[SubGroup], bool], in_memory: Callable[[SubGroup], bool]
    ) -> None:
        self._rank = {group.index: rank for rank, group in enumerate(order)}
        self._fetch = fetch
        self._in_memory = in_memory
        self._soon: deque[tuple[SubGroup, With]] = deque()
        # A heap by rank, which is of one sub-group alone.
        self._later: list[tuple[int, tuple[SubGroup, With]]] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._soon) + len(self._later)

    def add(self, groups: Sequence[SubGroup], what: With) -> None:
        """These are ready."""
        with self._lock:
            for group in groups:
                if self._in_memory(group):
                    self._soon.append((group, what))
                else:
                    heappush(self._later, (self._rank[group.index], (group, what)))

    def fetch(self, count: int) -> None:
        """Have `count` in memory or on their way."""
        with self._lock:
            for group, _ in islice(self._soon, count):
                if not self._fetch(group):
                    return
            while self._later and len(self._soon) < count and self._fetch(self._later[0][1][0]):
                self._soon.append(heappop(self._later)[1])

    def take(self) -> tuple[SubGroup, With]:
        """The next one. As often as one was added."""
        with self._lock:
            return self._soon.popleft() if self._soon else heappop(self._later)[1]
