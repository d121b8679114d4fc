"""The sources of a save's bytes: partitions under read leases in the foreground, a snapshot beside the program.

Both lend one partition after the other in an order of their own, and bound how many may still be on their way to the
drive while the next one is taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor

from infinity.memory.access_control import Snapshot
from infinity.memory.pages import page_aligned
from infinity.memory.store import TieredStore
from infinity.ops.transfer import Transfer
from infinity.plan.plan import Plan
from infinity.plan.stepping import changed_by
from infinity.plan.types import Key

# Partitions whose writes are in flight, besides the one that is being submitted, and those fetched ahead from NVMe.
_BEHIND = 2
_AHEAD = 2
# A partition on NVMe is read whole up to this size, so that the tier verifies its checksum; a larger one in blocks, so
# that memory is bounded. There is one such buffer more than partitions in flight.
_WHOLE_NBYTES_MAX = 64 << 20
# A longer rest would stall a save for nothing after one slow partition.
_REST_SECONDS_MAX = 1.0

# Blocks until at most so many partitions are in flight.
LetGo = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Lent:
    """One partition: its `buffer` ([n] uint8) or, where that is None, `fetch`, which submits a read from a byte on into
    the caller's memory.
    """

    buffer: Tensor | None
    fetch: Callable[[int, Tensor], Transfer]


class PartitionSource(Protocol):
    """Lends partitions to a save."""

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """Yield all of `keys`, each when it should be lent."""

    def lend(self, key: Key, *, last: bool = True) -> AbstractContextManager[Lent]:
        """Lend one partition for the length of a block. last: it is not lent again."""

    def skip(self, keys: Sequence[Key]) -> None:
        """Note that these are not lent any more."""


class LiveSource:
    """The partitions themselves, while the program waits: a save in the foreground."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """See `PartitionSource`: in the given order, with the next ones fetched ahead."""
        for at, key in enumerate(keys):
            self._store.prefetch(*keys[at : at + 1 + _AHEAD])
            # A lease may need the room of the ones before it.
            let_go(_BEHIND if self._store.in_memory(key) else 0)
            yield key

    @contextmanager
    def lend(self, key: Key, *, last: bool = True) -> Iterator[Lent]:
        """See `PartitionSource`."""
        with self._store.read(key) as (partition,):
            yield Lent(partition.buffer, partial(self._store.read_extent, key))

    def skip(self, keys: Sequence[Key]) -> None:
        """See `PartitionSource`."""


class SnapshotSource:
    """The partitions of a snapshot that was taken: a save beside the program.

    share: the part of the time in which bytes are moved while no thread waits for the save.
    """

    def __init__(self, store: TieredStore, snapshot: Snapshot, *, share: float) -> None:
        self._store = store
        self._snapshot = snapshot
        self._share = share
        # Unused buffers for partitions that are read whole.
        self._rooms: list[Tensor] = []

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """See `PartitionSource`: what the program waits for goes first."""
        rest = 0.0
        while (key := self._store.access.next_to_save(self._snapshot, rest)) is not None:
            began = time.monotonic()
            # Holds nothing while this thread waits for a step, or another thread waits for a held partition.
            alone = self._share < 1 or self._store.access.hurried(self._snapshot)
            let_go(0 if alone or not self._store.access.settled(self._snapshot, key) else _BEHIND)
            yield key
            if self._share < 1:
                let_go(0)
                rest = min((time.monotonic() - began) * (1 / self._share - 1), _REST_SECONDS_MAX)

    @contextmanager
    def lend(self, key: Key, *, last: bool = True) -> Iterator[Lent]:
        """See `PartitionSource`."""
        with self._store.saving(self._snapshot, key, last=last) as partition:
            nbytes = self._store[key].spec.nbytes
            if partition is not None:
                yield self._lent(key, partition.buffer)
            elif nbytes > _WHOLE_NBYTES_MAX:
                yield self._lent(key, None)
            else:
                room = self._rooms.pop() if self._rooms else page_aligned(nbytes)
                if room.numel() < nbytes:
                    room = page_aligned(nbytes)
                self._store.read_extent(key, 0, room[:nbytes]).wait()
                yield self._lent(key, room[:nbytes])
                self._rooms.append(room)

    def _lent(self, key: Key, buffer: Tensor | None) -> Lent:
        return Lent(buffer, partial(self._store.read_extent, key))

    def skip(self, keys: Sequence[Key]) -> None:
        """See `PartitionSource`."""
        self._store.access.skip_saving(self._snapshot, keys)


def snapshot_of(plan: Plan, keys: Sequence[Key], *, in_backward: bool) -> Snapshot:
    """Return a snapshot of partitions in the order in which the next step changes them; unchanged ones come last.

    in_backward: the step begins in backward, at the model's output.
    """
    order = [plan.sub_groups[index] for index in plan.step_order]
    changed = [key for group in (reversed(order) if in_backward else order) for key in changed_by(group)]
    wanted = set(keys)
    return Snapshot([*(key for key in changed if key in wanted), *keys])
