"""The store: the only mover of bytes. It leases partitions, fetches and flushes them, and books every buffer.

Data's way: `prefetch` submits a read from NVMe into an arena; `read` and `write` wait for it (or submit it) and lend
typed views; `flush` submits the write-back of what was written. Buffers of NVMe partitions stay in their arena,
clean, until their space is needed: the one used longest ago goes first, one that was fetched ahead and not used yet
goes last. The store never chooses *what* to prefetch.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor

from infinity.errors import TierMemoryError, TransferError
from infinity.log import logger
from infinity.memory.device import Device
from infinity.memory.host import HostMemory
from infinity.memory.ledger import Ledger
from infinity.memory.nvme import NvmeTier
from infinity.memory.partition import Partition, State
from infinity.memory.pool import Arena, piece_nbytes
from infinity.plan.plan import Pools
from infinity.plan.types import Key, Kind, PartitionSpec, Tier


class TieredStore:
    """All partitions of one rank, on their tiers."""

    def __init__(
        self, specs: Sequence[PartitionSpec], *, device: Device, host: HostMemory, ledger: Ledger, pools: Pools,
        nvme: NvmeTier | None = None, rank: int = 0, overlap: bool = True,
    ) -> None:  # fmt: skip
        self._partitions = {spec.key: Partition(spec, rank) for spec in specs}
        self._device = device
        self._host = host
        self._nvme = nvme
        self._ledger = ledger
        self._overlap = overlap
        self._lock = threading.RLock()
        self._clock = 0
        # Buffers that somebody else owns: aliased views of whole units, not booked and not freed here.
        self._adopted: set[Key] = set()
        self._arenas = {
            name: Arena(name, host.allocate(nbytes))
            for name, nbytes in (("param", pools.param_nbytes), ("states", pools.states_nbytes))
            if nbytes
        }
        for arena in self._arenas.values():
            ledger.add(Tier.CPU, Kind.POOL, arena.nbytes)
        for partition in self._partitions.values():
            if partition.on_nvme:
                self._book(partition, Tier.NVME, 1)

    def __getitem__(self, key: Key) -> Partition:
        return self._partitions[key]

    def keys(self) -> Iterable[Key]:
        return self._partitions.keys()

    def adopt(self, key: Key, buffer: Tensor) -> None:
        """Make `buffer` (uint8) the home of a partition that is a view of a whole unit."""
        with self._lock:
            self._adopted.add(key)
            self._partitions[key].materialize(buffer)

    @contextmanager
    def read(self, *keys: Key) -> Iterator[list[Partition]]:
        """Lend partitions for reading: waits for what is in flight, fetches what is on NVMe."""
        held: list[Partition] = []
        try:
            # One hold of the lock: between arrival and lease nobody else may take the buffer away.
            with self._lock:
                for partition in self._acquire(keys):
                    partition.begin_read()
                    held.append(partition)
            yield [*held]
        finally:
            with self._lock:
                for partition in held:
                    partition.end_read()
                    self._reclaim(partition)

    @contextmanager
    def write(self, *keys: Key, fresh: bool = False) -> Iterator[list[Partition]]:
        """Lend partitions to one writer. With `fresh` the old value is not fetched: the writer replaces all of it.

        A partition that was ABSENT comes zeroed.
        """
        held: list[Partition] = []
        try:
            with self._lock:
                for partition in self._acquire(keys, fresh=fresh):
                    if not partition.leased:
                        self._settle(partition)
                    partition.begin_write()
                    held.append(partition)
            yield [*held]
        finally:
            with self._lock:
                for partition in held:
                    partition.end_write()

    def prefetch(self, *keys: Key) -> bool:
        """Submit the fetches that fit without waiting, in order; False when one did not (it is fetched on demand)."""
        if not self._overlap:
            return False
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                if partition.state is State.SPILLED:
                    buffer = self._take(partition, patient=False)
                    if buffer is None:
                        return False
                    self._submit_fetch(partition, buffer)
                # What is there already is as needed as what is fetched now.
                partition.awaited = partition.on_nvme and partition.buffer is not None
            return True

    def flush(self, *keys: Key) -> None:
        """Submit the write-back of what is dirty. The buffers stay readable; without overlap this waits."""
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                extent, buffer = partition.spec.extent, partition.buffer
                if partition.state is State.DIRTY and extent is not None and buffer is not None:
                    assert self._nvme is not None
                    partition.begin_flush(partial(self._nvme.write, extent, buffer))
                    if not self._overlap:
                        self._settle(partition)

    def settle(self) -> None:
        """Flush everything that is dirty, wait for everything in flight, and then raise the first error.

        A transfer that is late is raised at once: waiting as long for each of the others would help nobody.
        """
        errors: list[TransferError] = []
        with self._lock:
            self.flush(*self._partitions)
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
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                if partition.on_nvme and partition.state is State.RESIDENT and not partition.leased:
                    self._give(partition, partition.drop())
                    partition.awaited = False

    def discard(self, *keys: Key) -> None:
        """Forget values; memory of GPU and CPU homes is returned."""
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                self._settle(partition)
                buffer = partition.discard()
                if buffer is not None:
                    self._give(partition, buffer)

    def check(self) -> None:
        """Verify the invariants of every partition, one buffer one partition, and the ledger against the sum."""
        with self._lock:
            buffers: set[int] = set()
            sums: dict[tuple[Tier, Kind], int] = {}
            taken = dict.fromkeys(self._arenas, 0)
            for partition in self._partitions.values():
                partition.check()
                if partition.buffer is not None and partition.spec.nbytes:
                    assert partition.buffer.data_ptr() not in buffers, f"{partition.key} shares its buffer"
                    buffers.add(partition.buffer.data_ptr())
                    if partition.on_nvme:
                        taken[self._arena_name(partition.key)] += piece_nbytes(partition.spec.nbytes)
                if partition.key not in self._adopted and (partition.on_nvme or partition.buffer is not None):
                    for section in partition.spec.sections:
                        entry = (partition.spec.home, section.kind)
                        sums[entry] = sums.get(entry, 0) + section.nbytes
            for name, arena in self._arenas.items():
                assert arena.taken_nbytes == taken[name], f"the {name} pool has pieces that no partition holds"
            for entry in sums.keys() | self._ledger.now.keys():
                booked, held = self._ledger.now.get(entry, 0), sums.get(entry, 0)
                # Units book on the device, too, and pools are booked as a whole.
                exact = entry[0] is not Tier.GPU and entry[1] is not Kind.POOL
                assert booked == held if exact else booked >= held, f"the ledger has {booked} of {entry}, not {held}"

    def close(self) -> None:
        """Return every buffer and remove the swap file, whatever state the partitions are in.

        A transfer that fails only now is logged: nobody can read what it moved any more.
        """
        with self._lock, ExitStack() as stack:
            # Backwards: what is in flight ends first, then memory is unpinned, then buffers go.
            stack.callback(self._forget)
            stack.callback(self._host.close)
            if self._nvme is not None:
                try:
                    self._nvme.close()
                except TransferError as error:
                    logger.error("while closing the store: %s", error)

    def _forget(self) -> None:
        for partition in self._partitions.values():
            if partition.on_nvme:
                self._book(partition, Tier.NVME, -1)
            elif partition.buffer is not None and partition.key not in self._adopted:
                self._book(partition, partition.spec.home, -1)
        for arena in self._arenas.values():
            self._ledger.add(Tier.CPU, Kind.POOL, -arena.nbytes)
            arena.close()
        self._partitions, self._arenas, self._nvme = {}, {}, None

    def _acquire(self, keys: Sequence[Key], fresh: bool = False) -> list[Partition]:
        """Bring all partitions into memory. Largest first, so that what is left fits into what is left of the arena."""
        partitions = [self._partitions[key] for key in keys]
        self._clock += 1
        for partition in partitions:
            partition.used = self._clock
        by_size = sorted(partitions, key=lambda partition: -partition.spec.nbytes)
        try:
            for partition in by_size:
                self._bring(partition, fresh, set(keys))
        except TierMemoryError:
            # Earlier buffers may lie in the middle of the free space: start from an empty arena, once.
            self._clear({self._arena_name(key) for key in keys})
            for partition in by_size:
                self._bring(partition, fresh, set(keys))
        for partition in by_size:
            if partition.state is State.READING:
                self._settle(partition)
            partition.awaited = False
        return partitions

    def _bring(self, partition: Partition, fresh: bool, pinned: set[Key]) -> None:
        """Make sure that a partition has its value, or a fetch under way."""
        if partition.state is State.FAILED:
            raise partition.error("use")
        if partition.state not in (State.ABSENT, State.SPILLED):
            return
        buffer = self._take(partition, patient=True, pinned=pinned)
        assert buffer is not None
        if partition.state is State.SPILLED and not fresh:
            self._submit_fetch(partition, buffer)
        else:
            # Not before there is room: the old value is lost now.
            partition.discard()
            partition.materialize(buffer.zero_())

    def _submit_fetch(self, partition: Partition, buffer: Tensor) -> None:
        assert self._nvme is not None and partition.spec.extent is not None
        try:
            partition.begin_fetch(buffer, partial(self._nvme.read, partition.spec.extent, buffer))
        except BaseException:
            self._give(partition, buffer)
            raise

    def _take(self, partition: Partition, *, patient: bool, pinned: Collection[Key] = ()) -> Tensor | None:
        """A buffer for a partition: new memory at a GPU or CPU home, a piece of an arena for NVMe.

        `patient` waits for transfers and gives up clean buffers until there is room; `pinned` are not given up.
        """
        spec = partition.spec
        if not partition.on_nvme:
            return self._allocate(partition)
        if not spec.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        arena = self._arenas[self._arena_name(spec.key)]
        while (piece := arena.take(spec.nbytes)) is None:
            if not self._make_room(arena.name, patient=patient, pinned=pinned):
                if not patient:
                    return None
                raise self._no_room(arena, partition, pinned)
        return piece

    def _allocate(self, partition: Partition) -> Tensor:
        spec = partition.spec
        try:
            if spec.home is Tier.GPU:
                buffer = self._device.empty(spec.nbytes, torch.uint8)
            else:
                buffer = self._host.allocate(spec.nbytes)
        except (OSError, RuntimeError) as error:
            raise TierMemoryError(
                f"no room on {spec.home.value} for {spec.key}: asked {spec.nbytes / 1e6:.1f} MB, "
                f"used {self._ledger.total(spec.home) / 1e6:.1f} MB, and the system refused more: {error}"
            ) from error
        self._book(partition, spec.home, 1)
        return buffer

    def _in_arena(self, name: str) -> list[Partition]:
        """Partitions whose buffers lie in one arena and are not leased: the one used longest ago first."""
        found = [
            partition
            for partition in self._partitions.values()
            if partition.on_nvme and partition.spec.nbytes and partition.buffer is not None
            and not partition.leased and self._arena_name(partition.key) == name
        ]  # fmt: skip
        return sorted(found, key=lambda partition: partition.used)

    def _make_room(self, name: str, *, patient: bool, pinned: Collection[Key]) -> bool:
        """Give up one buffer of an arena; False when there is none to give up.

        Clean ones go first, then those that must be written before, then what was fetched ahead and not used yet.
        """
        others = [other for other in self._in_arena(name) if other.key not in pinned]
        spare = [other for other in others if not other.awaited]
        for other in spare:
            if other.state is State.WRITING and other.transfer is not None and other.transfer.done():
                self._settle(other)
            if other.state is State.RESIDENT:
                self.drop(other.key)
                return True
        if not patient:
            return False
        for other in [*spare, *(other for other in others if other.awaited)]:
            self.flush(other.key)
            self._settle(other)
            if other.state is State.RESIDENT:
                self.drop(other.key)
                return True
        return False

    def _clear(self, names: set[str]) -> None:
        """Give up every buffer of some arenas that nobody uses."""
        for name in names & self._arenas.keys():
            keys = [partition.key for partition in self._in_arena(name)]
            self.flush(*keys)
            for key in keys:
                self._settle(self._partitions[key])
            self.drop(*keys)

    def _give(self, partition: Partition, buffer: Tensor) -> None:
        """Return a buffer to where `_take` had it from."""
        if partition.key in self._adopted:
            self._adopted.discard(partition.key)
        elif partition.on_nvme:
            if partition.spec.nbytes:
                self._arenas[self._arena_name(partition.key)].give(buffer)
        else:
            self._book(partition, partition.spec.home, -1)
            if partition.spec.home is Tier.CPU:
                self._host.release(buffer)

    def _settle(self, partition: Partition) -> None:
        """Wait for a transfer in flight. A partition that fails gives its buffer back, and the error is raised."""
        if partition.transfer is not None:
            try:
                partition.complete()
            finally:
                self._reclaim(partition)

    def _reclaim(self, partition: Partition) -> None:
        buffer = partition.surrender()
        if buffer is not None:
            self._give(partition, buffer)

    def _arena_name(self, key: Key) -> str:
        return "states" if key.kind is Kind.STATES else "param"

    def _book(self, partition: Partition, tier: Tier, sign: int) -> None:
        for section in partition.spec.sections:
            self._ledger.add(tier, section.kind, sign * section.nbytes)

    def _no_room(self, arena: Arena, partition: Partition, pinned: Collection[Key]) -> TierMemoryError:
        owners = sorted(
            (
                other
                for other in self._partitions.values()
                if other.on_nvme and other.buffer is not None and self._arena_name(other.key) == arena.name
                and (other.leased or other.key in pinned)
            ),
            key=lambda other: -other.spec.nbytes,
        )[:3]  # fmt: skip
        held = ", ".join(f"{other.key} {other.spec.nbytes / 1e6:.1f} MB" for other in owners) or "nobody"
        return TierMemoryError(
            f"no room on cpu for {partition.key}: asked {partition.spec.nbytes / 1e6:.1f} MB of the {arena.name} pool, "
            f"used {arena.taken_nbytes / 1e6:.1f} MB, limit {arena.nbytes / 1e6:.1f} MB; largest leases: {held}. "
            "Lower sub_group_size, or split the leases."
        )
