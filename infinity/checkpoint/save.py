"""What one rank writes: its share of the partitions, streamed into files of its own, and an index of them.

Bytes go straight from the tiers' memory to the drive, one partition at a time with the next ones on their way, under
read leases. Where anything fails, nothing of it is left.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infinity.checkpoint.files import Staging, Writer, file_nbytes
from infinity.checkpoint.format import (
    ALIGNMENT,
    BLOCK_NBYTES,
    BUFFER,
    Array,
    Extent,
    FileInfo,
    RankIndex,
    data_name,
    index_name,
    replace_file,
)
from infinity.checkpoint.pieces import FROZEN, WEIGHTS, Piece
from infinity.checkpoint.publish import remove_rank
from infinity.log import Progress
from infinity.memory.store import Reservation, TieredStore
from infinity.ops.aio import Queue
from infinity.ops.checksum import checksum
from infinity.plan.types import align_up

# Pieces whose writes are in flight, besides the one that is being submitted, and pieces fetched ahead from NVMe.
_BEHIND = 2
_AHEAD = 2


@dataclass(frozen=True)
class Capture:
    """What one rank is to write.

    `buffers` are the module's, by name. `previous` is an earlier checkpoint of the same folder and this rank's index in
    it, whose file of frozen parameters may still be right.
    """

    rank: int
    pieces: tuple[Piece, ...]
    buffers: tuple[tuple[str, str, Tensor], ...] = ()
    rng: Mapping[str, Any] = field(default_factory=dict)
    singles: Mapping[str, Any] = field(default_factory=dict)
    previous: tuple[Path, RankIndex] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(piece.nbytes for piece in self.pieces) + sum(buffer.nbytes for _, _, buffer in self.buffers)


def write(
    capture: Capture, store: TieredStore, folder: Path, identity: str, queue: Queue, *,
    by: Reservation | None = None, progress: Progress | None = None,
) -> FileInfo:  # fmt: skip
    """Stream a capture into `folder` and leave its index there; returns the index's file.

    by: on whose behalf partitions are read. Where anything fails, no file of this rank is left.
    """
    progress = progress or Progress(f"saving to {folder}", capture.nbytes)
    with ExitStack() as undo:
        undo.callback(lambda: remove_rank(folder, identity, capture.rank))
        files: dict[str, int] = {}
        extents: list[Extent] = []
        arrays: list[Array] = []
        linked = _link_frozen(capture, store, folder, identity, by)
        left = [piece for piece in capture.pieces if linked is None or piece.part != FROZEN]
        for part in dict.fromkeys([*(piece.part for piece in left), *([WEIGHTS] if capture.buffers else [])]):
            pieces = [piece for piece in left if piece.part == part]
            buffers = capture.buffers if part == WEIGHTS else ()
            stream = _Stream(folder / data_name(identity, capture.rank, part), pieces, buffers, queue)
            written, placed = stream.run(store, by, progress)
            arrays += [replace(array, extent=array.extent + len(extents)) for array in placed]
            extents += written
            files[stream.path.name] = sum(extent.nbytes for extent in written)
        if linked is not None:
            arrays += [replace(array, extent=array.extent + len(extents)) for array in linked[1]]
            extents += linked[0]
            files[linked[0][0].file] = sum(extent.nbytes for extent in linked[0])
        index = RankIndex(
            capture.rank, files, tuple(extents), tuple(arrays), dict(capture.rng), dict(capture.singles)
        ).to_bytes()
        name = index_name(identity, capture.rank)
        replace_file(folder / name, index)
        undo.pop_all()
    return FileInfo(name, len(index), checksum(index))


class _Stream:
    """One file being written from pieces, then from buffers."""

    def __init__(
        self, path: Path, pieces: Sequence[Piece], buffers: Sequence[tuple[str, str, Tensor]], queue: Queue
    ) -> None:
        self.path = path
        self._pieces = pieces
        self._buffers = buffers
        sizes = [*(piece.nbytes for piece in pieces), *(buffer.nbytes for _, _, buffer in buffers)]
        self._writer = Writer(path, file_nbytes(sizes), queue, Staging())
        # Leases of pieces whose writes are in flight, oldest first.
        self._held: deque[tuple[ExitStack, int]] = deque()

    def run(
        self, store: TieredStore, by: Reservation | None, progress: Progress
    ) -> tuple[list[Extent], list[Array]]:
        """The extents of the file, and the arrays in them."""
        arrays: list[Array] = []
        try:
            for at, piece in enumerate(self._pieces):
                ahead = self._pieces[at : at + 1 + _AHEAD]
                store.prefetch(*dict.fromkeys(each.key for each in ahead), by=by)
                # A lease that needs room may need that of those before.
                self._let_go(_BEHIND if store.in_memory(piece.key) else 0, progress)
                extent = self._submit(piece, store, by)
                arrays += [replace(array, extent=extent) for array in piece.arrays]
            self._let_go(0, progress)
            for name, dtype, buffer in self._buffers:
                index = self._writer.extent(_bytes_of(buffer))
                self._writer.wait(index)
                arrays.append(Array(name, BUFFER, dtype, 0, buffer.numel(), index, 0))
            return self._writer.close(), arrays
        except BaseException:
            self._writer.abort()
            raise
        finally:
            while self._held:
                self._held.popleft()[0].close()

    def _submit(self, piece: Piece, store: TieredStore, by: Reservation | None) -> int:
        lease = ExitStack()
        (partition,) = lease.enter_context(store.read(piece.key, by=by))
        with lease:
            assert partition.buffer is not None
            index = self._writer.extent(partition.buffer[piece.begin : piece.begin + piece.nbytes])
            self._held.append((lease.pop_all(), index))
        return index

    def _let_go(self, count: int, progress: Progress) -> None:
        """Wait for the oldest writes until at most `count` pieces are in flight."""
        while len(self._held) > count:
            lease, index = self._held[0]
            progress.advance(self._writer.wait(index).nbytes)
            self._held.popleft()
            lease.close()


def _bytes_of(values: Tensor) -> Tensor:
    """[n] uint8 of a tensor of any shape and place, in CPU memory."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def _link_frozen(
    capture: Capture, store: TieredStore, folder: Path, identity: str, by: Reservation | None
) -> tuple[list[Extent], list[Array]] | None:
    """Give the file of frozen parameters of an earlier checkpoint a second name, where it has these very values.

    What memory holds is compared by the blocks' checksums: reading it is many times faster than writing. None where
    anything differs, or the file system has no hard links.
    """
    pieces = [piece for piece in capture.pieces if piece.part == FROZEN]
    if not pieces or capture.previous is None:
        return None
    source, index = capture.previous
    extents: list[Extent] = []
    arrays: list[Array] = []
    for piece in pieces:
        found = index.extent_of(piece.arrays) if piece.arrays else None
        if found is None or found.nbytes != align_up(piece.nbytes, ALIGNMENT):
            return None
        extents.append(found)
        arrays += [replace(array, extent=len(extents) - 1) for array in piece.arrays]
    if len({extent.file for extent in extents}) != 1 or sum(each.nbytes for each in extents) != index.files.get(
        extents[0].file
    ):
        return None
    for piece, extent in zip(pieces, extents, strict=True):
        with store.read(piece.key, by=by) as (partition,):
            assert partition.buffer is not None
            held = partition.buffer[piece.begin : piece.begin + piece.nbytes]
            if _block_checksums(held, extent.nbytes) != extent.blocks:
                return None
    name = data_name(identity, capture.rank, FROZEN)
    try:
        os.link(source / extents[0].file, folder / name)
    except OSError:
        return None
    return [replace(extent, file=name) for extent in extents], arrays


def _block_checksums(values: Tensor, nbytes: int) -> tuple[int, ...]:
    """Checksums of the blocks of an extent of `nbytes` bytes that holds `values` and zeros behind them."""
    found = []
    for begin in range(0, nbytes, BLOCK_NBYTES):
        block = values[begin : begin + BLOCK_NBYTES].cpu()
        padding = bytes(min(BLOCK_NBYTES, nbytes - begin) - block.numel())
        found.append(checksum(padding, checksum(block.numpy())) if padding else checksum(block.numpy()))
    return tuple(found)
