"""Space that grows during the first step and is then reused, for bytes that depend on the batch and not on the plan.

A block is a buffer in CPU memory, or a file of its own. When no block has room, another is added. Once all pieces have
been returned and more was needed than ever before, one block of that size replaces all others. The ledger books pieces
that are out as activations, and reserved bytes that are not out as a pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.memory.ledger import Ledger
from infinity.memory.pool import Arena, piece_nbytes
from infinity.memory.tiers.base import TierBackend
from infinity.memory.tiers.pinned import HostMemory
from infinity.plan.types import Kind, Tier


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


class GrowablePool:
    """Hands out pieces and takes them back. holds_values: values live in the pieces and do not only pass through."""

    def __init__(
        self, tier: Tier, make: Callable[[int], PoolBlock], *, ledger: Ledger, holds_values: bool, owner: str,
        least_nbytes: int = 0,
    ) -> None:  # fmt: skip
        self._tier = tier
        self._make = make
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
            self._blocks.append(self._make(size))

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


def host_pool(host: HostMemory, *, ledger: Ledger, holds_values: bool) -> GrowablePool:
    """Slabs in CPU memory, pinned where `host` pins."""
    return GrowablePool(
        Tier.CPU, lambda nbytes: PoolBlock(_HostArena("checkpoints", host, nbytes)), ledger=ledger,
        holds_values=holds_values, owner="activation checkpoints" if holds_values else "staging of checkpoints",
    )  # fmt: skip


def file_pool(open_file: Callable[[int], TierBackend], tier: Tier, *, ledger: Ledger) -> GrowablePool:
    """Slabs that are swap files on a tier; `open_file` makes one of so many bytes."""

    def make(nbytes: int) -> PoolBlock:
        file = open_file(nbytes)
        # An arena of places: nothing is ever read or written in a tensor without memory.
        return PoolBlock(Arena("checkpoints", torch.empty(nbytes, dtype=torch.uint8, device="meta")), file)

    return GrowablePool(
        tier, make, ledger=ledger, holds_values=True, owner="activation checkpoints", least_nbytes=FILE_NBYTES
    )


# The least size of a file: the first ones of a first step would be many and small.
FILE_NBYTES = 64 << 20


class _HostArena(Arena):
    """An arena whose buffer is unpinned when it is closed."""

    def __init__(self, name: str, host: HostMemory, nbytes: int) -> None:
        super().__init__(name, host.allocate(nbytes))
        self._host = host

    def close(self) -> None:
        self._host.release(self.buffer)
        super().close()
