"""One rank's files of a save: its share of the partitions, streamed into files of its own, and an index of them.

Bytes go from the tiers' memory straight to the drive, partition by partition, while the next ones are fetched. After a
failure none of this rank's files is left.

A source lends them: partitions under read leases in the foreground, a snapshot beside the program. Both lend one
partition after the other in an order of their own, and bound how many may still be on their way to the drive while the
next one is taken.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.checkpoint.files import BlockReader, Staging, Writer, file_nbytes
from infinity.checkpoint.format import (
    ALIGNMENT,
    BLOCK_NBYTES,
    BUFFER,
    Array,
    FileExtent,
    FileInfo,
    RankIndex,
    data_name,
    index_name,
    replace_file,
)
from infinity.checkpoint.pieces import FROZEN, WEIGHTS, TensorSpan
from infinity.checkpoint.publish import remove_rank
from infinity.distributed.mailbox import StoreMailbox
from infinity.errors import CheckpointError
from infinity.log import PhaseProgress, logger
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.store import TieredStore
from infinity.memory.transaction import Snapshot
from infinity.ops.aio import Queue
from infinity.ops.crc32c import checksum
from infinity.plan.partitions import changed_by
from infinity.plan.plan import Plan
from infinity.plan.types import Key, align_up

# Partitions whose writes are in flight, besides the one that is being submitted, and those fetched ahead from NVMe.
_BEHIND = 2
_AHEAD = 2
# A partition on NVMe is read whole up to this size, so that the tier verifies its checksum; a larger one in blocks, so
# that memory is bounded. There is one such buffer more than partitions in flight.
_WHOLE_NBYTES_MAX = 64 << 20
# A longer rest would stall a save for nothing after one slow partition.
_REST_SECONDS_MAX = 1.0

# Blocks until at most so many partitions are in flight.
LetGo = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Lent:
    """One partition: its `buffer` ([n] uint8) or, where that is None, `fetch`, which submits a read from a byte on into
    the caller's memory.
    """

    buffer: Tensor | None
    fetch: Callable[[int, Tensor], Transfer]


class PartitionSource(Protocol):
    """Lends partitions to a save."""

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """Yield all of `keys`, each when it should be lent."""

    def lend(self, key: Key, *, last: bool = True) -> AbstractContextManager[Lent]:
        """Lend one partition for the length of a block. last: it is not lent again."""

    def skip(self, keys: Sequence[Key]) -> None:
        """Note that these are not lent any more."""


class LiveSource:
    """The partitions themselves, while the program waits: a save in the foreground."""

    def __init__(self, store: TieredStore) -> None:
        self._store = store

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """See `PartitionSource`: in the given order, with the next ones fetched ahead."""
        for at, key in enumerate(keys):
            self._store.prefetch(*keys[at : at + 1 + _AHEAD])
            # A lease may need the room of the ones before it.
            let_go(_BEHIND if self._store.in_memory(key) else 0)
            yield key

    @contextmanager
    def lend(self, key: Key, *, last: bool = True) -> Iterator[Lent]:
        """See `PartitionSource`."""
        with self._store.read(key) as (partition,):
            yield Lent(partition.buffer, partial(self._store.read_extent, key))

    def skip(self, keys: Sequence[Key]) -> None:
        """See `PartitionSource`."""


class SnapshotSource:
    """The partitions of a snapshot that was taken: a save beside the program.

    share: the part of the time in which bytes are moved while no thread waits for the save.
    """

    def __init__(self, store: TieredStore, snapshot: Snapshot, *, share: float) -> None:
        self._store = store
        self._snapshot = snapshot
        self._share = share
        # Unused buffers for partitions that are read whole.
        self._rooms: list[Tensor] = []

    def order(self, keys: Sequence[Key], let_go: LetGo) -> Iterator[Key]:
        """See `PartitionSource`: what the program waits for goes first."""
        rest = 0.0
        while (key := self._store.access.next_to_save(self._snapshot, rest)) is not None:
            began = time.monotonic()
            # Holds nothing while this thread waits for a step, or another thread waits for a held partition.
            alone = self._share < 1 or self._store.access.hurried(self._snapshot)
            let_go(0 if alone or not self._store.access.settled(self._snapshot, key) else _BEHIND)
            yield key
            if self._share < 1:
                let_go(0)
                rest = min((time.monotonic() - began) * (1 / self._share - 1), _REST_SECONDS_MAX)

    @contextmanager
    def lend(self, key: Key, *, last: bool = True) -> Iterator[Lent]:
        """See `PartitionSource`."""
        with self._store.saving(self._snapshot, key, last=last) as partition:
            nbytes = self._store[key].spec.nbytes
            if partition is not None:
                yield self._lent(key, partition.buffer)
            elif nbytes > _WHOLE_NBYTES_MAX:
                yield self._lent(key, None)
            else:
                room = self._rooms.pop() if self._rooms else page_aligned(nbytes)
                if room.numel() < nbytes:
                    room = page_aligned(nbytes)
                self._store.read_extent(key, 0, room[:nbytes]).wait()
                yield self._lent(key, room[:nbytes])
                self._rooms.append(room)

    def _lent(self, key: Key, buffer: Tensor | None) -> Lent:
        return Lent(buffer, partial(self._store.read_extent, key))

    def skip(self, keys: Sequence[Key]) -> None:
        """See `PartitionSource`."""
        self._store.access.skip_saving(self._snapshot, keys)


def snapshot_of(plan: Plan, keys: Sequence[Key], *, in_backward: bool) -> Snapshot:
    """Return a snapshot of partitions in the order in which the next step changes them; unchanged ones come last.

    in_backward: the step begins in backward, at the model's output.
    """
    order = [plan.sub_groups[index] for index in plan.step_order]
    changed = [key for group in (reversed(order) if in_backward else order) for key in changed_by(group)]
    wanted = set(keys)
    return Snapshot([*(key for key in changed if key in wanted), *keys])


@dataclass(frozen=True)
class Capture:
    """What one rank writes.

    buffers: (name, dtype, values) of the module's. previous: an earlier checkpoint of the same folder and this rank's
    index in it; its file of frozen parameters may still be valid.
    """

    rank: int
    pieces: tuple[TensorSpan, ...]
    buffers: tuple[tuple[str, str, Tensor], ...] = ()
    rng: Mapping[str, Any] = field(default_factory=dict)
    singles: Mapping[str, Any] = field(default_factory=dict)
    previous: tuple[Path, RankIndex] | None = None

    def apart(self) -> Capture:
        """Return the same with copies of the buffers, which the program goes on to change."""
        copies = tuple((name, dtype, buffer.detach().cpu().clone()) for name, dtype, buffer in self.buffers)
        return replace(self, buffers=copies)

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return sum(piece.nbytes for piece in self.pieces) + sum(buffer.nbytes for _, _, buffer in self.buffers)


def write(
    capture: Capture, source: PartitionSource, folder: Path, identity: str, queue: Queue, *, read_back: bool = False,
    mailbox: StoreMailbox | None = None,
) -> FileInfo:  # fmt: skip
    """Stream a capture from a source into `folder`, and write its index there; return the index's file.

    read_back: read everything from the drive again and compare checksums. mailbox: of the ranks that wait for this one.
    After a failure no file of this rank is left.
    """
    progress = _SaveProgress(f"saving to {folder}", capture.nbytes, mailbox)
    with ExitStack() as undo:
        undo.callback(lambda: remove_rank(folder, identity, capture.rank))
        linked = _link_frozen(capture, source, folder, identity, queue, progress)
        left = [piece for piece in capture.pieces if linked is None or piece.part != FROZEN]
        written = _Files(capture, left, folder, identity, queue, progress).run(source)
        if read_back:
            new = [extent for extents, _ in written for extent in extents]
            again = _SaveProgress(f"reading back {folder}", sum(extent.nbytes for extent in new), mailbox)
            _read_back(folder, new, queue, again)
        if linked is not None:
            written.append(linked)
        files: dict[str, int] = {}
        extents: list[FileExtent] = []
        arrays: list[Array] = []
        for found, placed in written:
            files[found[0].file] = sum(extent.nbytes for extent in found)
            arrays += [replace(array, extent=array.extent + len(extents)) for array in placed]
            extents += found
        index = RankIndex(
            capture.rank, files, tuple(extents), tuple(arrays), dict(capture.rng), dict(capture.singles)
        ).to_bytes()
        name = index_name(identity, capture.rank)
        replace_file(folder / name, index)
        undo.pop_all()
    return FileInfo(name, len(index), checksum(index))


class _SaveProgress(PhaseProgress):
    """Progress that those who wait for this rank see, too."""

    def __init__(self, what: str, total_nbytes: int, mailbox: StoreMailbox | None) -> None:
        super().__init__(what, total_nbytes)
        self._mailbox = mailbox

    def advance(self, nbytes: int) -> None:
        """See `PhaseProgress.advance`; called after every block."""
        super().advance(nbytes)
        if self._mailbox is not None:
            self._mailbox.alive()


def _read_back(folder: Path, extents: Sequence[FileExtent], queue: Queue, progress: PhaseProgress) -> None:
    with BlockReader(folder, queue, progress) as reader:
        for _ in reader.verified(extents):
            pass


class _Files:
    """The files of one rank while they are being written, in the order in which the source lends partitions."""

    def __init__(
        self, capture: Capture, pieces: Sequence[TensorSpan], folder: Path, identity: str, queue: Queue,
        progress: PhaseProgress,
    ) -> None:  # fmt: skip
        self._capture = capture
        self._progress = progress
        self._by_key: dict[Key, list[TensorSpan]] = {}
        sizes: dict[str, list[int]] = {}
        for piece in pieces:
            self._by_key.setdefault(piece.key, []).append(piece)
            sizes.setdefault(piece.part, []).append(piece.nbytes)
        for _, _, buffer in capture.buffers:
            sizes.setdefault(WEIGHTS, []).append(buffer.nbytes)
        self._arrays: dict[str, list[Array]] = {part: [] for part in sizes}
        self._writers: dict[str, Writer] = {}
        # Leases of partitions whose writes are in flight, oldest first.
        self._held: deque[tuple[ExitStack, list[tuple[Writer, int]]]] = deque()
        staging = Staging()
        try:
            for part, nbytes in sizes.items():
                path = folder / data_name(identity, capture.rank, part)
                self._writers[part] = Writer(path, file_nbytes(nbytes), queue, staging)
        except BaseException:
            self._abort()
            raise

    def run(self, source: PartitionSource) -> list[tuple[list[FileExtent], list[Array]]]:
        """Write everything; return the extents of each file, and the arrays in them."""
        try:
            for key in source.order([*self._by_key], self._let_go):
                self._submit(key, source)
            self._let_go(0)
            for name, dtype, buffer in self._capture.buffers:
                index = self._writers[WEIGHTS].extent(_bytes_of(buffer))
                self._writers[WEIGHTS].wait(index)
                self._arrays[WEIGHTS].append(Array(name, BUFFER, dtype, 0, buffer.numel(), index, 0))
            return [(writer.close(), self._arrays[part]) for part, writer in self._writers.items()]
        except BaseException:
            self._abort()
            raise

    def _submit(self, key: Key, source: PartitionSource) -> None:
        lease = ExitStack()
        lent = lease.enter_context(source.lend(key))
        with lease:
            places: list[tuple[Writer, int]] = []
            for piece in self._by_key[key]:
                writer = self._writers[piece.part]
                if lent.buffer is not None:
                    index = writer.extent(lent.buffer[piece.begin : piece.begin + piece.nbytes])
                else:
                    index = writer.extent_from(piece.nbytes, partial(_fetch, lent, piece))
                places.append((writer, index))
                self._arrays[piece.part] += [replace(array, extent=index) for array in piece.arrays]
            self._held.append((lease.pop_all(), places))

    def _let_go(self, count: int) -> None:
        """Wait for the oldest writes until at most `count` partitions are in flight."""
        while len(self._held) > count:
            lease, places = self._held[0]
            for writer, index in places:
                writer.wait(index, self._progress)
            self._held.popleft()
            lease.close()

    def _abort(self) -> None:
        # Leases end only after the writers have stopped reading the memory.
        for writer in self._writers.values():
            writer.abort()
        while self._held:
            self._held.popleft()[0].close()


def _fetch(lent: Lent, piece: TensorSpan, begin: int, room: Tensor) -> Transfer:
    return lent.fetch(piece.begin + begin, room)


def _bytes_of(values: Tensor) -> Tensor:
    """Return the bytes of a tensor of any shape and device, as [n] uint8 in CPU memory."""
    flat = values.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8, device="cpu")


def _link_frozen(
    capture: Capture, source: PartitionSource, folder: Path, identity: str, queue: Queue, progress: PhaseProgress
) -> tuple[list[FileExtent], list[Array]] | None:
    """Hard-link an earlier checkpoint's file of frozen parameters, where it has the same values; return its extents.

    The blocks' checksums compare memory, index and drive: reading wears no drive, takes no room, and is faster than
    writing. None where anything differs, or the file system has no hard links.
    """
    pieces = [piece for piece in capture.pieces if piece.part == FROZEN]
    if not pieces or capture.previous is None:
        return None
    earlier, index = capture.previous
    extents: list[FileExtent] = []
    arrays: list[Array] = []
    for piece in pieces:
        found = index.extent_of(piece.arrays) if piece.arrays else None
        if found is None or found.nbytes != align_up(piece.nbytes, ALIGNMENT):
            return None
        extents.append(found)
        arrays += [replace(array, extent=len(extents) - 1) for array in piece.arrays]
    file, nbytes = extents[0].file, sum(extent.nbytes for extent in extents)
    if len({extent.file for extent in extents}) != 1 or nbytes != index.files.get(file):
        return None
    for piece, extent in zip(pieces, extents, strict=True):
        with source.lend(piece.key, last=False) as lent:
            if _block_checksums(lent, piece, extent.nbytes) != extent.blocks:
                return None
    name = data_name(identity, capture.rank, FROZEN)
    try:
        # A symbolic link would lead out of this checkpoint, too.
        if (earlier / file).is_symlink():
            return None
        os.link(earlier / file, folder / name)
    except OSError:
        return None
    placed = [replace(extent, file=name) for extent in extents]
    try:
        if (held := (folder / name).stat().st_size) != nbytes:
            raise CheckpointError(folder / name, f"it has {held} bytes instead of {nbytes}", "Load an older checkpoint")
        _read_back(folder, placed, queue, progress)
    except (CheckpointError, OSError) as error:
        # The damage must not spread into this checkpoint.
        logger.warning("%s is damaged; its frozen parameters are written anew: %s", earlier / file, error)
        (folder / name).unlink()
        return None
    source.skip([piece.key for piece in pieces])
    return placed, arrays


def _block_checksums(lent: Lent, piece: TensorSpan, nbytes: int) -> tuple[int, ...]:
    """Return the checksums of the blocks of an extent of `nbytes` bytes: the piece, and zeros behind it."""
    found = []
    room = page_aligned(BLOCK_NBYTES) if lent.buffer is None else None
    for begin in range(0, nbytes, BLOCK_NBYTES):
        size = min(BLOCK_NBYTES, piece.nbytes - begin)
        if lent.buffer is not None:
            block = lent.buffer[piece.begin + begin : piece.begin + begin + size].cpu()
        else:
            assert room is not None
            block = room[:size]
            lent.fetch(piece.begin + begin, block).wait()
        padding = bytes(min(BLOCK_NBYTES, nbytes - begin) - size)
        crc = checksum(block.numpy())
        found.append(checksum(padding, crc) if padding else crc)
    return tuple(found)
