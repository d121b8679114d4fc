"""A bounded arena: one buffer of a size that the plan fixes, handed out in pieces.

Which partition gives up its buffer when an arena is full. Every method takes constant time.

| rank         | a partition in it                             | its buffer is free                   |
|--------------|-----------------------------------------------|--------------------------------------|
| CLEAN        | has the same value on its drive               | at once                              |
| WRITING      | is being written back                         | when the write completes             |
| DIRTY        | is not written back, or is being filled       | after a write, or when it is filled  |
| AWAITED      | was prefetched, or found present, and not used since | as its state says             |
| KEPT         | stays in memory as long as there is room      | as its state says                    |
| KEPT_AWAITED | both                                          | as its state says                    |

Ranks give up buffers in this order, but a finished write counts as CLEAN: of both the one that was used longest ago
goes first. A rank is a queue, which partitions enter at the end when they are used or change state. The store skips
partitions with claims; those were used last, so that they stand at the end.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from enum import IntEnum

from torch import Tensor

from infinity.memory.partition import Partition, State
from infinity.plan.orders import EvictionOrder
from infinity.plan.types import EXTENT_ALIGNMENT, Key, Kind, align_up


def piece_nbytes(nbytes: int) -> int:
    """What a piece of `nbytes` bytes takes of an arena."""
    return max(align_up(nbytes, EXTENT_ALIGNMENT), EXTENT_ALIGNMENT)


class Arena:
    """First-fit allocation inside one uint8 tensor; pieces are aligned for direct I/O and coalesced when returned."""

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name = name
        self.nbytes = buffer.numel()
        self._buffer: Tensor | None = buffer
        # Free ranges (offset, nbytes), by offset.
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        # Offset -> bytes of the pieces that are out.
        self._taken: dict[int, int] = {}
        # Bytes of the pieces that are out, rounded up as `piece_nbytes` does: asked at each use.
        self.taken_nbytes = 0
        self.most_nbytes = 0

    @property
    def buffer(self) -> Tensor:
        """All of it: uint8, [nbytes]."""
        assert self._buffer is not None, f"the {self.name} pool is closed"
        return self._buffer

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of `nbytes` bytes, or None when no free range is long enough."""
        if self._buffer is None:
            return None
        wanted = piece_nbytes(nbytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                rest = [(offset + wanted, length - wanted)] if length > wanted else []
                self._free[index : index + 1] = rest
                piece = self._buffer[offset : offset + nbytes]
                self._taken[offset] = wanted
                self.taken_nbytes += wanted
                self.most_nbytes = max(self.most_nbytes, self.taken_nbytes)
                return piece
        return None

    def give(self, piece: Tensor) -> None:
        """Return a piece that `take` handed out."""
        if self._buffer is None:
            return
        offset = int(piece.storage_offset() - self._buffer.storage_offset())
        length = self._taken.pop(offset)
        self.taken_nbytes -= length
        first = last = bisect(self._free, (offset, length))
        begin, end = offset, offset + length
        if first and sum(self._free[first - 1]) == begin:
            first -= 1
            begin = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = sum(self._free[last])
            last += 1
        self._free[first:last] = [(begin, end - begin)]

    def close(self) -> None:
        """Drop the reference to the buffer; pieces that are still referenced keep it alive."""
        self._buffer = None


# One for each kind of partition.
ARENAS = tuple(kind.value for kind in (Kind.PARAM, Kind.STATES, Kind.GRAD))


def arena_name(key: Key) -> str:
    """The arena that holds a partition of a drive while it is in memory."""
    return key.kind.value


class Rank(IntEnum):
    """See the table at the top."""

    CLEAN = 0
    WRITING = 1
    DIRTY = 2
    AWAITED = 3
    KEPT = 4
    KEPT_AWAITED = 5


_RANKS = {State.RESIDENT: Rank.CLEAN, State.WRITING: Rank.WRITING}


class Eviction:
    """The partitions whose buffers lie in arenas, in the order of giving them up. The store's lock guards it.

    A partition at home in memory has no buffer in an arena: nothing is recorded of it.
    """

    def __init__(self) -> None:
        self._orders = {name: EvictionOrder[Partition](len(Rank)) for name in ARENAS}
        # The number of each partition's last use.
        self._uses: dict[Key, int] = {}
        self._count = 0
        self._awaited: set[Key] = set()
        self._kept: set[Key] = set()

    def use(self, partition: Partition) -> None:
        """Record a use: the partition is the last of its rank and no longer awaited."""
        if not partition.on_drive:
            return
        self._count += 1
        self._uses[partition.key] = self._count
        self._awaited.discard(partition.key)
        rank = self._rank(partition)
        if rank is None:
            self._order(partition).remove(partition)
        else:
            self._order(partition).use(partition, rank)

    def last_use(self, partition: Partition) -> int:
        """The number of a partition's last use: the lowest was used longest ago."""
        return self._uses.get(partition.key, 0)

    def expect(self, partition: Partition) -> None:
        """Record that the partition will be used soon, if it has a buffer in an arena."""
        if partition in self._order(partition):
            self._awaited.add(partition.key)
            self.update(partition)

    def keep(self, partition: Partition) -> None:
        """Keep a partition in memory, once it is there, as long as there is room."""
        self._kept.add(partition.key)
        self.update(partition)

    def is_kept(self, key: Key) -> bool:
        """Whether `keep` was called for the partition."""
        return key in self._kept

    def update(self, partition: Partition) -> None:
        """Put a partition in the rank of its present state, or take it out where it has no buffer in an arena."""
        if not partition.on_drive:
            return
        rank = self._rank(partition)
        if rank is None:
            self._order(partition).remove(partition)
            self._awaited.discard(partition.key)
        else:
            self._order(partition).move(partition, rank)

    def queue(self, arena: str, rank: Rank) -> Iterator[Partition]:
        """The partitions of one rank in the order in which they go."""
        return self._orders[arena].queue(rank)

    def inside(self, arena: str) -> list[Partition]:
        """All partitions whose buffers lie in an arena, in the order in which they go."""
        return list(self._orders[arena])

    def clear(self) -> None:
        """Let go of all partitions when the store closes."""
        self._orders = {name: EvictionOrder(len(Rank)) for name in self._orders}

    def check(self, partition: Partition) -> None:
        """Verify that a partition stands in the rank of its state."""
        found, due = self._order(partition).rank(partition), self._rank(partition)
        assert found == due, f"{partition.key} is {partition.state} in rank {found}, not {due}"

    def _rank(self, partition: Partition) -> Rank | None:
        """The rank of a partition's present state; None where it has no buffer in an arena."""
        if partition.buffer is None or not partition.arena_nbytes:
            return None
        awaited = partition.key in self._awaited
        if partition.key in self._kept:
            return Rank.KEPT_AWAITED if awaited else Rank.KEPT
        return Rank.AWAITED if awaited else _RANKS.get(partition.state, Rank.DIRTY)

    def _order(self, partition: Partition) -> EvictionOrder[Partition]:
        return self._orders[arena_name(partition.key)]
