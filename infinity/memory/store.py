"""The store: the only mover of bytes. It leases partitions, fetches and flushes them, and books every buffer.

Data's way: `prefetch` submits a read from NVMe into an arena; `read` and `write` wait for it (or submit it) and lend typed
views; `flush` submits the write-back of what was written. Buffers of NVMe partitions stay in their arena, clean, until
their space is needed: the one used longest ago goes first, one that was fetched ahead and not used yet goes last. The
store never chooses *what* to prefetch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from infinity.errors import TierMemoryError
from infinity.memory.device import Device
from infinity.memory.host import HostMemory
from infinity.memory.ledger import Ledger
from infinity.memory.nvme import NvmeTier
from infinity.memory.partition import Partition, State
from infinity.memory.pool import Arena
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
        partitions = self._acquire(keys)
        held: list[Partition] = []
        try:
            with self._lock:
                for partition in partitions:
                    partition.begin_read()
                    held.append(partition)
            yield partitions
        finally:
            with self._lock:
                for partition in held:
                    partition.end_read()

    @contextmanager
    def write(self, *keys: Key, fresh: bool = False) -> Iterator[list[Partition]]:
        """Lend partitions to one writer. With `fresh` the old value is not fetched: the writer replaces all of it.

        A partition that was ABSENT comes zeroed.
        """
        partitions = self._acquire(keys, fresh=fresh)
        held: list[Partition] = []
        try:
            with self._lock:
                for partition in partitions:
                    self._settle(partition, wanted=(State.RESIDENT, State.DIRTY))
                    partition.begin_write()
                    held.append(partition)
            yield partitions
        finally:
            with self._lock:
                for partition in held:
                    partition.end_write()

    def prefetch(self, *keys: Key) -> bool:
        """Submit the fetches that fit without waiting, in order; False when one did not fit (it is fetched on demand)."""
        if not self._overlap:
            return False
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                if partition.state is not State.SPILLED:
                    continue
                buffer = self._take(partition, patient=False)
                if buffer is None:
                    return False
                self._submit_fetch(partition, buffer)
                partition.awaited = True
            return True

    def flush(self, *keys: Key) -> None:
        """Submit the write-back of what is dirty. The buffers stay readable; without overlap this waits."""
        with self._lock:
            for key in keys:
                partition = self._partitions[key]
                if partition.state is State.DIRTY and partition.buffer is not None and partition.spec.extent is not None:
                    assert self._nvme is not None
                    partition.begin_flush(self._nvme.write(partition.spec.extent, partition.buffer))
                    if not self._overlap:
                        partition.complete()

    def settle(self) -> None:
        """Flush everything that is dirty and wait for everything in flight; raises the first error."""
        with self._lock:
            self.flush(*self._partitions)
            for partition in self._partitions.values():
                self._settle(partition)

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
            for partition in self._partitions.values():
                partition.check()
                if partition.buffer is not None and partition.spec.nbytes:
                    assert partition.buffer.data_ptr() not in buffers, f"{partition.key} shares its buffer"
                    buffers.add(partition.buffer.data_ptr())
                if partition.key not in self._adopted and (partition.on_nvme or partition.buffer is not None):
                    for section in partition.spec.sections:
                        entry = (partition.spec.home, section.kind)
                        sums[entry] = sums.get(entry, 0) + section.nbytes
            for entry, nbytes in sums.items():
                assert self._ledger.now.get(entry, 0) >= nbytes, f"the ledger has less {entry} than the partitions"

    def close(self) -> None:
        """Return every buffer and remove the swap file, whatever state the partitions are in."""
        with self._lock:
            try:
                for partition in self._partitions.values():
                    if partition.on_nvme:
                        self._book(partition, Tier.NVME, -1)
                    elif partition.buffer is not None and partition.key not in self._adopted:
                        self._book(partition, partition.spec.home, -1)
                for arena in self._arenas.values():
                    self._ledger.add(Tier.CPU, Kind.POOL, -arena.nbytes)
                    arena.close()
                self._partitions, self._arenas = {}, {}
            finally:
                if self._nvme is not None:
                    self._nvme.close()
                    self._nvme = None
                self._host.close()

    def _acquire(self, keys: Sequence[Key], fresh: bool = False) -> list[Partition]:
        """Bring all partitions into memory. Largest first, so that what is left fits into what is left of the arena."""
        partitions = [self._partitions[key] for key in keys]
        with self._lock:
            self._clock += 1
            for partition in partitions:
                partition.used = self._clock
            by_size = sorted(partitions, key=lambda partition: -partition.spec.nbytes)
            try:
                for partition in by_size:
                    self._bring(partition, fresh, set(keys))
            except TierMemoryError:
                # What was fetched ahead may lie in the middle of the free space: start from an empty arena, once.
                for partition in by_size:
                    self._settle(partition)
                self.drop(*keys)
                for partition in by_size:
                    self._bring(partition, fresh, set(keys))
            for partition in by_size:
                if partition.state is State.READING:
                    partition.complete()
                partition.awaited = False
        return partitions

    def _bring(self, partition: Partition, fresh: bool, pinned: set[Key]) -> None:
        """Make sure that a partition has its value, or a fetch under way."""
        if partition.state is State.FAILED:
            raise partition.error("use")
        if fresh and partition.state in (State.SPILLED, State.READING):
            self.discard(partition.key)
        if partition.state is State.ABSENT:
            buffer = self._take(partition, patient=True, pinned=pinned)
            assert buffer is not None
            buffer.zero_()
            partition.materialize(buffer)
        elif partition.state is State.SPILLED:
            buffer = self._take(partition, patient=True, pinned=pinned)
            assert buffer is not None
            self._submit_fetch(partition, buffer)

    def _submit_fetch(self, partition: Partition, buffer: Tensor) -> None:
        assert self._nvme is not None and partition.spec.extent is not None
        try:
            transfer = self._nvme.read(partition.spec.extent, buffer)
        except BaseException:
            self._give(partition, buffer)
            raise
        partition.begin_fetch(buffer, transfer)

    def _take(self, partition: Partition, *, patient: bool, pinned: set[Key] | None = None) -> Tensor | None:
        """A buffer for a partition: new memory at a GPU or CPU home, a piece of an arena for NVMe.

        `patient` waits for transfers and gives up clean buffers until there is room; `pinned` are not given up.
        """
        spec = partition.spec
        if not partition.on_nvme:
            self._book(partition, spec.home, 1)
            if spec.home is Tier.GPU:
                return self._device.empty(spec.nbytes, torch.uint8)
            return self._host.allocate(spec.nbytes)
        if not spec.nbytes:
            return self._host.allocate(0)
        arena = self._arenas[self._arena_name(spec.key)]
        while (piece := arena.take(spec.nbytes)) is None:
            if not self._make_room(spec.key, patient=patient, pinned=pinned or set()):
                if not patient:
                    return None
                raise self._no_room(arena, partition)
        return piece

    def _make_room(self, key: Key, *, patient: bool, pinned: set[Key]) -> bool:
        """Give up one buffer of the same arena, or wait for one transfer; False when nothing is left to do."""
        others = [
            other
            for other in self._partitions.values()
            if other.on_nvme and other.buffer is not None and other.spec.nbytes and not other.leased
            and self._arena_name(other.key) == self._arena_name(key) and other.key not in pinned
        ]  # fmt: skip
        others.sort(key=lambda other: (other.awaited, other.used))
        for other in others:
            if other.state is State.WRITING and other.transfer is not None and other.transfer.done():
                other.complete()
            if other.state is State.RESIDENT and (patient or not other.awaited):
                self._give(other, other.drop())
                other.awaited = False
                return True
        if patient:
            for other in others:
                if other.state is State.DIRTY:
                    self.flush(other.key)
                if other.state in (State.WRITING, State.READING):
                    other.complete()
                    return True
                if other.state is State.RESIDENT:
                    return True
        return False

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

    def _settle(self, partition: Partition, wanted: tuple[State, ...] = ()) -> None:
        """Wait for a transfer in flight, unless the state is one of `wanted`."""
        if partition.transfer is not None and partition.state not in wanted:
            partition.complete()

    def _arena_name(self, key: Key) -> str:
        return "states" if key.kind is Kind.STATES else "param"

    def _book(self, partition: Partition, tier: Tier, sign: int) -> None:
        for section in partition.spec.sections:
            self._ledger.add(tier, section.kind, sign * section.nbytes)

    def _no_room(self, arena: Arena, partition: Partition) -> TierMemoryError:
        owners = sorted(
            (other for other in self._partitions.values() if other.buffer is not None and other.leased),
            key=lambda other: -other.spec.nbytes,
        )[:3]
        held = ", ".join(f"{other.key} {other.spec.nbytes / 1e6:.1f} MB" for other in owners) or "nobody"
        return TierMemoryError(
            f"no room on cpu for {partition.key}: asked {partition.spec.nbytes / 1e6:.1f} MB of the {arena.name} pool, "
            f"used {arena.taken_nbytes / 1e6:.1f} MB, limit {arena.nbytes / 1e6:.1f} MB; largest leases: {held}. "
            "Lower sub_group_size, or split the leases."
        )
