"""One pass over sub-groups: step those that are ready, fetch the next, flush what no later sub-group needs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

from infinity.memory.access_control import Reservation
from infinity.memory.store import TieredStore
from infinity.optim.step_context import StepContext
from infinity.optim.sub_group_update import SubGroupUpdater, touched_by
from infinity.plan.layout import SubGroup
from infinity.plan.ready_queue import ReadyQueue
from infinity.plan.stepping import STEP_READS, changed_by
from infinity.plan.types import Key


def prefetch(store: TieredStore, by: Reservation | None, group: SubGroup) -> bool:
    """Begin to read what a sub-group's step changes; False if there is no room."""
    return store.prefetch(*changed_by(group), by=by)


def in_memory(store: TieredStore, group: SubGroup) -> bool:
    """Whether a sub-group with states on NVMe can be stepped without a read.

    Only then is it worth stepping first: a parameter that is fetched for a few of its sub-groups would be written back
    for others, and fetched again for the rest.
    """
    keys = changed_by(group)
    return store[keys[0]].on_drive and all(map(store.in_memory, keys))


class StepPass:
    """The sub-groups of one step, from ready to flushed.

    order: every sub-group of the pass, those that are needed first in front.
    reservation: holds the partitions of a pass behind the program; None if the pass runs in the program's own thread.
    """

    def __init__(
        self, order: Sequence[SubGroup], store: TieredStore, updater: SubGroupUpdater, reservation: Reservation | None
    ) -> None:
        self.reservation = reservation
        # Indices of the sub-groups that were made ready.
        self.begun: set[int] = set()
        self._store = store
        self._updater = updater
        # How many sub-groups are still to use each partition.
        self._uses = Counter(touched_by(order))
        self._ready: ReadyQueue[StepContext] = ReadyQueue(
            order, fetch=partial(prefetch, store, reservation), in_memory=partial(in_memory, store)
        )

    def reserve(self, groups: Sequence[SubGroup]) -> None:
        """Hold the partitions of these sub-groups until they are stepped."""
        assert self.reservation is not None
        self._store.access.reserve(self.reservation, *touched_by(groups))

    def add(self, groups: Sequence[SubGroup], context: StepContext) -> None:
        """Make these sub-groups ready."""
        self.begun.update(group.index for group in groups)
        self._ready.add(groups, context)

    def fetch_next(self) -> None:
        """Begin to fetch the sub-group that is next."""
        self._ready.fetch(1)

    def run(self, count: int, stopping: threading.Event) -> None:
        """Step `count` ready sub-groups, one after the other; end early if `stopping` is set or the store refuses."""
        for _ in range(count):
            if stopping.is_set():
                return
            if self.reservation is not None and not self._store.access.begin_work(self.reservation):
                return
            done: list[Key] = []
            try:
                group, context = self._ready.take()
                self._ready.fetch(STEP_READS)
                keys = touched_by([group])
                self._uses.subtract(keys)
                self._updater.update(group, context, self.reservation)
                last = [key for key in keys if self._uses[key] <= 0]
                self._store.flush(*last)
                done = last
            finally:
                if self.reservation is not None:
                    self._store.access.end_work(self.reservation, *done)
