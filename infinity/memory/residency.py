"""Moves one partition at a time between its home and memory. Knows no leases: the store decides what may move.

Whoever calls a method holds `lock`; only `settle` gives it up, while it waits for a transfer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from infinity.errors import TransferError
from infinity.log import logger
from infinity.memory.buffers import Buffers
from infinity.memory.eviction import Eviction
from infinity.memory.partition import Partition, State
from infinity.memory.process_lock import ProcessLock
from infinity.memory.tiers.base import TierBackend
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.types import Extent, Key, Kind, PartitionSpec, Tier


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
            self.partitions[key].commit()

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
            self._give(partition, partition.forget())

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


def _moved(
    move: Callable[[Extent, Tensor], Transfer], partition: Partition, offset: int, buffer: Tensor, nbytes: int
) -> Transfer:
    """Submit a move of the first `nbytes` of `buffer` to or from a partition's place; nothing is done at once."""
    return move(PartitionExtent(offset, nbytes, partition.key), buffer[:nbytes]) if nbytes else Completed()
