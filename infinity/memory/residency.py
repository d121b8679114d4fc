"""How one partition at a time moves between its home and memory, beneath the store, which knows leases and decides.

`Residency` moves; `Buffers` hands out what a value lies in while it is in memory: memory of its own on an addressable
tier, a piece of an arena for a tier of drives, booked in the ledger from `take` to `give`. Whoever calls a method of
either holds the store's lock, which only `settle` gives up, while it waits for a transfer. The lock is one process's: a
forked child that takes it gets an error instead of a deadlock, and no signal keeps it held.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.base import trace
from infinity.base.transfer import Completed, Transfer
from infinity.errors import TierMemoryError, TransferError, of_another_process
from infinity.log import logger
from infinity.memory.arena import Arena, Eviction, arena_name, piece_nbytes
from infinity.memory.ledger import Ledger, PoolUse, mb
from infinity.memory.partition import Partition, State
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.base import MemoryBackend, TierBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.plan.plan import Pools
from infinity.plan.types import Extent, Key, Kind, PartitionSpec, Tier, moved_at_once

# In a recording: what lies in the arenas, by arena.
POOLS = "pools"


class Buffers:
    """The arenas, and the memory of addressable homes."""

    def __init__(self, *, device: Device, host: HostMemory, ledger: Ledger, pools: Pools) -> None:
        # What allocates memory, by addressable tier.
        # On a device without memory of its own a partition's home is the same memory on either tier: the device's, so
        # that nothing is copied. What drives read and write is CPU memory everywhere.
        self._memory: dict[Tier, MemoryBackend] = {Tier.GPU: device, Tier.CPU: device if device.unified else host}
        self._host = host
        self._ledger = ledger
        # Partitions whose buffers are views of whole units, which book and free them.
        self._adopted: set[Key] = set()
        self.staging = torch.empty(0, dtype=torch.uint8, device="cpu")
        if pools.staging_nbytes:
            with ledger.taking(Tier.CPU, {Kind.POOL: pools.staging_nbytes}, "copies of what is stepped on the CPU"):
                self.staging = host.allocate(pools.staging_nbytes)
        # Old values of partitions in CPU memory: no drive and no device reads them, so that nothing is pinned.
        self._undo: Arena | None = None
        if pools.undo_nbytes:
            with ledger.taking(Tier.CPU, {Kind.POOL: pools.undo_nbytes}, "old values of what is stepped in backward"):
                self._undo = Arena("undo", page_aligned(pools.undo_nbytes, inherited=False)[: pools.undo_nbytes])
        # What of device partitions is on its way to their copies on a drive.
        self.copies = torch.empty(0, dtype=torch.uint8, device="cpu")
        if pools.copies_nbytes:
            with ledger.taking(Tier.CPU, {Kind.POOL: pools.copies_nbytes}, "copies of device memory for records"):
                self.copies = host.allocate(pools.copies_nbytes)
        # Where one matrix at a time is made orthogonal.
        self.matrices = torch.empty(0, dtype=torch.uint8, device="cpu")
        if pools.matrix_nbytes:
            with ledger.taking(Tier.GPU, {Kind.POOL: pools.matrix_nbytes}, "a matrix that is made orthogonal"):
                self.matrices = device.allocate(pools.matrix_nbytes)
        self.arenas: dict[str, Arena] = {}
        sizes = {Kind.PARAM: pools.param_nbytes, Kind.STATES: pools.states_nbytes, Kind.GRAD: pools.grad_nbytes}
        for kind, nbytes in sizes.items():
            if nbytes:
                name = kind.value
                with ledger.taking(Tier.CPU, {Kind.POOL: nbytes}, f"the {name} pool"):
                    self.arenas[name] = Arena(name, host.allocate(nbytes))

    def take_old(self, partition: Partition) -> Tensor:
        """Return a buffer of the undo pool for a copy of a partition's value in memory."""
        assert self._undo is not None and partition.buffer is not None
        room = self._undo.take(partition.spec.nbytes)
        assert room is not None, "the plan counts every partition that may be pending at once"
        return room

    def give_old(self, buffer: Tensor) -> None:
        """Return what `take_old` has handed out."""
        assert self._undo is not None
        self._undo.give(buffer)

    def adopt(self, key: Key) -> None:
        """Note that a unit owns the partition's buffer."""
        self._adopted.add(key)

    def adopted(self, key: Key) -> bool:
        """Whether a unit owns the partition's buffer."""
        return key in self._adopted

    def take(self, partition: Partition) -> Tensor | None:
        """Return a buffer for a partition; None if its arena has no free range that is long enough.

        Raises TierMemoryError where the limit of an addressable home, or the system, refuses memory.
        """
        spec = partition.spec
        if not partition.on_drive:
            kinds = {section.kind: section.nbytes for section in spec.sections}
            with self._ledger.taking(spec.home, kinds, str(spec.key)):
                return self._memory[spec.home].allocate(spec.nbytes)
        if not spec.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        name = arena_name(partition.key)
        buffer = self.arenas[name].take(spec.nbytes)
        if buffer is not None:
            trace.level(POOLS, name, self.arenas[name].taken_nbytes)
        return buffer

    def give(self, partition: Partition, buffer: Tensor) -> None:
        """Return a buffer that `take` handed out."""
        if partition.key in self._adopted:
            self._adopted.discard(partition.key)
        elif partition.on_drive:
            if partition.spec.nbytes:
                name = arena_name(partition.key)
                self.arenas[name].give(buffer)
                trace.level(POOLS, name, self.arenas[name].taken_nbytes)
        else:
            self.book(partition, -1)
            self._memory[partition.spec.home].release(buffer)

    def no_room(self, partition: Partition, claimed: list[Partition]) -> TierMemoryError:
        """The error for a partition that finds no room in its arena; `claimed` are the partitions that hold it."""
        arena = self.arenas[arena_name(partition.key)]
        largest = sorted(claimed, key=lambda other: -other.spec.nbytes)[:3]
        owners = tuple((str(other.key), other.spec.nbytes) for other in largest)
        held = ", ".join(f"{name} {mb(nbytes)}" for name, nbytes in owners) or "nobody"
        asked, used = partition.spec.nbytes, arena.taken_nbytes
        return TierMemoryError(
            f"no room on cpu for {partition.key}: asked {mb(asked)} of the {arena.name} pool, used {mb(used)}, limit "
            f"{mb(arena.nbytes)}; largest leases: {held}. Lower sub_group_size, or split the leases.",
            tier=Tier.CPU.value, kind=Kind.POOL.value, asked=asked, used=used, limit=arena.nbytes, owners=owners,
        )  # fmt: skip

    def use(self) -> dict[str, PoolUse]:
        """How full each arena is."""
        return {
            name: PoolUse(reserved=arena.nbytes, used=arena.taken_nbytes, most=arena.most_nbytes)
            for name, arena in self.arenas.items()
        }

    def book(self, partition: Partition, sign: int) -> None:
        """Book a partition's bytes at its home."""
        for section in partition.spec.sections:
            self._ledger.add(partition.spec.home, section.kind, sign * section.nbytes)

    def check(self, partitions: list[Partition], elsewhere: Mapping[tuple[Tier, Kind], int] = {}) -> None:
        """Verify that one buffer belongs to one partition, and the ledger against the sum over partitions and what is
        elsewhere.
        """
        buffers: set[int] = set()
        sums: dict[tuple[Tier, Kind], int] = dict(elsewhere)
        taken = dict.fromkeys(self.arenas, 0)
        for partition in partitions:
            if partition.buffer is not None and partition.spec.nbytes:
                assert partition.buffer.data_ptr() not in buffers, f"{partition.key} shares its buffer"
                buffers.add(partition.buffer.data_ptr())
                if partition.on_drive:
                    taken[arena_name(partition.key)] += piece_nbytes(partition.spec.nbytes)
            if partition.key not in self._adopted and (partition.on_drive or partition.buffer is not None):
                for section in partition.spec.sections:
                    entry = (partition.spec.home, section.kind)
                    sums[entry] = sums.get(entry, 0) + section.nbytes
        for name, arena in self.arenas.items():
            assert arena.taken_nbytes == taken[name], f"the {name} pool has pieces that no partition holds"
        old = sum(piece_nbytes(partition.spec.nbytes) for partition in partitions if partition.undo is not None)
        # A step that is about to write has its pieces before its partitions do.
        assert self._undo is None or self._undo.taken_nbytes >= old, "the undo pool lacks what partitions hold of it"
        for entry in sums.keys() | self._ledger.now.keys():
            booked, held = self._ledger.now.get(entry, 0), sums.get(entry, 0)
            # Units book on the device, too, and pools are booked as a whole; activations are no partition's.
            exact = not entry[0].on_device and entry[1] not in (Kind.POOL, Kind.ACTIVATION)
            assert booked == held if exact else booked >= held, f"the ledger has {booked} of {entry}, not {held}"

    def close(self, partitions: list[Partition]) -> None:
        """Unpin, and forget every buffer."""
        for memory in dict.fromkeys((*self._memory.values(), self._host)):
            memory.close()
        for partition in partitions:
            if partition.on_drive or (partition.buffer is not None and partition.key not in self._adopted):
                self.book(partition, -1)
        self._ledger.add(Tier.GPU, Kind.POOL, -self.matrices.nbytes)
        self.matrices = self.matrices[:0].clone()
        self._ledger.add(Tier.CPU, Kind.POOL, -self.staging.nbytes)
        self.staging = self.staging[:0].clone()
        self._ledger.add(Tier.CPU, Kind.POOL, -self.copies.nbytes)
        self.copies = self.copies[:0].clone()
        if self._undo is not None:
            self._ledger.add(Tier.CPU, Kind.POOL, -self._undo.nbytes)
            self._undo.close()
            self._undo = None
        for arena in self.arenas.values():
            self._ledger.add(Tier.CPU, Kind.POOL, -arena.nbytes)
            arena.close()
        self.arenas = {}


# The C class, which `threading` gives only a function for.
_RLock: Any = type(threading.RLock())


class ProcessLock(_RLock):  # type: ignore[misc]
    """A lock and condition whose holder may have been another thread of the parent when a child was forked.

    In the child that thread does not exist, so the lock might never be released there: entering it raises StateError.

    It is taken and released in C, between two bytecodes. What a signal's handler raises could leave a lock whose
    `__enter__` is Python's taken for good.
    """

    def __init__(self) -> None:
        self._condition = threading.Condition(self)
        self._owner = os.getpid()
        _locks.add(self)

    def wait(self) -> None:
        """Give the lock up until `notify_all`."""
        self._condition.wait()

    def wait_for(self, holds: Callable[[], bool], timeout: float) -> None:
        """Give the lock up until `holds()`, or until as many seconds are over."""
        self._condition.wait_for(holds, timeout)

    def notify_all(self) -> None:
        """Wake all that wait. Call it with the lock held."""
        self._condition.notify_all()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child, so that what the lock guards belongs to another process."""
        return os.getpid() != self._owner

    def check_process(self, verb: str) -> None:
        """Raise StateError in a forked child, which cannot do what `verb` says."""
        if self.is_elsewhere:
            raise of_another_process(verb, self._owner)


class _ForkedLock(ProcessLock):
    """What every `ProcessLock` becomes in a forked child: each lease enters it many times, so entering asks nothing."""

    def __enter__(self) -> bool:
        raise of_another_process("use partitions", self._owner)


_locks: weakref.WeakSet[ProcessLock] = weakref.WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock.__class__ = _ForkedLock


os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, slots=True)
class PartitionExtent(Extent):
    """A place on a drive, and the partition whose bytes are moved there: a recording names the move by it."""

    key: Key


class Residency:
    """All partitions of one rank, their buffers and their drives.

    overlap: let a write-back go on beside the caller; otherwise `flush` waits for it.
    """

    def __init__(
        self, specs: Sequence[PartitionSpec], *, buffers: Buffers, backends: Mapping[Tier, TierBackend], rank: int,
        overlap: bool,
    ) -> None:
        # Guards everything of the store; notified whenever a lease, a transfer, a reservation or a snapshot ends.
        self.lock = ProcessLock()
        self.partitions = {spec.key: Partition(spec, rank) for spec in specs}
        self.buffers = buffers
        self.eviction = Eviction()
        # Of the tiers of drives on which partitions are.
        self.backends = dict(backends)
        self._overlap = overlap
        for backend in backends.values():
            for arena in buffers.arenas.values():
                backend.register(arena.buffer)
        for partition in self.partitions.values():
            if partition.on_drive:
                buffers.book(partition, 1)

    @property
    def nvme(self) -> NvmeTier:
        """The swap files, where a plan has records."""
        backend = self.backends[Tier.NVME]
        assert isinstance(backend, NvmeTier)
        return backend

    def fetch(self, partition: Partition, buffer: Tensor, *, priority: int) -> None:
        """Submit a read of a spilled partition into a buffer, which goes back where the submission fails."""
        assert partition.extent is not None
        read, nbytes = partial(self.backends[partition.spec.home].read, priority=priority), partition.prefix_nbytes
        try:
            partition.begin_fetch(buffer, partial(_moved, read, partition, partition.extent.offset, buffer, nbytes))
        except BaseException:
            self.buffers.give(partition, buffer)
            raise
        self.eviction.update(partition)

    def materialize(self, partition: Partition, buffer: Tensor, prefix_nbytes: int | None) -> None:
        """Give a partition a new value in a buffer: its first `prefix_nbytes` bytes, zeroed, and zeros behind them."""
        # The old value is lost only now that there is room.
        partition.discard()
        partition.materialize(buffer, prefix_nbytes=prefix_nbytes if partition.on_drive else None)
        buffer[: partition.prefix_nbytes].zero_()
        self.eviction.update(partition)

    def flush(self, keys: Iterable[Key]) -> None:
        """Submit the write-back of each partition that is dirty."""
        for key in keys:
            partition = self.partitions[key]
            extent, buffer = partition.extent, partition.buffer
            if partition.state is State.DIRTY and extent is not None and buffer is not None:
                write = self.backends[partition.spec.home].write
                partition.begin_flush(partial(_moved, write, partition, extent.offset, buffer, partition.prefix_nbytes))
                self.eviction.update(partition)
                if not self._overlap:
                    self.settle(partition)

    def write_copy(self, partition: Partition, device: Device) -> list[Transfer]:
        """Submit the write of a value in memory to its extent; the buffer must stay as it is until that has ended. Call
        it without the lock.
        """
        backend, buffer, found = self.backends[Tier.NVME], partition.buffer, list[Transfer]()
        assert buffer is not None
        for extent, begin in _moves(partition, partition.slot, partition.prefix_nbytes):
            piece = buffer[begin : begin + extent.nbytes]
            if buffer.is_cpu:
                found.append(backend.write(extent, piece))
            else:
                room = self.buffers.copies[: extent.nbytes]
                device.arrived(device.copy(room, piece))
                backend.write(extent, room).wait()
        return found

    def read_copy(self, partition: Partition, slot: int, device: Device) -> None:
        """Read a value in memory from one of its extents into its buffer, under the caller's write lease."""
        backend, buffer = self.backends[Tier.NVME], partition.buffer
        assert buffer is not None
        moves = _moves(partition, slot, partition.spec.nbytes)
        pieces = [(extent, buffer[begin : begin + extent.nbytes]) for extent, begin in moves]
        moved = [backend.read(extent, piece) for extent, piece in pieces if buffer.is_cpu]
        for transfer in moved:
            transfer.wait()
        for extent, piece in [] if buffer.is_cpu else pieces:
            room = self.buffers.copies[: extent.nbytes]
            backend.read(extent, room).wait()
            device.arrived(device.copy(piece, room))

    def checksums(self, partition: Partition) -> list[int]:
        """Return the checksums of what its extent holds, piece by piece."""
        nvme = self.nvme
        return [
            crc for extent, _ in _moves(partition, partition.slot, partition.prefix_nbytes)
            for crc in nvme.checksums(extent)
        ]  # fmt: skip

    def expect(self, partition: Partition, slot: int, prefix_nbytes: int, checksums: Sequence[int]) -> None:
        """Note what another process has written to one of its extents: as `checksums` returned it there. ValueError
        where these are not as many.
        """
        self.nvme.expect([extent for extent, _ in _moves(partition, slot, prefix_nbytes)], checksums)

    def settle(self, partition: Partition) -> None:
        """Wait for a transfer in flight, without the lock; raise its error, after which the buffer is returned."""
        while (transfer := partition.transfer) is not None:
            error: BaseException | None = None
            cause = "NVMe read" if partition.state is State.READING else "NVMe write"
            self.lock.release()
            try:
                with trace.span(trace.WAIT, cause, partition.key, partition.spec.nbytes):
                    transfer.wait()
            except BaseException as caught:
                error = caught
            finally:
                self.lock.acquire()
            if partition.transfer is transfer:
                partition.arrive(error)
                self.eviction.update(partition)
                self.reclaim(partition)
                self.lock.notify_all()
            if error is not None:
                raise error

    def settle_all(self) -> None:
        """Flush what is dirty and wait for everything in flight, then raise the first error.

        A late transfer is raised at once: waiting as long for each of the others would help nobody.
        """
        errors: list[TransferError] = []
        self.flush(self.partitions)
        for partition in self.partitions.values():
            try:
                self.settle(partition)
            except TransferError as error:
                if partition.transfer is not None:
                    raise
                errors.append(error)
        if errors:
            raise errors[0]

    def drop(self, partition: Partition) -> bool:
        """Free the buffer of a clean partition without leases; return whether it was free to go."""
        if not partition.on_drive or partition.state is not State.RESIDENT or partition.leased:
            return False
        self._give(partition, partition.drop())
        return True

    def discard(self, partition: Partition) -> None:
        """Lose a partition's value and return its buffer."""
        self.settle(partition)
        self._give(partition, partition.discard())

    def reclaim(self, partition: Partition) -> None:
        """Return the buffer of a failed partition once nothing reads it."""
        self._give(partition, partition.surrender())

    def commit(self, keys: Iterable[Key]) -> None:
        """Make pending versions of these partitions their values. See [Note: slots]."""
        for key in keys:
            old = self.partitions[key].commit()
            if old is not None:
                self.buffers.give_old(old)

    def forget(self, keys: Iterable[Key]) -> None:
        """Go back from pending versions of these partitions to the committed ones."""
        for key in keys:
            partition = self.partitions[key]
            if not partition.pending:
                continue
            try:
                self.settle(partition)
            except TransferError:
                # A version whose write failed is gone as well; one whose write is only late is not.
                if partition.transfer is not None:
                    raise
            freed = partition.forget()
            if partition.on_drive:
                self._give(partition, freed)
            elif freed is not None:
                self.buffers.give_old(freed)

    def read_extent(self, partition: Partition, begin: int, buffer: Tensor) -> Transfer:
        """Submit a read of a spilled partition from byte `begin` on into the caller's memory, behind other traffic."""
        extent = partition.extent
        assert extent is not None
        held = min(max(partition.prefix_nbytes - begin, 0), buffer.nbytes)
        buffer[held:].zero_()
        read = partial(self.backends[partition.spec.home].read, priority=-1)
        return _moved(read, partition, extent.offset + begin, buffer, held)

    def check(self, elsewhere: Mapping[tuple[Tier, Kind], int] = {}) -> None:
        """Verify the invariants of every partition, one buffer one partition, the queues and the ledger.

        elsewhere: what the ledger has of values that are offloaded.
        """
        for partition in self.partitions.values():
            partition.check()
            self.eviction.check(partition)
        self.buffers.check([*self.partitions.values()], elsewhere)

    def close(self) -> None:
        """End what is in flight, unpin memory and return every buffer, in this order. Late failures are logged."""
        with ExitStack() as stack:
            stack.callback(self._clear)
            stack.callback(lambda: self.buffers.close([*self.partitions.values()]))
            for backend in self.backends.values():
                try:
                    backend.close()
                except TransferError as error:
                    logger.error("while closing the store: %s", error)

    def _clear(self) -> None:
        self.partitions, self.backends = {}, {}
        self.eviction.clear()

    def _give(self, partition: Partition, buffer: Tensor | None) -> None:
        """Return the buffer that a partition gave up, if it had one."""
        if buffer is not None:
            self.eviction.update(partition)
            self.buffers.give(partition, buffer)


def _moves(partition: Partition, slot: int, prefix_nbytes: int) -> list[tuple[PartitionExtent, int]]:
    """See `moved_at_once`: to or from one of a partition's extents."""
    spec = partition.spec
    extent = spec.spare if slot else spec.extent
    moves = moved_at_once(extent, spec.nbytes, prefix_nbytes, copied=spec.copied)
    return [(PartitionExtent(each.offset, each.nbytes, spec.key), begin) for each, begin in moves]


def _moved(
    move: Callable[[Extent, Tensor], Transfer], partition: Partition, offset: int, buffer: Tensor, nbytes: int
) -> Transfer:
    """Submit a move of the first `nbytes` of `buffer` to or from a partition's place; nothing is done at once."""
    return move(PartitionExtent(offset, nbytes, partition.key), buffer[:nbytes]) if nbytes else Completed()
