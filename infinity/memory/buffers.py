"""The buffers of partitions: memory of their own on an addressable tier, a piece of an arena for a tier of drives.

The ledger books every buffer from `take` to `give`. The store's lock guards all methods.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from infinity.errors import TierMemoryError
from infinity.memory.eviction import arena_name
from infinity.memory.ledger import Ledger, PoolUse, mb
from infinity.memory.partition import Partition
from infinity.memory.pool import Arena, piece_nbytes
from infinity.memory.tiers.base import MemoryBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory
from infinity.observability import trace
from infinity.plan.plan import Pools
from infinity.plan.types import Key, Kind, Tier

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
        self.arenas: dict[str, Arena] = {}
        for name, nbytes in (("param", pools.param_nbytes), ("states", pools.states_nbytes)):
            if nbytes:
                with ledger.taking(Tier.CPU, {Kind.POOL: nbytes}, f"the {name} pool"):
                    self.arenas[name] = Arena(name, host.allocate(nbytes))

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
        if not partition.on_drive:
            return self._allocate(partition)
        if not partition.spec.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        name = arena_name(partition.key)
        buffer = self.arenas[name].take(partition.spec.nbytes)
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
        self._ledger.add(Tier.CPU, Kind.POOL, -self.staging.nbytes)
        self.staging = self.staging[:0].clone()
        for arena in self.arenas.values():
            self._ledger.add(Tier.CPU, Kind.POOL, -arena.nbytes)
            arena.close()
        self.arenas = {}

    def _allocate(self, partition: Partition) -> Tensor:
        spec = partition.spec
        kinds = {section.kind: section.nbytes for section in spec.sections}
        with self._ledger.taking(spec.home, kinds, str(spec.key)):
            return self._memory[spec.home].allocate(spec.nbytes)
