"""A bounded arena: one buffer of a size that the plan fixes, handed out in pieces."""

from __future__ import annotations

from bisect import bisect

from torch import Tensor

from infinity.plan.types import EXTENT_ALIGNMENT, align_up


def piece_nbytes(nbytes: int) -> int:
    """What a piece of `nbytes` bytes takes of an arena."""
    return max(align_up(nbytes, EXTENT_ALIGNMENT), EXTENT_ALIGNMENT)


class Arena:
    """First-fit allocation inside one uint8 tensor; pieces are aligned for direct I/O and coalesced when returned."""

    def __init__(self, name: str, buffer: Tensor) -> None:
        self.name = name
        self.nbytes = buffer.numel()
        self._buffer: Tensor | None = buffer
        # Free ranges (offset, nbytes), by offset.
        self._free: list[tuple[int, int]] = [(0, self.nbytes)]
        # Offset -> bytes of the pieces that are out.
        self._taken: dict[int, int] = {}
        # Bytes of the pieces that are out, rounded up as `piece_nbytes` does: asked at each use.
        self.taken_nbytes = 0
        self.most_nbytes = 0

    @property
    def buffer(self) -> Tensor:
        """All of it: uint8, [nbytes]."""
        assert self._buffer is not None, f"the {self.name} pool is closed"
        return self._buffer

    def take(self, nbytes: int) -> Tensor | None:
        """A piece of `nbytes` bytes, or None when no free range is long enough."""
        if self._buffer is None:
            return None
        wanted = piece_nbytes(nbytes)
        for index, (offset, length) in enumerate(self._free):
            if length >= wanted:
                rest = [(offset + wanted, length - wanted)] if length > wanted else []
                self._free[index : index + 1] = rest
                piece = self._buffer[offset : offset + nbytes]
                self._taken[offset] = wanted
                self.taken_nbytes += wanted
                self.most_nbytes = max(self.most_nbytes, self.taken_nbytes)
                return piece
        return None

    def give(self, piece: Tensor) -> None:
        """Return a piece that `take` handed out."""
        if self._buffer is None:
            return
        offset = int(piece.storage_offset() - self._buffer.storage_offset())
        length = self._taken.pop(offset)
        self.taken_nbytes -= length
        first = last = bisect(self._free, (offset, length))
        begin, end = offset, offset + length
        if first and sum(self._free[first - 1]) == begin:
            first -= 1
            begin = self._free[first][0]
        if last < len(self._free) and self._free[last][0] == end:
            end = sum(self._free[last])
            last += 1
        self._free[first:last] = [(begin, end - begin)]

    def close(self) -> None:
        """Drop the reference to the buffer; pieces that are still referenced keep it alive."""
        self._buffer = None
