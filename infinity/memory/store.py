"""The store: the only mover of bytes. It leases partitions, fetches and flushes them, and books every buffer.

Data's way: `prefetch` submits a read from NVMe into an arena; `read` and `write` wait for it (or submit it) and lend
typed views; `flush` submits the write-back of what was written. Buffers of NVMe partitions stay in their arena,
clean, until their space is needed: the one used longest ago goes first, one that was fetched ahead and not used yet
goes last. The store never chooses *what* to prefetch.

Two parties may work at the same time: the training loop, and an optimizer step that goes on behind it. The step takes
a `Reservation` of all that it will change; until it lets go of a partition, everybody else's lease of it waits. ZeRO
and the optimizer so meet in the store. A third party may save a `Snapshot` behind both (see `infinity.memory.party`).
Nobody holds the store's lock while waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor

from infinity.errors import TierMemoryError, TransferError
from infinity.log import logger
from infinity.memory.access_control import AccessControl, Reservation, Snapshot
from infinity.memory.buffers import Buffers, arena_name
from infinity.memory.ledger import Ledger
from infinity.memory.memory_report import PoolUse
from infinity.memory.partition import Partition, State
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.plan import Pools
from infinity.plan.types import Extent, Key, PartitionSpec


class TieredStore(AccessControl):
    """All partitions of one rank, on their tiers."""

    def __init__(
        self, specs: Sequence[PartitionSpec], *, device: Device, host: HostMemory, ledger: Ledger, pools: Pools,
        nvme: NvmeTier | None = None, rank: int = 0, overlap: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self._partitions = {spec.key: Partition(spec, rank) for spec in specs}
        self._nvme = nvme
        self._overlap = overlap
        self._clock = 0
        self._buffers = Buffers(device=device, host=host, ledger=ledger, pools=pools)
        if nvme is not None:
            for arena in self._buffers.arenas.values():
                nvme.register(arena.buffer)
        for partition in self._partitions.values():
            if partition.on_nvme:
                self._buffers.book(partition, 1)

    def __getitem__(self, key: Key) -> Partition:
        return self._partitions[key]

    def keys(self) -> Iterable[Key]:
        return self._partitions.keys()

    def adopt(self, key: Key, buffer: Tensor) -> None:
        """Make `buffer` (uint8) the home of a partition that is a view of a whole unit."""
        with self._changed:
            self._buffers.adopt(key)
            self._partitions[key].materialize(buffer)

    # Leases.

    @contextmanager
    def read(self, *keys: Key, by: Reservation | None = None) -> Iterator[list[Partition]]:
        """Lend partitions for reading: waits for what is in flight, fetches what is on NVMe.

        by: the reservation on whose behalf this is; anybody else waits for reserved partitions.
        """
        held: list[Partition] = []
        with self._claimed(keys, by):
            try:
                with self._changed:
                    for partition in self._acquire(keys, by):
                        partition.begin_read()
                        held.append(partition)
                yield [*held]
            finally:
                with self._changed:
                    for partition in held:
                        partition.end_read()
                        self._reclaim(partition)

    @contextmanager
    def write(
        self, *keys: Key, fresh: bool = False, prefix_nbytes: int | None = None, by: Reservation | None = None
    ) -> Iterator[list[Partition]]:
        """Lend partitions to one writer. With `fresh` the old value is not fetched: the writer replaces all of it, or
        its first `prefix_nbytes`, and the rest is zero: see [Note: zero tails].

        A partition that was ABSENT comes zeroed, as far as it is the writer's. by: as in `read`.
        """
        held: list[Partition] = []
        with self._claimed(keys, by, writes=True):
            try:
                with self._changed:
                    for partition in self._acquire(keys, by, fresh=fresh, prefix_nbytes=prefix_nbytes):
                        if not partition.leased:
                            self._settle(partition)
                        if by is not None and by.pending and not partition.pending:
                            # What the step begins from stays on NVMe. Meanwhile it may be wanted after all.
                            self._flush([partition.key])
                            self._settle(partition)
                        starts = partition.on_nvme and prefix_nbytes is not None
                        partition.begin_write(pending=by is not None and by.pending, starts=starts)
                        held.append(partition)
                yield [*held]
            finally:
                with self._changed:
                    for partition in held:
                        partition.end_write()

    # Snapshots.

    @contextmanager
    def saving(self, snapshot: Snapshot, key: Key, *, last: bool = True) -> Iterator[Partition | None]:
        """Lend a partition to the saver of a snapshot, its value in memory; or None: it lies in its extent and stays
        there (see `read_extent`). At the end of the block it counts as saved, unless the block has raised or it is not
        the `last` time.
        """
        with self._changed:
            self._await_step(snapshot, key)
            partition = self._partitions[key]
            while partition.state is State.READING:
                self._settle(partition)
            lent = partition if partition.state is not State.SPILLED else None
            if lent is not None:
                lent.fill()
                lent.begin_read()
                self._claim([key], snapshot)
            if last:
                snapshot.at_hand(key)
        try:
            yield lent
        except BaseException:
            self._end_saving(snapshot, lent)
            raise
        self._end_saving(snapshot, lent, *([key] if last else []))

    def _end_saving(self, snapshot: Snapshot, lent: Partition | None, *saved: Key) -> None:
        with self._changed:
            for key in saved:
                snapshot.saved(key)
            if lent is not None:
                lent.end_read()
                self._reclaim(lent)
                self._unclaim([lent.key], snapshot)
            self._changed.notify_all()

    def read_extent(self, key: Key, begin: int, buffer: Tensor) -> Transfer:
        """Submit a read of part of a partition that lies on NVMe, from byte `begin` on, into memory of the caller's.

        For the saver: behind all other traffic.
        """
        partition = self._partitions[key]
        extent = partition.extent
        assert self._nvme is not None and extent is not None
        held = min(max(partition.prefix_nbytes - begin, 0), buffer.nbytes)
        buffer[held:].zero_()
        read = partial(self._nvme.read, priority=-1)
        return _moved(read, Extent(extent.offset + begin, buffer.nbytes), buffer, held)

    # Moves.

    def prefetch(self, *keys: Key, by: Reservation | None = None) -> bool:
        """Submit the fetches that fit without waiting, in order; False when one did not (it is fetched on demand).

        What a step has reserved is fetched by that step, in its own order.
        """
        if not self._overlap:
            return False
        with self._changed:
            for key in keys:
                partition = self._partitions[key]
                if self._reserved.get(key, by) is not by:
                    continue
                if partition.state is State.SPILLED:
                    buffer = self._take_now(partition)
                    if buffer is not None:
                        self._submit_fetch(partition, buffer, by)
                    elif partition.absent:
                        return False
                # What is there already is as needed as what is fetched now.
                partition.awaited = partition.on_nvme and partition.buffer is not None
            return True

    def flush(self, *keys: Key) -> None:
        """Submit the write-back of what is dirty and not kept. Buffers stay readable; without overlap this waits."""
        with self._changed:
            self._flush(key for key in keys if not self._partitions[key].kept)

    def keep(self, *keys: Key) -> None:
        """From now on these partitions on NVMe stay in memory once they are there, as long as there is room."""
        with self._changed:
            for key in keys:
                self._partitions[key].kept = True

    def settle(self) -> None:
        """Flush everything that is dirty, wait for everything in flight, and then raise the first error.

        A transfer that is late is raised at once: waiting as long for each of the others would help nobody.
        """
        errors: list[TransferError] = []
        with self._changed:
            self._flush(self._partitions)
            for partition in self._partitions.values():
                try:
                    self._settle(partition)
                except TransferError as error:
                    if partition.transfer is not None:
                        raise
                    errors.append(error)
        if errors:
            raise errors[0]

    def drop(self, *keys: Key) -> None:
        """Free the buffers of clean NVMe partitions that nobody uses; others are left as they are."""
        with self._changed:
            for key in keys:
                self._drop(self._partitions[key])

    def discard(self, *keys: Key) -> None:
        """Forget values; memory of GPU and CPU homes is returned."""
        with self._changed:
            self._await_saved(keys, None)
            for key in keys:
                partition = self._partitions[key]
                self._settle(partition)
                buffer = partition.discard()
                if buffer is not None:
                    self._buffers.give(partition, buffer)

    def in_memory(self, key: Key) -> bool:
        """Whether the value needs no fetch any more: it is there, or on its way."""
        return self._partitions[key].buffer is not None

    def pools(self) -> dict[str, PoolUse]:
        """How full the arenas are."""
        with self._changed:
            return self._buffers.use()

    def held(self) -> Iterator[tuple[Partition, bool]]:
        """Every partition, and whether its bytes are its own: those of an aliased one are its unit's."""
        for partition in self._partitions.values():
            yield partition, not self._buffers.adopted(partition.key)

    @property
    def io_backend(self) -> str | None:
        """What moves bytes between NVMe and memory; None where nothing does."""
        return None if self._nvme is None else self._nvme.backend

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that NVMe may have begun to move before a fetch whose turn is next."""
        return 0 if self._nvme is None else self._nvme.ahead_nbytes

    def check(self) -> None:
        """Verify the invariants of every partition, one buffer one partition, and the ledger against the sum."""
        with self._changed:
            for partition in self._partitions.values():
                partition.check()
            self._buffers.check([*self._partitions.values()])

    def close(self) -> None:
        """Return every buffer and remove the swap file, whatever state the partitions are in.

        A transfer that fails only now is logged: nobody can read what it moved any more. In a forked child this does
        nothing.
        """
        if self.is_elsewhere:
            return
        with self._changed, ExitStack() as stack:
            # Backwards: what is in flight ends first, then memory is unpinned, then buffers go.
            stack.callback(self._let_go)
            stack.callback(lambda: self._buffers.close([*self._partitions.values()]))
            if self._nvme is not None:
                try:
                    self._nvme.close()
                except TransferError as error:
                    logger.error("while closing the store: %s", error)

    def _let_go(self) -> None:
        self._partitions, self._nvme = {}, None
        self._forget_parties()

    # Everything below runs under the lock; what waits gives it up meanwhile.

    def _acquire(
        self, keys: Sequence[Key], by: Reservation | None, fresh: bool = False, prefix_nbytes: int | None = None
    ) -> list[Partition]:
        """Bring all partitions into memory. Largest first, so that what is left fits into what is left of the arena."""
        partitions = [self._partitions[key] for key in keys]
        self._clock += 1
        for partition in partitions:
            partition.used = self._clock
        by_size = sorted(partitions, key=lambda partition: -partition.spec.nbytes)
        try:
            for partition in by_size:
                self._bring(partition, fresh, by, prefix_nbytes)
        except TierMemoryError:
            # Earlier buffers may lie in the middle of the free space: start from an empty arena, once.
            self._clear(keys)
            for partition in by_size:
                self._bring(partition, fresh, by, prefix_nbytes)
        for partition in by_size:
            if partition.state is State.READING:
                self._settle(partition)
            partition.awaited = False
            if prefix_nbytes is None:
                partition.fill()
        return partitions

    def _bring(self, partition: Partition, fresh: bool, by: Reservation | None, prefix_nbytes: int | None) -> None:
        """Make sure that a partition has its value, or a fetch under way."""
        buffer = self._take(partition, by)
        if partition.state is State.FAILED:
            raise partition.error("use")
        if buffer is None:
            return
        if partition.state is State.SPILLED and not fresh:
            self._submit_fetch(partition, buffer, by)
        else:
            # Not before there is room: the old value is lost now.
            partition.discard()
            prefix_nbytes = prefix_nbytes if partition.on_nvme else None
            partition.materialize(buffer, prefix_nbytes=prefix_nbytes)
            buffer[: partition.prefix_nbytes].zero_()

    def _submit_fetch(self, partition: Partition, buffer: Tensor, by: Reservation | None) -> None:
        assert self._nvme is not None and partition.extent is not None
        # What the program reads ahead it needs soon; what a step behind it reads and writes has time.
        priority = 1 if by is None else 0
        read = partial(self._nvme.read, priority=priority)
        try:
            partition.begin_fetch(buffer, partial(_moved, read, partition.extent, buffer, partition.prefix_nbytes))
        except BaseException:
            self._buffers.give(partition, buffer)
            raise

    def _take_now(self, partition: Partition) -> Tensor | None:
        """A buffer for a partition without waiting for anything. None: there is none, or somebody has brought the
        partition meanwhile.
        """
        while partition.absent:
            buffer = self._buffers.take(partition)
            if buffer is not None:
                return buffer
            if not self._drop_one(self._spare(arena_name(partition.key))):
                break
        return None

    def _take(self, partition: Partition, by: Reservation | None) -> Tensor | None:
        """A buffer for a partition: waits for transfers, gives up others' clean buffers, waits for others' leases. None
        where it has one, or somebody has brought it meanwhile.
        """
        name = arena_name(partition.key)
        while partition.absent:
            buffer = self._take_now(partition)
            if buffer is not None:
                return buffer
            if not partition.absent or self._make_room(name):
                continue
            if self._others_are_stuck(by):
                claimed = [other for other in self._buffers.inside(name) if self._claims[other.key]]
                raise self._buffers.no_room(partition, claimed)
            self._wait_for_others(by, "room in a pool", partition.key)
        return None

    def _spare(self, name: str) -> list[Partition]:
        """Partitions with buffers in one arena that nobody has claimed: the one used longest ago first."""
        found = [partition for partition in self._buffers.inside(name) if not self._claims[partition.key]]
        return sorted(found, key=lambda partition: partition.used)

    def _drop_one(self, spare: list[Partition]) -> bool:
        """Give up one clean buffer that nobody waits for; False when there is none."""
        for other in spare:
            if other.awaited or other.kept:
                continue
            if other.state is State.WRITING and other.transfer is not None and other.transfer.done():
                self._settle(other)
            if self._drop(other):
                return True
        return False

    def _make_room(self, name: str) -> bool:
        """Write back or wait for one buffer: last of those that are kept, and of those that somebody waits for before
        them. False when there is none.
        """
        for other in sorted(self._spare(name), key=lambda other: (other.kept, other.awaited)):
            if self._claims[other.key]:
                # Since this waited for another.
                continue
            self._flush([other.key])
            self._settle(other)
            if self._drop(other):
                return True
        return False

    def _clear(self, asked: Sequence[Key]) -> None:
        """Give up every buffer of the arenas of `asked` that nobody else uses, those of `asked` included."""
        for name in {arena_name(key) for key in asked} & self._buffers.arenas.keys():
            own = [self._partitions[key] for key in asked if self._claims[key] == 1 and arena_name(key) == name]
            everyone = [*self._spare(name), *(p for p in own if p.on_nvme and p.buffer is not None and not p.leased)]
            self._flush([partition.key for partition in everyone])
            for partition in everyone:
                self._settle(partition)
            for partition in everyone:
                # Somebody may have claimed it while this waited.
                self._drop(partition, claims=int(partition.key in asked))

    def _flush(self, keys: Iterable[Key]) -> None:
        for key in keys:
            partition = self._partitions[key]
            extent, buffer = partition.extent, partition.buffer
            if partition.state is State.DIRTY and extent is not None and buffer is not None:
                assert self._nvme is not None
                partition.begin_flush(partial(_moved, self._nvme.write, extent, buffer, partition.prefix_nbytes))
                if not self._overlap:
                    self._settle(partition)

    def _drop(self, partition: Partition, claims: int = 0) -> bool:
        """Free a clean buffer that nobody uses or is about to use; whether it was. `claims`: the caller's own."""
        wanted = partition.leased or self._claims[partition.key] > claims
        if not partition.on_nvme or partition.state is not State.RESIDENT or wanted:
            return False
        self._buffers.give(partition, partition.drop())
        partition.awaited = False
        return True

    def _settle(self, partition: Partition) -> None:
        """Wait for a transfer in flight. A partition that fails gives its buffer back, and the error is raised."""
        while (transfer := partition.transfer) is not None:
            error: BaseException | None = None
            cause = "NVMe read" if partition.state is State.READING else "NVMe write"
            self._changed.release()
            try:
                with trace.span(trace.WAIT, cause, partition.key, partition.spec.nbytes):
                    transfer.wait()
            except BaseException as caught:
                error = caught
            finally:
                self._changed.acquire()
            if partition.transfer is transfer:
                partition.arrive(error)
                self._reclaim(partition)
                self._changed.notify_all()
            if error is not None:
                raise error

    def _commit(self, keys: Iterable[Key]) -> None:
        for key in keys:
            self._partitions[key].commit()

    def _forget(self, keys: Iterable[Key]) -> None:
        for key in keys:
            partition = self._partitions[key]
            if not partition.pending:
                continue
            try:
                self._settle(partition)
            except TransferError:
                # A version that could not be written is gone as well, but for one whose write is only late.
                if partition.transfer is not None:
                    raise
            buffer = partition.forget()
            if buffer is not None:
                self._buffers.give(partition, buffer)

    def _reclaim(self, partition: Partition) -> None:
        buffer = partition.surrender()
        if buffer is not None:
            self._buffers.give(partition, buffer)


def _moved(move: Callable[[Extent, Tensor], Transfer], extent: Extent, buffer: Tensor, nbytes: int) -> Transfer:
    """Submit a move of the first `nbytes` of an extent; nothing is done at once."""
    return move(Extent(extent.offset, nbytes), buffer[:nbytes]) if nbytes else Completed()
