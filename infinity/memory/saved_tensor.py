"""One tensor of the activation tier: where its bytes are, and which copies of it are in flight.

Its way: `begin_down` from the device into a buffer in CPU memory, `begin_write` from there to a place on a drive, and
`release_buffer`; then `begin_read` into a buffer again, `begin_up` to the device, and `hand_out`. Without a drive the
bytes stay in the buffer.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.memory.growable_pool import PoolBuffer
from infinity.memory.tiers.base import TierBackend
from infinity.observability import trace
from infinity.ops.transfer import Transfer
from infinity.plan.types import Extent


@dataclass(frozen=True, slots=True)
class ActivationExtent(Extent):
    """A checkpoint's place in a swap file of the activation tier."""

    number: int

    def __str__(self) -> str:
        return f"checkpoint {self.number}"


@dataclass(slots=True, eq=False)
class Record:
    """One tensor that is kept. `buffer` in CPU memory or `place` on the drive has its bytes, or both.

    turn: the place of its backward among those that are expected.
    """

    number: int
    turn: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    buffer: PoolBuffer | None
    place: PoolBuffer | None = None
    # Copies in flight: from the device to the buffer, to the drive and from there, and a tensor on its way up.
    down: Transfer | None = None
    writing: Transfer | None = None
    reading: Transfer | None = None
    up: tuple[Tensor, Transfer] | None = None
    # The copy to the device of a tensor that was handed out: it reads the buffer, and the host has not waited for it.
    # The latest of several, which go up in turn.
    leaving: Transfer | None = None

    def __str__(self) -> str:
        return f"checkpoint {self.number}"

    @property
    def values(self) -> Tensor:
        """Its bytes in the buffer, as elements: [nbytes / element], contiguous."""
        assert self.buffer is not None
        return self.buffer.memory[: self.nbytes].view(self.dtype)

    @property
    def transfers(self) -> list[Transfer]:
        """The copies that may still use its buffer or its place."""
        up = self.up[1] if self.up is not None else None
        found = [self.down, self.writing, self.reading, up, self.leaving]
        return [transfer for transfer in found if transfer is not None]

    @property
    def is_spare(self) -> bool:
        """Whether another record may have its buffer: the drive has the bytes, and nothing is in flight."""
        written = self.writing is not None and self.writing.done()
        left = self.leaving is None or self.leaving.done()
        return written and left and self.buffer is not None and self.reading is None and self.up is None

    @property
    def is_filled(self) -> bool:
        """Whether the buffer has the bytes and the drive does not."""
        return self.place is None and self.buffer is not None and self.down is not None and self.down.done()

    def begin_down(self, transfer: Transfer) -> None:
        """Note the copy from the device into the buffer."""
        self.down = transfer

    def begin_write(self, place: PoolBuffer) -> None:
        """Write the buffer, which the device has filled, to the drive."""
        assert self.buffer is not None
        self.place = place
        self.writing = self._file.write(self._extent, self.buffer.memory)
        self.down = None

    def begin_read(self, buffer: PoolBuffer) -> None:
        """Read the bytes from the drive into a new buffer."""
        self.buffer = buffer
        self.reading = self._file.read(self._extent, buffer.memory)

    def end_read(self) -> None:
        """Wait for a read in flight; TransferError where it fails."""
        if self.reading is not None:
            self.wait(self.reading, "NVMe read")
            self.reading = None

    def begin_up(self, flat: Tensor, transfer: Transfer) -> None:
        """Note the copy from the buffer into `flat`, on the device."""
        self.up = flat, transfer

    def hand_out(self) -> tuple[Tensor, Transfer]:
        """Give up the tensor on its way up, and its copy."""
        assert self.up is not None
        flat, self.leaving = self.up
        self.up = None
        return flat, self.leaving

    def release_buffer(self) -> tuple[PoolBuffer, Transfer | None] | None:
        """Give up the buffer, and the copy that still reads it, if the drive has the bytes; None otherwise.

        TransferError where they could not be written: then the buffer goes with the record.
        """
        if self.buffer is None or self.writing is None or not self.writing.done():
            return None
        self.writing.wait()
        buffer, self.buffer, self.reading = self.buffer, None, None
        leaving, self.leaving = self.leaving, None
        return buffer, leaving

    def release(self) -> list[PoolBuffer]:
        """Give up the buffer and the place at the record's end."""
        pieces = [piece for piece in (self.buffer, self.place) if piece is not None]
        self.buffer = self.place = None
        return pieces

    def wait(self, transfer: Transfer, cause: str) -> None:
        """Wait for one of the record's copies."""
        with trace.span(trace.WAIT, cause, self, self.nbytes):
            transfer.wait()

    @property
    def _file(self) -> TierBackend:
        assert self.place is not None and self.place.block.file is not None
        return self.place.block.file

    @property
    def _extent(self) -> ActivationExtent:
        assert self.place is not None
        return ActivationExtent(self.place.offset, self.place.nbytes, self.number)


class SavedTensor:
    """Stands for a tensor of the tier in autograd's graph; when the graph frees it, its record ends."""

    __slots__ = ("__weakref__", "_dead", "record")

    def __init__(self, record: Record, dead: deque[Record]) -> None:
        self.record = record
        self._dead = dead

    def __del__(self) -> None:
        # Runs at any moment in any thread, also inside the tier's own methods: the tier's next call ends the record.
        self._dead.append(self.record)
