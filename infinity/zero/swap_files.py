"""The files that one rank's values go to while a model is being built, and the memory of what is on its way there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.memory.free_bytes import free_nvme_nbytes
from infinity.memory.pages import page_aligned
from infinity.memory.tiers.base import QueueOptions
from infinity.memory.tiers.nvme import NvmeTier
from infinity.ops.transfer import Transfer
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, align_up

# Swap files grow by whole files of so many bytes, or of a share of what is free where that is less.
_FILE_NBYTES, _FREE_SHARE = 1 << 30, 4
# Bytes written at a time, and how many such parts are in flight.
_PART_NBYTES = 8 << 20
_PARTS_MAX = 8


class SwapFiles:
    """Swap files in `directory` (the folders of one tier) that grow with what is written. Used by one thread."""

    def __init__(self, directory: Sequence[str], *, rank: int, timeout_seconds: float) -> None:
        self._directory = directory
        self._rank = rank
        self._timeout = timeout_seconds
        # Each with the bytes that are taken.
        self._files: list[tuple[NvmeTier, int]] = []
        # Parts on their way to the drive, with the memory that they lie in, and memory for others.
        self._writing: deque[tuple[Transfer, Tensor]] = deque()
        self._rooms: list[Tensor] = []

    @property
    def buffer_nbytes(self) -> int:
        """Bytes of memory for parts on their way to the drive."""
        return (len(self._writing) + len(self._rooms)) * _PART_NBYTES

    def allocate(self, nbytes: int) -> tuple[NvmeTier, Extent]:
        """Return a place for `nbytes` (a multiple of the alignment) in the newest file, or in a new one."""
        if not self._files or self._files[-1][1] + nbytes > self._files[-1][0].nbytes:
            share = free_nvme_nbytes(self._directory) // _FREE_SHARE // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT
            size = max(nbytes, min(_FILE_NBYTES, share))
            options = QueueOptions(timeout_seconds=self._timeout)
            tier = NvmeTier.open(self._directory, nbytes=size, rank=self._rank, options=options)
            self._files.append((tier, 0))
        tier, used = self._files[-1]
        self._files[-1] = (tier, used + nbytes)
        return tier, Extent(used, nbytes)

    def write(self, tier: NvmeTier, extent: Extent, values: Tensor) -> None:
        """Submit writes of the bytes of `values` in parts, from buffers that direct I/O accepts."""
        flat = values.detach().contiguous().view(-1).view(torch.uint8)
        for begin in range(0, flat.numel(), _PART_NBYTES):
            part = flat[begin : begin + _PART_NBYTES]
            room = self._room()
            room[: part.numel()].copy_(part)
            nbytes = align_up(part.numel(), EXTENT_ALIGNMENT)
            self._writing.append((tier.write(Extent(extent.offset + begin, nbytes), room[:nbytes]), room))

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

    def remove(self, tier: NvmeTier | None) -> None:
        """Remove a file in which no values are left."""
        for index, (candidate, _) in enumerate(self._files):
            if candidate is tier:
                candidate.close()
                del self._files[index]
                return

    def close(self) -> None:
        """Remove every file; idempotent."""
        # Their queues end what is in flight.
        for tier, _ in self._files:
            tier.close()
        self._files.clear()
        self._writing.clear()
        self._rooms.clear()

    def _room(self) -> Tensor:
        """Return memory for a part: new memory, or that of the oldest part in flight, once it is written."""
        if self._rooms:
            return self._rooms.pop()
        if len(self._writing) < _PARTS_MAX:
            return page_aligned(_PART_NBYTES)
        transfer, room = self._writing.popleft()
        transfer.wait()
        return room


def read_extent(tier: NvmeTier, extent: Extent) -> tuple[Tensor, list[Transfer]]:
    """Submit reads of what `SwapFiles.write` wrote, which is on the drive; returns its bytes (uint8, flat) to come."""
    offset, nbytes = extent.offset, extent.nbytes
    buffer = page_aligned(nbytes)
    # Cut as it was written: of each part the tier knows a checksum.
    parts = [(begin, buffer[begin : begin + _PART_NBYTES]) for begin in range(0, nbytes, _PART_NBYTES)]
    return buffer, [tier.read(Extent(offset + begin, part.numel()), part) for begin, part in parts]
