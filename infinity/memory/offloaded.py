"""Partitions that have left their home for a while: their bytes lie in CPU memory or in a swap file of their own.

Such a partition is ABSENT to its state machine. The store brings it back when a lease of it begins, so no value is ever
missing. A move is a copy, after which the source is given up: an error in between leaves the value where it was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from infinity.memory.ledger import Ledger
from infinity.memory.pages import page_aligned
from infinity.memory.partition import Partition
from infinity.memory.tiers.base import MemoryBackend, TierBackend
from infinity.ops.transfer import Transfer
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, Key, Kind, Tier, align_up

# Bytes moved to or from a drive at a time, and how many such parts are in flight.
_PART_NBYTES = 8 << 20
_PARTS_MAX = 4


class Refuge(Protocol):
    """Where partitions go."""

    # The tier that the ledger books them on.
    tier: Tier

    def put(self, key: Key, source: Tensor) -> None:
        """Keep a copy of `source` (uint8, flat)."""

    def get(self, key: Key, target: Tensor) -> None:
        """Copy what `put` has kept into `target`; it stays until `forget`."""

    def forget(self, key: Key) -> None:
        """Give up what `put` has kept."""

    def close(self) -> None:
        """Give up everything."""


class MemoryRefuge:
    """A buffer in CPU memory for each partition. settle: waits for copies that the device still makes."""

    tier = Tier.CPU

    def __init__(self, memory: MemoryBackend, settle: Callable[[], None]) -> None:
        self._memory = memory
        self._settle = settle
        self._buffers: dict[Key, Tensor] = {}

    def put(self, key: Key, source: Tensor) -> None:
        """See `Refuge`."""
        buffer = self._memory.allocate(source.numel())
        buffer.copy_(source)
        self._settle()
        self._buffers[key] = buffer

    def get(self, key: Key, target: Tensor) -> None:
        """See `Refuge`."""
        target.copy_(self._buffers[key])
        self._settle()

    def forget(self, key: Key) -> None:
        """See `Refuge`."""
        self._memory.release(self._buffers.pop(key))

    def close(self) -> None:
        """See `Refuge`."""
        self._buffers.clear()
        self._memory.close()


class DriveRefuge:
    """A swap file that is removed with its last partition. open_file: reserves bytes on the drive; called at once."""

    tier = Tier.NVME

    def __init__(self, open_file: Callable[[int], TierBackend], sizes: dict[Key, int]) -> None:
        self._offsets: dict[Key, int] = {}
        # Those that are in the file: an error may leave others out.
        self._held: set[Key] = set()
        end = 0
        for key, nbytes in sizes.items():
            self._offsets[key] = end
            end += align_up(nbytes, EXTENT_ALIGNMENT)
        self._file: TierBackend | None = open_file(end)

    def put(self, key: Key, source: Tensor) -> None:
        """See `Refuge`. Through memory of a few parts, from where direct I/O writes."""
        assert self._file is not None
        offset, writing = self._offsets[key], deque[tuple[Transfer, Tensor]]()
        try:
            for begin in range(0, source.numel(), _PART_NBYTES):
                part = source[begin : begin + _PART_NBYTES]
                room = _room(writing)
                room[: part.numel()].copy_(part)
                nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
                writing.append((self._file.write(Extent(offset + begin, nbytes), room[:nbytes]), room))
        finally:
            while writing:
                writing.popleft()[0].wait()
        self._held.add(key)

    def get(self, key: Key, target: Tensor) -> None:
        """See `Refuge`."""
        assert self._file is not None
        offset, reading = self._offsets[key], deque[tuple[Transfer, Tensor, Tensor]]()
        rooms: list[Tensor] = []

        def arrive() -> None:
            transfer, room, part = reading.popleft()
            transfer.wait()
            part.copy_(room[: part.numel()])
            rooms.append(room)

        for begin in range(0, target.numel(), _PART_NBYTES):
            if len(reading) == _PARTS_MAX:
                arrive()
            part = target[begin : begin + _PART_NBYTES]
            room = rooms.pop() if rooms else page_aligned(_PART_NBYTES)
            nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
            reading.append((self._file.read(Extent(offset + begin, nbytes), room[:nbytes]), room, part))
        while reading:
            arrive()

    def forget(self, key: Key) -> None:
        """See `Refuge`."""
        self._held.remove(key)
        if not self._held:
            self.close()

    def close(self) -> None:
        """See `Refuge`."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _room(writing: deque[tuple[Transfer, Tensor]]) -> Tensor:
    if len(writing) < _PARTS_MAX:
        return page_aligned(_PART_NBYTES)
    transfer, room = writing.popleft()
    transfer.wait()
    return room


class Offloaded:
    """The partitions that are elsewhere, and where. Called with the store's lock held."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._places: dict[Key, tuple[Refuge, dict[Kind, int]]] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._places

    def keys(self) -> list[Key]:
        """The keys of what is elsewhere."""
        return [*self._places]

    def keep(self, partition: Partition, refuge: Refuge) -> None:
        """Copy a partition's value to a refuge; the caller gives its buffer up then."""
        assert partition.buffer is not None
        kinds = dict[Kind, int]()
        for section in partition.spec.sections:
            kinds[section.kind] = kinds.get(section.kind, 0) + section.nbytes
        with self._ledger.taking(refuge.tier, kinds, f"{partition.key}, offloaded"):
            refuge.put(partition.key, partition.buffer)
        self._places[partition.key] = refuge, kinds

    def restore(self, key: Key, buffer: Tensor) -> None:
        """Bring a value back into its partition's new buffer."""
        self._places[key][0].get(key, buffer)
        self.forget(key)

    def forget(self, key: Key) -> None:
        """Give up a value that is elsewhere."""
        refuge, kinds = self._places.pop(key)
        self._unbook(refuge, kinds)
        refuge.forget(key)

    def booked(self) -> dict[tuple[Tier, Kind], int]:
        """What the ledger has of it."""
        sums: dict[tuple[Tier, Kind], int] = {}
        for refuge, kinds in self._places.values():
            for kind, nbytes in kinds.items():
                sums[refuge.tier, kind] = sums.get((refuge.tier, kind), 0) + nbytes
        return sums

    def close(self) -> None:
        """Give up everything."""
        for refuge, kinds in self._places.values():
            self._unbook(refuge, kinds)
        for refuge in {id(refuge): refuge for refuge, _ in self._places.values()}.values():
            refuge.close()
        self._places.clear()

    def _unbook(self, refuge: Refuge, kinds: dict[Kind, int]) -> None:
        for kind, nbytes in kinds.items():
            self._ledger.add(refuge.tier, kind, -nbytes)
