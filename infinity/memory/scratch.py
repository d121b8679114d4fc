"""Bytes that no plan names: what activations, idle states and a model that is being built need for a while.

`GrowablePool` grows during the first step and is then reused, for bytes that depend on the batch. A block is a buffer
in CPU memory, or a file of its own. When no block has room, another is added. Once all pieces have been returned and
more was needed than ever before, one block of that size replaces all others. The ledger books pieces that are out as
activations, and reserved bytes that are not out as a pool.

A refuge has partitions that have left their home for a while: their bytes lie in CPU memory or in a swap file. Such a
partition is ABSENT to its state machine. The store brings it back when a lease of it begins, so no value is ever
missing. A move is a copy, after which the source is given up: an error in between leaves the value where it was.

`SwapFiles` take one rank's values while a model is being built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.memory.arena import Arena, piece_nbytes
from infinity.memory.drives import free_nvme_nbytes
from infinity.memory.ledger import Ledger
from infinity.memory.partition import Partition
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.base import Folders, MemoryBackend, QueueOptions, TierBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.memory.tiers.registry import backend_of
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, Key, Kind, Tier, align_up


@dataclass(slots=True, eq=False)
class PoolBlock:
    """A range of bytes and the pieces of it that are out. file: where the bytes lie; the arena then has no memory."""

    arena: Arena
    file: TierBackend | None = None


@dataclass(slots=True, eq=False)
class PoolBuffer:
    """Bytes of one block. In CPU memory `memory` is uint8, [nbytes], on a page; of a file it is only the place."""

    block: PoolBlock
    memory: Tensor

    @property
    def nbytes(self) -> int:
        """What it takes of its slab."""
        return piece_nbytes(self.memory.numel())

    @property
    def offset(self) -> int:
        """Where it begins in its slab, in bytes."""
        return int(self.memory.storage_offset())


class GrowablePool(ABC):
    """Hands out pieces and takes them back. holds_values: values live in the pieces and do not only pass through."""

    def __init__(
        self, tier: Tier, *, ledger: Ledger, holds_values: bool, owner: str, least_nbytes: int = 0
    ) -> None:
        self._tier = tier
        self._ledger = ledger
        self._kind = Kind.ACTIVATION if holds_values else Kind.POOL
        self._owner = owner
        self._least_nbytes = least_nbytes
        self._blocks: list[PoolBlock] = []
        # The most that was out, and how much of it one slab already holds.
        self._most_nbytes = 0
        self._merged_nbytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return sum(slab.arena.nbytes for slab in self._blocks)

    @property
    def taken_nbytes(self) -> int:
        """Bytes of the pieces that are out."""
        return sum(slab.arena.taken_nbytes for slab in self._blocks)

    @property
    def largest_nbytes(self) -> int:
        """Bytes of the largest slab."""
        return max((slab.arena.nbytes for slab in self._blocks), default=0)

    def take(self, nbytes: int) -> PoolBuffer | None:
        """A piece of `nbytes` bytes, or None where no slab has room."""
        for slab in self._blocks:
            memory = slab.arena.take(nbytes)
            if memory is not None:
                piece = PoolBuffer(slab, memory)
                self._move(piece.nbytes)
                self._most_nbytes = max(self._most_nbytes, self.taken_nbytes)
                return piece
        return None

    def grow(self, nbytes: int) -> None:
        """Reserve a slab of at least `nbytes` more. TierMemoryError beyond the tier's limit, TransferError where the
        drive has no room.
        """
        size = max(piece_nbytes(nbytes), self._least_nbytes)
        with self._ledger.taking(self._tier, {Kind.POOL: size}, self._owner):
            self._blocks.append(self._reserve(size))

    @abstractmethod
    def _reserve(self, nbytes: int) -> PoolBlock:
        """Take `nbytes` bytes of the system."""

    def give(self, piece: PoolBuffer) -> None:
        """Return a piece."""
        if piece.block in self._blocks:
            self._move(-piece.nbytes)
            piece.block.arena.give(piece.memory)

    def settle(self) -> None:
        """Where everything has been returned: one slab of the size that was needed, instead of several."""
        if len(self._blocks) < 2 or self._most_nbytes <= self._merged_nbytes or self.taken_nbytes:
            return
        self._merged_nbytes = self._most_nbytes
        self.close()
        self.grow(self._merged_nbytes)

    def close(self) -> None:
        """Give everything back. Raises the first failure of a file that nobody has seen."""
        slabs, self._blocks = self._blocks, []
        failure: BaseException | None = None
        for slab in slabs:
            taken = slab.arena.taken_nbytes
            self._ledger.add(self._tier, self._kind, -taken)
            self._ledger.add(self._tier, Kind.POOL, taken - slab.arena.nbytes)
            slab.arena.close()
            try:
                if slab.file is not None:
                    slab.file.close()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def _move(self, nbytes: int) -> None:
        """Book what goes out of the pool, or comes back."""
        if self._kind is not Kind.POOL:
            for kind, amount in ((Kind.POOL, -nbytes), (self._kind, nbytes)):
                self._ledger.add(self._tier, kind, amount)


class HostPool(GrowablePool):
    """Slabs in CPU memory, pinned where `host` pins."""

    def __init__(self, host: HostMemory, *, ledger: Ledger, holds_values: bool) -> None:
        owner = "activation checkpoints" if holds_values else "staging of checkpoints"
        super().__init__(Tier.CPU, ledger=ledger, holds_values=holds_values, owner=owner)
        self._host = host

    def _reserve(self, nbytes: int) -> PoolBlock:
        return PoolBlock(_HostArena("checkpoints", self._host, nbytes))


@dataclass(frozen=True)
class SwapFolders:
    """Where one rank makes its swap files on a tier: a folder on each of its drives."""

    tier: Tier
    paths: Folders
    rank: int
    options: QueueOptions

    def open(self, nbytes: int) -> TierBackend:
        """Make a swap file of `nbytes` bytes. TransferError or CapacityError where the drive has no room."""
        return backend_of(self.tier).open(self.paths, nbytes=nbytes, rank=self.rank, options=self.options)


# The least size of a file: the first ones of a first step would be many and small.
FILE_NBYTES = 64 << 20


class FilePool(GrowablePool):
    """Slabs that are swap files."""

    def __init__(self, folders: SwapFolders, *, ledger: Ledger) -> None:
        super().__init__(
            folders.tier, ledger=ledger, holds_values=True, owner="activation checkpoints", least_nbytes=FILE_NBYTES
        )
        self._folders = folders

    def _reserve(self, nbytes: int) -> PoolBlock:
        file = self._folders.open(nbytes)
        # An arena of places: nothing is ever read or written in a tensor without memory.
        return PoolBlock(Arena("checkpoints", torch.empty(nbytes, dtype=torch.uint8, device="meta")), file)


class _HostArena(Arena):
    """An arena whose buffer is unpinned when it is closed."""

    def __init__(self, name: str, host: HostMemory, nbytes: int) -> None:
        super().__init__(name, host.allocate(nbytes))
        self._host = host

    def close(self) -> None:
        self._host.release(self.buffer)
        super().close()


# Bytes moved to or from a drive at a time, and how many such parts are in flight.
PART_NBYTES = 8 << 20
_OFFLOADED_PARTS_MAX = 4


class PartWriter:
    """Writes bytes to swap files in parts, from memory that direct I/O accepts. parts_max: parts in flight."""

    def __init__(self, parts_max: int) -> None:
        self._parts_max = parts_max
        # Parts on their way to the drive, with the memory that they lie in, and memory for others.
        self._writing: deque[tuple[Transfer, Tensor]] = deque()
        self._rooms: list[Tensor] = []

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of memory for parts on their way to the drive."""
        return (len(self._writing) + len(self._rooms)) * PART_NBYTES

    def submit(self, file: TierBackend, offset: int, values: Tensor) -> None:
        """Submit the writes of `values` (uint8, flat), which may change as soon as this returns."""
        for begin in range(0, values.numel(), PART_NBYTES):
            part = values[begin : begin + PART_NBYTES]
            if self._rooms:
                room = self._rooms.pop()
            elif len(self._writing) < self._parts_max:
                room = page_aligned(PART_NBYTES)
            else:
                # That of the oldest part in flight, once it is written.
                transfer, room = self._writing.popleft()
                transfer.wait()
            room[: part.numel()].copy_(part)
            nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
            self._writing.append((file.write(Extent(offset + begin, nbytes), room[:nbytes]), room))

    def drain(self) -> None:
        """Wait until every part is on the drive."""
        while self._writing:
            transfer, room = self._writing.popleft()
            transfer.wait()
            self._rooms.append(room)

    def settle(self) -> None:
        """Wait likewise, and free the memory of the parts."""
        self.drain()
        self._rooms.clear()


class MemoryRefuge:
    """A buffer in CPU memory for each partition."""

    tier = Tier.CPU

    def __init__(self, memory: MemoryBackend, device: Device) -> None:
        self._memory = memory
        self._device = device
        self._buffers: dict[Key, Tensor] = {}

    def put(self, key: Key, source: Tensor) -> None:
        """Keep a copy of `source` (uint8, flat)."""
        buffer = self._memory.allocate(source.numel())
        buffer.copy_(source)
        self._device.synchronize()
        self._buffers[key] = buffer

    def get(self, key: Key, target: Tensor) -> None:
        """Copy what `put` has kept into `target`; it stays until `forget`."""
        target.copy_(self._buffers[key])
        self._device.synchronize()

    def forget(self, key: Key) -> None:
        """Give up what `put` has kept."""
        self._memory.release(self._buffers.pop(key))

    def close(self) -> None:
        """Give up everything."""
        self._buffers.clear()
        self._memory.close()


class DriveRefuge:
    """A swap file that is removed with its last partition."""

    tier = Tier.NVME

    def __init__(self, folders: SwapFolders, sizes: dict[Key, int]) -> None:
        self._offsets: dict[Key, int] = {}
        # Those that are in the file: an error may leave others out.
        self._held: set[Key] = set()
        end = 0
        for key, nbytes in sizes.items():
            self._offsets[key] = end
            end += align_up(nbytes, EXTENT_ALIGNMENT)
        self._file: TierBackend | None = folders.open(end)

    def put(self, key: Key, source: Tensor) -> None:
        """See `MemoryRefuge`."""
        assert self._file is not None
        writer = PartWriter(_OFFLOADED_PARTS_MAX)
        try:
            writer.submit(self._file, self._offsets[key], source)
        finally:
            writer.drain()
        self._held.add(key)

    def get(self, key: Key, target: Tensor) -> None:
        """See `MemoryRefuge`."""
        assert self._file is not None
        offset, reading = self._offsets[key], deque[tuple[Transfer, Tensor, Tensor]]()
        rooms: list[Tensor] = []

        def arrive() -> None:
            transfer, room, part = reading.popleft()
            transfer.wait()
            part.copy_(room[: part.numel()])
            rooms.append(room)

        for begin in range(0, target.numel(), PART_NBYTES):
            if len(reading) == _OFFLOADED_PARTS_MAX:
                arrive()
            part = target[begin : begin + PART_NBYTES]
            room = rooms.pop() if rooms else page_aligned(PART_NBYTES)
            nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
            reading.append((self._file.read(Extent(offset + begin, nbytes), room[:nbytes]), room, part))
        while reading:
            arrive()

    def forget(self, key: Key) -> None:
        """See `MemoryRefuge`."""
        self._held.remove(key)
        if not self._held:
            self.close()

    def close(self) -> None:
        """See `MemoryRefuge`."""
        if self._file is not None:
            self._file.close()
            self._file = None


Refuge = MemoryRefuge | DriveRefuge


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


# Swap files grow by whole files of so many bytes, or of a share of what is free where that is less.
_FILE_NBYTES, _FREE_SHARE = 1 << 30, 4
_WRITING_MAX = 8


@dataclass(frozen=True, slots=True)
class SwapPlace:
    """Bytes of one swap file."""

    file: TierBackend
    extent: Extent

    def first(self, nbytes: int) -> SwapPlace:
        """Its first bytes."""
        return SwapPlace(self.file, Extent(self.extent.offset, nbytes))

    def read(self, begin: int = 0, end: int | None = None) -> tuple[Tensor, list[Transfer]]:
        """Submit reads of what `SwapFiles.write` wrote, which is on the drive; returns its bytes (uint8, flat) to come.

        begin, end: in bytes, of all; `begin` is where a part does.
        """
        nbytes = (self.extent.nbytes if end is None else align_up(end, EXTENT_ALIGNMENT)) - begin
        buffer, offset = page_aligned(nbytes), self.extent.offset + begin
        # Cut as it was written: of each part the tier knows a checksum.
        parts = [(at, buffer[at : at + PART_NBYTES]) for at in range(0, nbytes, PART_NBYTES)]
        return buffer, [self.file.read(Extent(offset + at, part.numel()), part) for at, part in parts]


class SwapFiles(PartWriter):
    """Swap files of one tier that grow with what is written. Used by one thread."""

    def __init__(self, paths: Sequence[str], *, rank: int, timeout_seconds: float) -> None:
        super().__init__(_WRITING_MAX)
        self._paths = paths
        self._folders = SwapFolders(Tier.NVME, paths, rank, QueueOptions(timeout_seconds=timeout_seconds))
        # Each with the bytes that are taken.
        self._files: list[tuple[TierBackend, int]] = []

    def allocate(self, nbytes: int) -> SwapPlace:
        """Return a place for `nbytes` (a multiple of the alignment) in the newest file, or in a new one."""
        if not self._files or self._files[-1][1] + nbytes > self._files[-1][0].nbytes:
            share = free_nvme_nbytes(self._paths) // _FREE_SHARE // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
            size = max(nbytes, min(_FILE_NBYTES, share))
            self._files.append((self._folders.open(size), 0))
        file, used = self._files[-1]
        self._files[-1] = (file, used + nbytes)
        return SwapPlace(file, Extent(used, nbytes))

    def write(self, place: SwapPlace, values: Tensor) -> None:
        """Submit the writes of the bytes of `values`."""
        self.submit(place.file, place.extent.offset, values.detach().contiguous().view(-1).view(torch.uint8))

    def remove(self, file: TierBackend) -> None:
        """Remove a file in which no values are left."""
        for index, (candidate, _) in enumerate(self._files):
            if candidate is file:
                candidate.close()
                del self._files[index]
                return

    def close(self) -> None:
        """Remove every file; idempotent."""
        # Their queues end what is in flight.
        for file, _ in self._files:
            file.close()
        self._files.clear()
        self._writing.clear()
        self._rooms.clear()
