"""The store: the only mover of bytes. It leases partitions, fetches and flushes them, and books every buffer.

Data's way: `prefetch` submits a read from a drive into an arena; `read` and `write` wait for it (or submit it) and lend
typed views; `flush` submits the write-back of what was written. Buffers of a drive's partitions stay in their arena,
clean, until their space is needed (see `infinity.memory.arena`). The store never chooses *what* to prefetch.

The store is composed of `Residency`, which moves single partitions, and `AccessControl`, which decides whose turn it
is: the training loop, an optimizer step in the background and a save may use the store at the same time. ZeRO and the
optimizer meet here and nowhere else. No thread holds the store's lock while it waits.

Opening the store of a plan and the tier of activation checkpoints: memory, and back ends for tiers with files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.config import ResolvedConfig
from infinity.errors import TierMemoryError
from infinity.memory.activation_tier import ActivationTier
from infinity.memory.arena import Rank, arena_name
from infinity.memory.drives import queue_options
from infinity.memory.ledger import Ledger, PoolUse
from infinity.memory.partition import Partition, State
from infinity.memory.residency import Buffers, Residency
from infinity.memory.scratch import Offloaded, Refuge, SwapFolders
from infinity.memory.tiers.base import TierBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.memory.tiers.registry import backend_of
from infinity.memory.transaction import AccessControl, Reservation, Snapshot
from infinity.plan.plan import Plan, Pools
from infinity.plan.types import Key, Kind, PartitionSpec, Tier

# Drives complete writes nearly in order: a finished one is among the first so many, or there is none.
_WRITES_POLLED = 16


# Where a value lies that a record names: slot, bytes before the zero tail, checksums of what was written at once.
Place = tuple[int, int, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Left:
    """What a process that was killed has left of a rank's values: swap files, one a drive, with the drives' weights,
    and the places of the values, in the order of `TieredStore.saved`.
    """

    files: Sequence[Path]
    weights: Sequence[float]
    places: Sequence[Place]


class TieredStore:
    """All partitions of one rank, on their tiers. `access` holds reservations and snapshots."""

    def __init__(
        self, specs: Sequence[PartitionSpec], *, device: Device, host: HostMemory, ledger: Ledger, pools: Pools,
        backends: Mapping[Tier, TierBackend] = {}, rank: int = 0, overlap: bool = True,
    ) -> None:  # fmt: skip
        self._overlap, self._device = overlap, device
        self._buffers = Buffers(device=device, host=host, ledger=ledger, pools=pools)
        self._residency = Residency(specs, buffers=self._buffers, backends=backends, rank=rank, overlap=overlap)
        self._eviction = self._residency.eviction
        self.ledger = ledger
        self._offloaded = Offloaded(ledger)
        self._lock = self._residency.lock
        self.access = AccessControl(self._residency)

    def __getitem__(self, key: Key) -> Partition:
        return self._residency.partitions[key]

    def keys(self) -> Iterable[Key]:
        """The keys of all partitions."""
        return self._residency.partitions.keys()

    def adopt(self, key: Key, buffer: Tensor) -> None:
        """Make `buffer` (uint8) the home of a partition that is a view of a whole unit. A value that is offloaded comes
        back into it.
        """
        with self._lock:
            if key in self._offloaded:
                self._offloaded.restore(key, buffer)
            self._buffers.adopt(key)
            self[key].materialize(buffer, same=True)

    # An idle engine's values elsewhere.

    def offload(self, key: Key, refuge: Refuge) -> int:
        """Move the value of a partition whose home is memory to a refuge; return the bytes that this has freed.

        A lease of the partition brings it back, and so does `adopt`; the buffer of an adopted one is the caller's to
        free. StateError where the partition is in use.
        """
        with self._lock:
            self.access.wait_unreserved([key], None)
            self.access.wait_saved([key], None)
            partition = self[key]
            if partition.on_drive or partition.buffer is None or not partition.spec.nbytes:
                return 0
            if partition.leased or self.access.claims(key):
                raise partition.error("offload")
            self._offloaded.keep(partition, refuge)
            self._residency.discard(partition)
            return partition.spec.nbytes

    def offloaded(self) -> list[Key]:
        """The keys of partitions whose values are offloaded."""
        with self._lock:
            return self._offloaded.keys()

    # Leases.

    @contextmanager
    def read(self, *keys: Key, by: Reservation | None = None, wait: bool = True) -> Iterator[list[Partition]]:
        """Lend partitions for reading, after waiting for their transfers and fetching what is not in memory.

        by: the reservation on whose behalf this is; other callers wait for reserved partitions.
        wait: until other parties give up room in a pool; else TierMemoryError where there is none.
        """
        held: list[Partition] = []
        with self.access.claimed(keys, by):
            try:
                with self._lock:
                    for partition in self._acquire(keys, by, wait=wait):
                        partition.begin_read()
                        held.append(partition)
                yield [*held]
            finally:
                with self._lock:
                    for partition in held:
                        partition.end_read()
                        self._residency.reclaim(partition)

    @contextmanager
    def write(
        self, *keys: Key, fresh: bool = False, prefix_nbytes: int | None = None, by: Reservation | None = None
    ) -> Iterator[list[Partition]]:
        """Lend partitions to one writer.

        fresh: do not fetch the old value; the writer replaces all of it, or its first `prefix_nbytes` bytes, and the
        rest is zero (see [Note: zero tails]). A partition that was ABSENT comes zeroed, as far as it is the writer's.
        by: as in `read`.
        """
        held: list[Partition] = []
        old: dict[Key, Tensor] = {}
        with self.access.claimed(keys, by, writes=True):
            try:
                if by is not None and by.pending:
                    with self._lock:
                        # What a write would lose, because no drive has it.
                        lost = [
                            each for each in self._acquire(keys, by, fresh=fresh, prefix_nbytes=prefix_nbytes)
                            if not (each.on_drive or each.pending)
                        ]  # fmt: skip
                        old = {each.key: self._buffers.take_old(each) for each in lost}
                    for key, room in old.items():
                        # Without the lock: nobody else may write what is claimed for a step.
                        value = self[key].buffer
                        assert value is not None
                        room.copy_(value)
                with self._lock:
                    for partition in self._acquire(keys, by, fresh=fresh, prefix_nbytes=prefix_nbytes):
                        if not partition.leased:
                            self._residency.settle(partition)
                        if by is not None and by.pending and not partition.pending:
                            # The committed value stays on the drive: the step may be forgotten.
                            self._residency.flush([partition.key])
                            self._residency.settle(partition)
                        starts = partition.on_drive and prefix_nbytes is not None
                        # The step may have been committed in any wait.
                        pending = by is not None and by.pending
                        undo = old.pop(partition.key, None) if pending else None
                        partition.begin_write(pending=pending, undo=undo, starts=starts)
                        self._eviction.update(partition)
                        held.append(partition)
                yield [*held]
            finally:
                with self._lock:
                    for partition in held:
                        partition.end_write()
                    for room in old.values():
                        self._buffers.give_old(room)

    # Snapshots.

    @contextmanager
    def saving(self, snapshot: Snapshot, key: Key, *, last: bool = True) -> Iterator[Partition | None]:
        """Lend a partition to the saver of a snapshot, its value in memory; None if it lies in its extent and stays
        there (see `read_extent`). It counts as saved after the block, unless the block raises or `last` is False.
        """
        with self._lock:
            self.access.wait_step(snapshot, key)
            partition = self[key]
            while partition.state is State.READING:
                self._residency.settle(partition)
            lent = partition if partition.state is not State.SPILLED else None
            if lent is not None:
                lent.fill()
                lent.begin_read()
                self.access.claim([key], snapshot)
            if last:
                snapshot.at_hand(key)
        saved = False
        try:
            yield lent
            saved = last
        finally:
            with self._lock:
                if saved:
                    snapshot.saved(key)
                if lent is not None:
                    lent.end_read()
                    self._residency.reclaim(lent)
                    self.access.unclaim([key], snapshot)
                self._lock.notify_all()

    def read_extent(self, key: Key, begin: int, buffer: Tensor) -> Transfer:
        """Submit a read of part of a partition that is not in memory, from byte `begin` on, into the caller's memory.

        For the saver: all other traffic goes first.
        """
        return self._residency.read_extent(self[key], begin, buffer)

    # Records of a step: see [Note: records] in `infinity.memory.partition`.

    @property
    def saved(self) -> list[Partition]:
        """The partitions that a record names: all but gradients."""
        return [each for each in self._residency.partitions.values() if each.key.kind is not Kind.GRAD]

    def write_down(self) -> None:
        """Bring all values that changed since the latest record onto the drive, each into an extent that no record
        names. The program changes none meanwhile (`AccessControl.begin_record`), and no step writes one; a step
        that is to follow may have reserved it.
        """
        with self._lock:
            saved = self.saved
            self._residency.flush(each.key for each in saved if each.on_drive)
            for partition in saved:
                self._residency.settle(partition)
        with ExitStack() as leases:
            moved: list[Transfer] = []
            try:
                for partition in saved:
                    if partition.spec.copied and partition.changed:
                        leases.enter_context(self._kept_as_it_is(partition))
                        moved += self._residency.write_copy(partition, self._device)
            finally:
                for transfer in moved:
                    transfer.wait()

    @contextmanager
    def _kept_as_it_is(self, partition: Partition) -> Iterator[None]:
        with self._lock:
            partition.begin_read()
            self.access.claim([partition.key], None)
        try:
            yield
        finally:
            with self._lock:
                partition.end_read()
                self.access.unclaim([partition.key], None)

    def places(self) -> list[Place]:
        """Return where `write_down` has put each of the saved values."""
        with self._lock:
            return [(each.slot, each.prefix_nbytes, self._residency.checksums(each)) for each in self.saved]

    def sync(self) -> None:
        """Return once all that was written to drives outlasts a loss of power."""
        self.swap_files.sync()

    @property
    def swap_files(self) -> NvmeTier:
        """The files that hold what a record names."""
        return self._residency.nvme

    def record(self) -> None:
        """A record names the values as `write_down` has left them: their extents are not written any more."""
        with self._lock:
            for partition in self.saved:
                partition.record()

    def forget_records(self) -> None:
        """No record names a value any more."""
        with self._lock:
            for partition in self.saved:
                partition.forget_record()

    def restore(self, places: Sequence[Place]) -> None:
        """Take the values that a record names, as `places` returned them, from the files of a process that has ended.
        What lives in memory is read; what lives on the drive is read when it is used.
        """
        for partition, (slot, prefix_nbytes, checksums) in zip(self.saved, places, strict=True):
            self._residency.expect(partition, slot, prefix_nbytes, checksums)
            if partition.spec.copied:
                with self.write(partition.key, fresh=True):
                    self._residency.read_copy(partition, slot, self._device)
            with self._lock:
                partition.restore(slot, prefix_nbytes)

    @property
    def matrices(self) -> Tensor:
        """Memory of the device (uint8) in which one matrix at a time is made orthogonal."""
        return self._buffers.matrices

    @property
    def staging(self) -> Tensor:
        """Pinned CPU memory (uint8) for the copies of device partitions that are stepped on the CPU."""
        return self._buffers.staging

    # Moves.

    def prefetch(self, *keys: Key, by: Reservation | None = None) -> bool:
        """Submit the fetches that fit without waiting, in order; False when one did not (it is fetched on demand).

        Partitions that a step has reserved are left to that step, which fetches them in its own order.
        """
        if not self._overlap:
            return False
        with self._lock:
            for key in keys:
                partition = self[key]
                if self.access.is_others(key, by):
                    continue
                if partition.state is State.SPILLED:
                    buffer = self._take_now(partition)
                    if buffer is not None:
                        self._fetch(partition, buffer, by)
                    elif partition.absent:
                        return False
                # A partition that is present already is needed as soon as one that is fetched now.
                self._eviction.expect(partition)
            return True

    def flush(self, *keys: Key) -> None:
        """Submit the write-back of what is dirty and not kept. Buffers stay readable; without overlap this waits."""
        with self._lock:
            self._residency.flush(key for key in keys if not self._eviction.is_kept(key))

    def keep(self, *keys: Key) -> None:
        """Keep these partitions of drives in memory from now on, once they are there, as long as there is room."""
        with self._lock:
            for key in keys:
                self._eviction.keep(self[key])

    def settle(self) -> None:
        """Flush everything that is dirty, wait for everything in flight, and then raise the first error."""
        with self._lock:
            self._residency.settle_all()

    def drop(self, *keys: Key) -> None:
        """Free the buffers of clean partitions of drives that no party uses; leave the others as they are."""
        with self._lock:
            for key in keys:
                self._drop(self[key])

    def discard(self, *keys: Key) -> None:
        """Lose values and return their memory."""
        with self._lock:
            self.access.wait_saved(keys, None)
            for key in keys:
                if key in self._offloaded:
                    self._offloaded.forget(key)
                self._residency.discard(self[key])

    # Reports.

    def in_memory(self, key: Key) -> bool:
        """Whether the value needs no fetch any more: it is there, or on its way."""
        return self[key].buffer is not None

    def readable_now(self, key: Key) -> bool:
        """Whether `read` would wait for neither a transfer nor a step."""
        with self._lock:
            partition = self[key]
            reading = partition.transfer if partition.state is State.READING else None
            here = partition.buffer is not None and (reading is None or reading.done())
            return here and not self.access.is_others(key, None)

    def pools(self) -> dict[str, PoolUse]:
        """How full the arenas are."""
        with self._lock:
            return self._buffers.use()

    def held(self) -> Iterator[tuple[Partition, bool]]:
        """Every partition, and whether its bytes are its own: those of an aliased one are its unit's."""
        for partition in self._residency.partitions.values():
            yield partition, not self._buffers.adopted(partition.key)

    @property
    def io_backend(self) -> str | None:
        """What moves bytes between drives and memory; None where nothing does."""
        return next((backend.backend for backend in self._residency.backends.values()), None)

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that drives may have begun to move before a fetch whose turn is next."""
        return sum(backend.ahead_nbytes for backend in self._residency.backends.values())

    def check(self) -> None:
        """Verify all invariants; for tests and the debug flag."""
        with self._lock:
            self._residency.check(self._offloaded.booked())

    def close(self) -> None:
        """Return every buffer and remove the swap file, in whatever state partitions are. Nothing in a forked child."""
        if self._lock.is_elsewhere:
            return
        with self._lock:
            try:
                self._offloaded.close()
            finally:
                self._residency.close()
                self.access.clear()

    def check_process(self, verb: str) -> None:
        """Raise StateError in a forked child, which cannot do what `verb` says."""
        self._lock.check_process(verb)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child of the process that the store belongs to."""
        return self._lock.is_elsewhere

    # Making room. Called with the lock held; waiting gives it up.

    def _acquire(
        self, keys: Sequence[Key], by: Reservation | None, fresh: bool = False, prefix_nbytes: int | None = None,
        wait: bool = True,
    ) -> list[Partition]:  # fmt: skip
        """Bring all partitions into memory, the largest first, so that the rest fits into what is left of the arena."""
        partitions = [self[key] for key in keys]
        by_size = sorted(partitions, key=lambda partition: -partition.spec.nbytes)
        try:
            for partition in by_size:
                self._bring(partition, fresh, by, prefix_nbytes, wait)
        except TierMemoryError:
            # Earlier buffers may lie in the middle of the free space: start from an empty arena, once.
            self._clear(keys)
            for partition in by_size:
                self._bring(partition, fresh, by, prefix_nbytes, wait)
        for partition in by_size:
            if partition.state is State.READING:
                self._residency.settle(partition)
            if prefix_nbytes is None:
                partition.fill()
            self._eviction.use(partition)
        return partitions

    def _bring(
        self, partition: Partition, fresh: bool, by: Reservation | None, prefix_nbytes: int | None, wait: bool
    ) -> None:
        """Make sure that a partition has its value, or a fetch under way, after waiting for transfers and, with `wait`,
        for other parties' leases where its arena is full.
        """
        if not partition.absent and partition.state is not State.FAILED:
            return
        if fresh and partition.state is State.FAILED:
            # Nothing of what is lost is wanted.
            self._residency.discard(partition)
        buffer = self._take_now(partition)
        while buffer is None and partition.absent:
            arena = arena_name(partition.key)
            if not self._make_room(arena):
                if not wait or self.access.others_are_stuck(by):
                    claimed = [other for other in self._eviction.inside(arena) if self.access.claims(other.key)]
                    raise self._buffers.no_room(partition, claimed)
                self.access.wait_for_others(by, "room in a pool", partition.key)
            buffer = self._take_now(partition)
        if partition.state is State.FAILED:
            raise partition.error("use")
        if buffer is None:
            # Another party has brought it.
            return
        if partition.key in self._offloaded:
            # Other parties wait while it comes back: the engine was idle.
            try:
                if fresh:
                    buffer.zero_()
                    self._offloaded.forget(partition.key)
                else:
                    self._offloaded.restore(partition.key, buffer)
            except BaseException:
                self._buffers.give(partition, buffer)
                raise
            partition.materialize(buffer, same=not fresh)
        elif partition.state is State.SPILLED and not fresh:
            self._fetch(partition, buffer, by)
        else:
            self._residency.materialize(partition, buffer, prefix_nbytes)

    def _fetch(self, partition: Partition, buffer: Tensor, by: Reservation | None) -> None:
        # The training loop needs its fetches soon; those of a step in the background have time.
        self._residency.fetch(partition, buffer, priority=1 if by is None else 0)

    def _take_now(self, partition: Partition) -> Tensor | None:
        """Return a buffer without waiting; None if there is no room, or another party has brought the partition."""
        while partition.absent:
            buffer = self._buffers.take(partition)
            if buffer is not None:
                return buffer
            if not self._drop_one(arena_name(partition.key)):
                break
        return None

    def _unclaimed(self, arena: str, rank: Rank) -> Iterator[Partition]:
        """The partitions of a rank that no party has claimed, in the order in which they go."""
        return (each for each in self._eviction.queue(arena, rank) if not self.access.claims(each.key))

    def _drop_one(self, arena: str) -> bool:
        """Give up one clean buffer that no party waits for, without waiting; False when there is none."""
        while True:
            writes = islice(self._unclaimed(arena, Rank.WRITING), _WRITES_POLLED)
            written = (each for each in writes if each.transfer is not None and each.transfer.done())
            found = [next(self._unclaimed(arena, Rank.CLEAN), None), next(written, None)]
            oldest = min((each for each in found if each is not None), key=self._eviction.last_use, default=None)
            if oldest is None:
                return False
            self._residency.settle(oldest)
            # Another party may have claimed it meanwhile: the next oldest is tried.
            if self._drop(oldest):
                return True

    def _make_room(self, arena: str) -> bool:
        """Free one buffer in the order of ranks, after a write or transfer where need be; False when none is left."""
        for rank in Rank:
            while (other := next(self._unclaimed(arena, rank), None)) is not None:
                self._residency.flush([other.key])
                self._residency.settle(other)
                # Another party may have claimed or dropped it during the wait.
                if self._drop(other) or other.buffer is None:
                    return True
        return False

    def _clear(self, asked: Sequence[Key]) -> None:
        """Give up every buffer of the arenas of `asked` that no other party uses, those of `asked` included."""
        for arena in {arena_name(key) for key in asked} & self._buffers.arenas.keys():
            own = {key for key in asked if self.access.claims(key) == 1 and not self[key].leased}
            unused = [
                partition for partition in self._eviction.inside(arena)
                if partition.key in own or not self.access.claims(partition.key)
            ]  # fmt: skip
            self._residency.flush([partition.key for partition in unused])
            for partition in unused:
                self._residency.settle(partition)
            for partition in unused:
                # Another party may have claimed it during the wait.
                self._drop(partition, claims=int(partition.key in asked))

    def _drop(self, partition: Partition, claims: int = 0) -> bool:
        """Free a clean buffer that no party claims, the caller's own `claims` aside; return whether it did."""
        return self.access.claims(partition.key) <= claims and self._residency.drop(partition)


def open_store(
    config: ResolvedConfig, plan: Plan, *, rank: int, device: Device, ledger: Ledger,
    left: Left | None = None,
) -> TieredStore:  # fmt: skip
    """Allocate the partitions' memory and, where the plan has extents, this rank's bytes on drives.

    left: by a process that was killed, to be taken instead of new files.
    """
    backends: dict[Tier, TierBackend] = {}
    # Gradients lie in memory like the states that they are stepped with.
    sections = (config.zero.offload_param, config.zero.offload_optimizer)
    pin = all(section is None or section.pin_memory for section in sections)
    with ExitStack() as undo:
        for tier in Tier:
            if nbytes := plan.file_nbytes(tier):
                folders = config.folders(tier.value)
                assert folders is not None
                options = queue_options(config, folders)
                if left is None or tier is not Tier.NVME:
                    backends[tier] = backend_of(tier).open(folders, nbytes=nbytes, rank=rank, options=options)
                else:
                    options = replace(options, weights=tuple(left.weights))
                    backends[tier] = NvmeTier.open(
                        folders, nbytes=nbytes, rank=rank, options=options, found=left.files
                    )
                undo.callback(backends[tier].close)
        store = TieredStore(
            plan.partitions,
            device=device,
            host=HostMemory(device, pin=pin, ledger=ledger),
            ledger=ledger,
            pools=plan.pools,
            backends=backends,
            rank=rank,
            overlap=plan.policy.overlap,
        )
        undo.pop_all()
    return store


def open_activation_tier(
    config: ResolvedConfig, *, rank: int, device: Device, ledger: Ledger
) -> ActivationTier | None:
    """Make the tier of the inputs of recomputed blocks; None where they stay on the device."""
    tier = Tier.named(config.checkpoint_tier)
    if tier.on_device:
        return None
    section, paths = config.sections.activation_checkpointing.offload, config.checkpoint_nvme_path
    folders = None if paths is None else SwapFolders(tier, paths, rank, queue_options(config, paths))
    return ActivationTier(
        device, ledger=ledger, pin=section.pin_memory, buffer_count=section.buffer_count,
        overlap=config.sections.overlap, folders=folders,
    )  # fmt: skip
