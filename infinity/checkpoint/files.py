"""Extents in files: written straight from memory in checked blocks, and read back by tensor and range.

Every block is one request, and the queue computes its checksum. Memory that direct I/O cannot use (the end of an
extent, unaligned memory, memory of an accelerator) goes through a few staging blocks, so that all transfers bypass the
page cache and extra memory is bounded. Extents are padded with zeros to whole pages, so a checksum covers every byte of
a file.
"""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.checkpoint.format import (
    ALIGNMENT,
    BLOCK_NBYTES,
    DTYPE_NBYTES,
    Array,
    FileExtent,
    Manifest,
    RankIndex,
    ShardRanges,
    TensorInfo,
    in_values,
    inside,
    values_numel,
)
from infinity.errors import CheckpointError, TransferError
from infinity.log import PhaseProgress
from infinity.memory.partition import DTYPES
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.shard_copy import spread_shard
from infinity.ops.aio import File, Queue, Request
from infinity.plan.types import SAVE_BLOCKS, align_up

# Blocks of staging memory, and requests in flight on blocks that need none.
STAGING_COUNT = SAVE_BLOCKS
_IN_FLIGHT = 16
# Files that a reader keeps open.
_OPEN_MAX = 64
_Reading = TypeVar("_Reading", bound="BlockReader")
_ArrayPlace = tuple[Array, FileExtent]


def file_nbytes(sizes: Sequence[int]) -> int:
    """Return the bytes of a file with extents of these sizes."""
    return sum(align_up(nbytes, ALIGNMENT) for nbytes in sizes)


class Staging:
    """Page-aligned blocks that are used in turn; a block is reused once its transfer is over."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []
        self._users: list[Transfer | None] = []
        self._turn = -1

    def take(self) -> Tensor:
        """Return a block ([BLOCK_NBYTES] uint8). Register its transfer with `used_by` before its next turn."""
        if len(self._blocks) < STAGING_COUNT:
            self._blocks.append(page_aligned(BLOCK_NBYTES))
            self._users.append(None)
            self._turn = len(self._blocks) - 1
        else:
            self._turn = (self._turn + 1) % STAGING_COUNT
            user, self._users[self._turn] = self._users[self._turn], None
            if user is not None:
                # The caller waits for the same request and sees its error.
                with suppress(TransferError):
                    user.wait()
        return self._blocks[self._turn]

    def used_by(self, transfer: Transfer, ago: int = 0) -> None:
        """Keep the block that was taken last (or `ago` turns before) in use until the transfer is over."""
        self._users[(self._turn - ago) % len(self._blocks)] = transfer


class Writer:
    """A new file of `nbytes` bytes, filled with one extent after the other.

    TransferError at construction, and no file, where the drive has no room.
    """

    def __init__(self, path: Path, nbytes: int, queue: Queue, staging: Staging) -> None:
        self._path = path
        self._queue = queue
        self._staging = staging
        self._end = 0
        self._requests: dict[int, list[Request]] = {}
        self._extents: list[FileExtent] = []
        self._file = File.create(path, nbytes)

    def extent(self, buffer: Tensor) -> int:
        """Submit the writes of `buffer` ([n] uint8), which must not change until `wait`; return the extent's index."""
        index = len(self._extents)
        nbytes = align_up(buffer.numel(), ALIGNMENT)
        self._extents.append(FileExtent(self._path.name, self._end, nbytes, ()))
        requests = self._requests[index] = []
        for begin in range(0, nbytes, BLOCK_NBYTES):
            block = buffer[begin : begin + BLOCK_NBYTES]
            size = min(BLOCK_NBYTES, nbytes - begin)
            staged = not (block.is_cpu and block.numel() == size and block.data_ptr() % ALIGNMENT == 0)
            if staged:
                room = self._staging.take()[:size]
                room[: block.numel()].copy_(block)
                room[block.numel() :].zero_()
                block = room
            request = self._queue.write(self._file, self._end + begin, block, checksum=True)
            requests.append(request)
            if staged:
                self._staging.used_by(request)
        self._end += nbytes
        return index

    def extent_from(self, nbytes: int, fetch: Callable[[int, Tensor], Transfer]) -> int:
        """As `extent`, for bytes on a drive: `fetch` submits a read that begins at a byte and fills a block."""
        index = len(self._extents)
        whole = align_up(nbytes, ALIGNMENT)
        self._extents.append(FileExtent(self._path.name, self._end, whole, ()))
        self._requests[index] = []
        # Reads into staging memory, in the order of their blocks' turns.
        coming: deque[tuple[int, Tensor, Transfer]] = deque()
        for begin in range(0, whole, BLOCK_NBYTES):
            room = self._staging.take()[: min(BLOCK_NBYTES, whole - begin)]
            held = min(room.numel(), nbytes - begin)
            room[held:].zero_()
            transfer = fetch(begin, room[:held])
            self._staging.used_by(transfer)
            coming.append((begin, room, transfer))
            if len(coming) >= STAGING_COUNT // 2:
                self._pass_on(index, *coming.popleft(), ago=len(coming))
        while coming:
            self._pass_on(index, *coming.popleft(), ago=len(coming))
        self._end += whole
        return index

    def _pass_on(self, index: int, begin: int, room: Tensor, transfer: Transfer, *, ago: int) -> None:
        transfer.wait()
        request = self._queue.write(self._file, self._end + begin, room, checksum=True)
        self._requests[index].append(request)
        self._staging.used_by(request, ago)

    def wait(self, index: int, progress: PhaseProgress | None = None) -> FileExtent:
        """Block until an extent is written; record its checksums."""
        for request in self._requests[index]:
            request.wait()
            if progress is not None:
                progress.advance(request.nbytes)
        blocks = tuple(request.checksum or 0 for request in self._requests.pop(index))
        old = self._extents[index]
        self._extents[index] = FileExtent(old.file, old.offset, old.nbytes, blocks)
        return self._extents[index]

    def close(self) -> list[FileExtent]:
        """Block until the drive has all extents; return them."""
        for index in list(self._requests):
            self.wait(index)
        assert self._end == self._file.nbytes, f"{self._end} bytes of {self._file.nbytes} were written"
        self._file.sync()
        self._file.close()
        return self._extents

    def abort(self) -> None:
        """Remove the file. No transfer uses the caller's memory any more on return."""
        for requests in self._requests.values():
            for request in requests:
                request.cancel()
        for requests in self._requests.values():
            for request in requests:
                with suppress(TransferError):
                    request.wait()
        self._requests.clear()
        self._file.close()
        self._path.unlink(missing_ok=True)


class BlockReader:
    """Reads blocks of extents, and verifies all that it reads. Use as a context manager.

    queue: used and left open; without one the reader makes and closes its own.
    """

    def __init__(self, folder: Path, queue: Queue | None = None, progress: PhaseProgress | None = None) -> None:
        self.folder = folder
        self._own = Queue() if queue is None else None
        self._queue = queue if queue is not None else self._own
        self._progress = progress
        # Open files, the most recently used last: a checkpoint of many ranks has many.
        self._files: OrderedDict[str, File] = OrderedDict()

    def __enter__(self: _Reading) -> _Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()
        if self._own is not None:
            self._own.close()

    def verified(self, extents: Iterable[FileExtent]) -> Iterator[int]:
        """Read all of these extents; yield the bytes of each block once its checksum matches.

        CheckpointError where a block is not what was written, TransferError where it cannot be read.
        """
        staging = Staging()
        flying: deque[tuple[Request, FileExtent]] = deque()
        try:
            for extent in extents:
                for block in range(len(extent.blocks)):
                    if len(flying) >= STAGING_COUNT:
                        yield self._wait_read(*flying.popleft())
                    size = min(BLOCK_NBYTES, extent.nbytes - block * BLOCK_NBYTES)
                    request = self._submit(extent, block, staging.take()[:size])
                    staging.used_by(request)
                    flying.append((request, extent))
            while flying:
                yield self._wait_read(*flying.popleft())
        finally:
            for request, _ in flying:
                with suppress(TransferError):
                    request.wait()

    def _submit(self, extent: FileExtent, block: int, target: Tensor) -> Request:
        assert self._queue is not None
        file = self._files.pop(extent.file, None) or File.open(inside(self.folder, extent.file))
        self._files[extent.file] = file
        if len(self._files) > _OPEN_MAX:
            # A transfer in flight keeps its own descriptor.
            self._files.popitem(last=False)[1].close()
        return self._queue.read(
            file, extent.offset + block * BLOCK_NBYTES, target, expected=extent.blocks[block]
        )  # fmt: skip

    def _wait_read(self, request: Request, extent: FileExtent) -> int:
        try:
            request.wait()
        except TransferError as error:
            if error.errno != errno.EBADMSG:
                raise
            raise CheckpointError(
                self.folder / extent.file,
                f"{error.nbytes} bytes at offset {error.offset} are not those that were written ({error.reason})",
                "Load an older checkpoint",
            ) from error
        if self._progress is not None:
            self._progress.advance(request.nbytes)
        return request.nbytes


class ExtentReader(BlockReader):
    """Reads any range of any tensor of a checkpoint. See BlockReader."""

    def __init__(
        self, folder: Path, manifest: Manifest, indexes: Sequence[RankIndex], queue: Queue | None = None,
        progress: PhaseProgress | None = None,
    ) -> None:  # fmt: skip
        super().__init__(folder, queue, progress)
        self.manifest = manifest
        self.indexes = indexes
        # Blocks of which only a part was read, the most recent last.
        self._cache: OrderedDict[tuple[str, int], Tensor] = OrderedDict()
        # By tensor and kind, then by shard: where its elements lie, in order.
        self._places: dict[tuple[str, str], dict[ShardRanges | None, list[_ArrayPlace]]] = {}
        # Tensors and kinds in shards of which `covered` is known.
        self._covered: dict[tuple[str, str], bool] = {}
        for index in indexes:
            for array in index.arrays:
                by_shard = self._places.setdefault((array.tensor, array.kind), {})
                by_shard.setdefault(array.shard, []).append((array, index.extents[array.extent]))
        for by_shard in self._places.values():
            for places in by_shard.values():
                places.sort(key=lambda place: place[0].start)

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._cache.clear()

    def has(self, tensor: str, kind: str) -> bool:
        """Return whether the checkpoint has elements of this kind."""
        return (tensor, kind) in self._places

    def dtype(self, tensor: str, kind: str) -> str:
        """Return the dtype in which a kind is kept."""
        (place, _), *_ = next(iter(self._places[tensor, kind].values()))
        return place.dtype

    def covered(self, tensor: str, kind: str) -> bool:
        """Return whether every element of a tensor is there exactly once: in the tensor's own order, or in shards that
        divide it along one dimension, each of which is there once.
        """
        info = self.manifest.tensors[tensor]
        by_shard = self._places.get((tensor, kind), {})
        for shard, places in by_shard.items():
            at = 0
            for array, _ in places:
                if array.start != at:
                    return False
                at += array.numel
            whole = values_numel(kind, info.numel)
            if at != (whole if shard is None else in_values(kind, info.shape, shard).numel):
                return False
        shards = [shard for shard in by_shard if shard is not None]
        if not shards:
            return bool(by_shard) or not info.numel
        dim, end = shards[0].dim, 0
        if len(shards) < len(by_shard) or any(shard.dim != dim for shard in shards):
            return False
        for begin, stop in sorted(each for shard in shards for each in shard.ranges):
            if begin != end:
                return False
            end = stop
        return end == info.shape[dim]

    def check_covered(self, tensors: Mapping[str, TensorInfo]) -> None:
        """Raise CheckpointError unless every element of every kind of these tensors is there exactly once."""
        for name, info in tensors.items():
            lacking = [kind for kind in info.kinds if not self.covered(name, kind)]
            if lacking:
                raise CheckpointError(
                    self.folder, f"not all elements of {name} ({lacking[0]}) are in it", "Load another checkpoint"
                )

    def read(self, tensor: str, kind: str, start: int, numel: int, out: Tensor) -> None:
        """Read elements [start, start + numel) into `out` ([numel], contiguous, of the kind's width, on any device).

        CheckpointError where a block is not what was written, TransferError where it cannot be read.
        """
        if not numel:
            return
        by_shard = self._places.get((tensor, kind))
        if by_shard is None:
            raise CheckpointError(self.folder, f"no element of {tensor} ({kind}) is in it", "Load another checkpoint")
        values = self._typed(tensor, kind, numel, out)
        if by_shard.keys() == {None}:
            self._read_places(by_shard[None], start, values, f"{tensor} ({kind})")
            return
        if (tensor, kind) not in self._covered:
            self._covered[tensor, kind] = self.covered(tensor, kind)
        if not self._covered[tensor, kind]:
            raise CheckpointError(
                self.folder, f"not all elements of {tensor} ({kind}) are in it once", "Load another checkpoint"
            )
        shape = self.manifest.tensors[tensor].shape
        for shard, places in by_shard.items():
            assert shard is not None
            read = partial(self._read_places, places, what=f"a shard of {tensor} ({kind})")
            counted = in_values(kind, shape, shard)
            spread_shard(read, *counted, 0, counted.numel, values, start)

    def read_shard(self, tensor: str, kind: str, shard: ShardRanges, start: int, numel: int, out: Tensor) -> bool:
        """As `read`, with elements counted in the order of a shard's. Return False, and read nothing, where the
        checkpoint was saved in other shards.
        """
        places = self._places.get((tensor, kind), {}).get(shard)
        if places is None:
            return False
        if numel:
            values = self._typed(tensor, kind, numel, out)
            self._read_places(places, start, values, f"a shard of {tensor} ({kind})")
        return True

    def _typed(self, tensor: str, kind: str, numel: int, out: Tensor) -> Tensor:
        dtype = self.dtype(tensor, kind)
        if out.nbytes != numel * DTYPE_NBYTES[dtype]:
            needed = numel * DTYPE_NBYTES[dtype]
            raise ValueError(f"{tensor}, {kind}: {numel} elements of {dtype} need {needed} bytes")
        return out.view(DTYPES[dtype])

    def _read_places(self, places: Sequence[_ArrayPlace], start: int, values: Tensor, what: str) -> None:
        """Fill `values` ([n], of the kind's dtype) with elements from `start` on of what lies at `places`, in order."""
        target, width = values.view(torch.uint8), values.element_size()
        first = max(bisect_right(places, start, key=lambda place: place[0].start) - 1, 0)
        at, stop = start, start + values.numel()
        for array, extent in places[first:]:
            if array.start >= stop or at >= stop:
                break
            end = min(stop, array.start + array.numel)
            if not array.start <= at < end:
                break
            begin = array.offset + (at - array.start) * width
            self.read_bytes(extent, begin, target[(at - start) * width : (end - start) * width])
            at = end
        if at < stop:
            raise CheckpointError(
                self.folder, f"elements {at} to {stop} of {what} are not in it", "Load another checkpoint"
            )

    def read_bytes(self, extent: FileExtent, begin: int, target: Tensor) -> None:
        """Read the bytes of an extent from `begin` on into `target` ([n] uint8, on any device)."""
        requests: deque[Request] = deque()
        try:
            for block, first, last in _blocks(extent, begin, begin + target.numel()):
                offset = block * BLOCK_NBYTES
                size = min(BLOCK_NBYTES, extent.nbytes - offset)
                piece = target[offset + first - begin : offset + last - begin]
                # A whole block is read in place; an unaligned address goes through the page cache.
                if last - first == size and target.is_cpu:
                    if len(requests) >= _IN_FLIGHT:
                        self._wait_read(requests.popleft(), extent)
                    requests.append(self._submit(extent, block, piece))
                else:
                    piece.copy_(self._block(extent, block)[first:last])
            while requests:
                self._wait_read(requests.popleft(), extent)
        finally:
            for request in requests:
                with suppress(TransferError):
                    request.wait()

    def verify(self) -> Iterator[int]:
        """Read all files; see `verified`."""
        return self.verified(extent for index in self.indexes for extent in index.extents)

    def _block(self, extent: FileExtent, block: int) -> Tensor:
        key = (extent.file, extent.offset + block * BLOCK_NBYTES)
        held = self._cache.pop(key, None)
        if held is None:
            if len(self._cache) >= STAGING_COUNT:
                _, room = self._cache.popitem(last=False)
            else:
                room = page_aligned(BLOCK_NBYTES)
            size = min(BLOCK_NBYTES, extent.nbytes - block * BLOCK_NBYTES)
            self._wait_read(self._submit(extent, block, room[:size]), extent)
            held = room
        self._cache[key] = held
        return held


def _blocks(extent: FileExtent, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield (block, first byte in it, end byte in it) for a range of an extent's bytes."""
    for block in range(begin // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)):
        offset = block * BLOCK_NBYTES
        yield block, max(begin - offset, 0), min(end - offset, min(BLOCK_NBYTES, extent.nbytes - offset))
