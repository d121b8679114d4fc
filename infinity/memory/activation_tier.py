"""The activation tier: tensors that autograd keeps from forward for backward, in CPU memory or on drives meanwhile.

    saved = tier.put(tensor)        copied away; the tensor may go
    ...
    tensor = tier.get(saved)        the same bytes in the same layout

Only autograd's graph holds what `put` returns: when the graph is freed, by backward or after an exception, so is the
copy. On its way down a tensor is copied to CPU memory, beside the computation where there is a copy engine; for a drive
that memory is a staging buffer, from which the bytes are written while forward goes on. On its way up backward asks for
the tensor that forward put last, so each `get` begins to read the tensors put before it, as far as staging has room.
Where several forwards run before their backwards, `order` says in which order these come. Staging bounds what is in
flight. A buffer whose bytes are on the drive is kept until another tensor needs it, so the tensors needed next are not
even read; when all buffers are in use, `put` waits for the write of what is needed last.

Called only from the training thread or, during backward, from autograd's; the lock serializes them.

One tensor of the activation tier: where its bytes are, and which copies of it are in flight.

Its way: `begin_down` from the device into a buffer in CPU memory, `begin_write` from there to a place on a drive, and
`release_buffer`; then `begin_read` into a buffer again, `begin_up` to the device, and `hand_out`. Without a drive the
bytes stay in the buffer.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.base import trace
from infinity.base.transfer import Transfer
from infinity.errors import StateError, TransferError
from infinity.memory.arena import piece_nbytes
from infinity.memory.ledger import Ledger
from infinity.memory.scratch import FilePool, GrowablePool, HostPool, PoolBuffer, SwapFolders
from infinity.memory.tiers.base import TierBackend
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import HostMemory, trim
from infinity.plan.capacity import PROCESS
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, Kind, Tier, align_up


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


class BackwardOrder:
    """In which order tensors are needed again: of the forwards whose tensors are kept, which has its backward first.

    Without `expect` there is one forward, whose tensors are needed in the reverse order.
    """

    def __init__(self) -> None:
        self._count = 0
        # By forward: which backward is its own. And the forward whose tensors are put now.
        self._turns: dict[Hashable, int] = {}
        self._turn = 0

    def expect(self, backwards: Sequence[Hashable]) -> None:
        """Say in which order the backwards of the coming forwards will run, by whatever names these."""
        self._turns = {forward: turn for turn, forward in enumerate(backwards)}

    def begin_forward(self, forward: Hashable) -> None:
        """The tensors that are put from now on are of this one of the forwards that are expected."""
        self._turn = self._turns[forward]

    def next(self) -> tuple[int, int]:
        """Return the number of the next tensor, and the place of its backward."""
        self._count += 1
        return self._count - 1, self._turn


class ActivationTier:
    """The tensors of one rank that the activation tier keeps; see the module's text.

    folders: of the swap files; None: values stay in CPU memory. buffer_count: staging buffers before a drive, each of
    the size of the largest tensor. pin: page-lock CPU memory where there is an accelerator. overlap: write behind, and
    read ahead of use; otherwise every transfer is waited for where it begins.
    """

    def __init__(
        self, device: Device, *, ledger: Ledger, pin: bool = True, buffer_count: int = 4, overlap: bool = True,
        folders: SwapFolders | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._ledger = ledger
        self._host = HostMemory(device, pin=pin, ledger=ledger)
        self._memory = HostPool(self._host, ledger=ledger, holds_values=folders is None)
        self._drive = None if folders is None else FilePool(folders, ledger=ledger)
        self._buffer_count = buffer_count
        self._overlap = overlap
        self._lock = threading.Lock()
        self._closed = False
        self.order = BackwardOrder()
        # In the order in which they were put; those of them with a staging buffer.
        self._live: dict[int, Record] = {}
        self._staged: dict[int, Record] = {}
        self._dead: deque[Record] = deque()
        # Pieces that go back when these transfers are over.
        self._ending: list[tuple[list[Transfer], list[PoolBuffer]]] = []
        # Of tensors that several callers save, by the address of the storage.
        self._known: dict[int, tuple[StorageWeakRef, Any, weakref.ref[SavedTensor]]] = {}

    @property
    def device(self) -> torch.device:
        """Where the tensors come from and go back to."""
        return self._device.torch

    @property
    def live_nbytes(self) -> int:
        """Bytes of the tensors that are kept now."""
        with self._lock:
            self._settle()
            return sum(kept.nbytes for kept in self._live.values())

    def put(self, tensor: Tensor) -> SavedTensor | None:
        """Keep a tensor of the device; None for one whose elements lie too far apart to be moved as one piece.

        A tensor that is kept already, unchanged, is not kept twice. TransferError where the drive fails,
        TierMemoryError where a limit does.
        """
        flat = _flat(tensor)
        if flat is None:
            return None
        with self._lock, torch.no_grad():
            self._alive()
            self._settle()
            existing = self._existing(tensor)
            if existing is not None:
                return existing
            self._close_gaps(flat.nbytes)
            buffer = self._take_buffer(flat.nbytes)
            number, turn = self.order.next()
            kept = Record(number, turn, tensor.shape, tensor.stride(), tensor.dtype, flat.nbytes, buffer)
            saved = SavedTensor(kept, self._dead)
            self._live[kept.number] = kept
            if self._drive is not None:
                self._staged[kept.number] = kept
            down = self._device.copy(kept.values, flat)
            kept.begin_down(down)
            storage = tensor.untyped_storage()
            self._known[storage.data_ptr()] = StorageWeakRef(storage), _look(tensor), weakref.ref(saved)
            self._write_behind()
            if not self._overlap:
                self._device.arrived(down)
                self._write_behind()
                if kept.writing is not None:
                    kept.wait(kept.writing, "NVMe write")
            return saved

    def get(self, saved: SavedTensor) -> Tensor:
        """A new tensor with the bytes and the layout of the one that was put. It may be asked for again."""
        kept = saved.record
        with self._lock, torch.no_grad():
            self._alive()
            self._settle()
            self._close_gaps(kept.nbytes)
            self._submit_up(kept)
            flat, leaving = kept.hand_out()
            self._ledger.add(Tier.GPU, Kind.ACTIVATION, -flat.nbytes)
            kept.wait(leaving, "copy to the device")
            self._release_buffer(kept)
            if self._overlap:
                self._look_ahead(kept)
            return flat.as_strided(kept.shape, kept.stride)

    def settle(self) -> None:
        """End the records of tensors that autograd has freed, and return their space."""
        with self._lock:
            if not self._closed:
                self._settle()

    def close(self) -> None:
        """Return memory and files; tensors that are still kept are lost. Raises the first failure not raised so far."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._device.synchronize()
            in_flight = [transfer for kept in self._live.values() for transfer in kept.transfers]
            in_flight += [transfer for transfers, _ in self._ending for transfer in transfers]
            for kept in self._live.values():
                if kept.up is not None:
                    self._ledger.add(Tier.GPU, Kind.ACTIVATION, -kept.up[0].nbytes)
            _cancel(in_flight)
            # A buffer must outlive what is in flight in it; the queue reports failures when it is closed.
            for transfer in in_flight:
                with contextlib.suppress(TransferError):
                    transfer.wait()
            self._live.clear()
            self._staged.clear()
            self._ending.clear()
            self._known.clear()
            with ExitStack() as stack:
                stack.callback(self._host.close)
                stack.callback(self._memory.close)
                if self._drive is not None:
                    stack.callback(self._drive.close)

    def _close_gaps(self, nbytes: int) -> None:
        """Give back free memory of the heap between two layers of a long sequence, where the heap has the layers'
        pieces: they lie among the nodes that backward keeps, and without this their gaps would grow with the layers.
        """
        if nbytes >= PROCESS.pooled_nbytes_max and not self._device.is_accelerator:
            trim()

    # Down.

    def _take_buffer(self, nbytes: int) -> PoolBuffer:
        """CPU memory for a tensor, in whole pages. Before a drive it is bounded, and this may wait for it."""
        padded = align_up(nbytes, EXTENT_ALIGNMENT)
        if self._drive is None:
            return _take(self._memory, padded)
        staging = self._buffer_count * piece_nbytes(padded)
        if self._memory.largest_nbytes < staging:
            self._memory.grow(staging)
        while (piece := self._memory.take(padded)) is None:
            if not self._make_room():
                self._memory.grow(padded)
        return piece

    def _make_room(self) -> bool:
        """Give one staging buffer back, or wait until a copy in flight releases one. False: there is none."""
        staged = sorted(self._staged.values(), key=_needed, reverse=True)
        spare = next((kept for kept in staged if kept.is_spare), None)
        if spare is not None:
            self._release_buffer(spare)
            return True
        if self._ending:
            with trace.span(trace.WAIT, "room for a checkpoint"):
                for transfer in self._ending[0][0]:
                    # Its error concerns a record that has ended; here only the end of the copy counts.
                    with contextlib.suppress(TransferError):
                        self._device.arrived(transfer)
            self._settle()
            return True
        for kept in staged:
            if kept.up is not None:
                continue
            if kept.place is None:
                assert kept.down is not None
                self._device.arrived(kept.down)
                self._write_behind()
                return True
            for busy, cause in ((kept.reading, "NVMe read"), (kept.writing, "NVMe write")):
                if busy is not None:
                    kept.wait(busy, cause)
                    self._release_buffer(kept)
                    return True
        return False

    def _write_behind(self) -> None:
        """Submit the write of every buffer that the device has filled."""
        if self._drive is None:
            return
        for kept in self._staged.values():
            if kept.is_filled:
                kept.begin_write(_take(self._drive, align_up(kept.nbytes, EXTENT_ALIGNMENT)))

    # Up.

    def _submit_up(self, kept: Record) -> None:
        """Begin to copy a tensor to the device, once its bytes are in CPU memory."""
        if kept.up is not None:
            return
        if kept.buffer is None:
            self._read(kept, self._take_buffer(kept.nbytes))
        kept.end_read()
        if kept.down is not None:
            # Orders the two copies on the device; the host goes on.
            kept.down.wait()
        flat = torch.empty(kept.nbytes // kept.dtype.itemsize, dtype=kept.dtype, device=self._device.torch)
        kept.begin_up(flat, self._device.copy(flat, kept.values))
        self._ledger.add(Tier.GPU, Kind.ACTIVATION, flat.nbytes)

    def _look_ahead(self, kept: Record) -> None:
        """Backward goes on with what was put before: read it into staging that is free, and begin its way up."""
        later = (other for other in self._live.values() if _needed(other) > _needed(kept))
        following = heapq.nsmallest(max(self._buffer_count, 1), later, key=_needed)
        for at, other in enumerate(following[: self._buffer_count]):
            if other.turn != kept.turn and at >= (self._buffer_count + 1) // 2:
                # A forward of another micro-batch may come first, which needs staging, too.
                break
            if other.buffer is None and other.up is None:
                piece = self._memory.take(align_up(other.nbytes, EXTENT_ALIGNMENT))
                if piece is None:
                    break
                self._read(other, piece)
        if not following or not self._device.is_accelerator:
            return
        first = following[0]
        # What another backward begins with goes up when that begins: forwards of other micro-batches may lie between.
        if first.turn == kept.turn and first.buffer is not None and (first.reading is None or first.reading.done()):
            self._submit_up(first)

    def _read(self, kept: Record, buffer: PoolBuffer) -> None:
        self._staged[kept.number] = kept
        kept.begin_read(buffer)

    def _release_buffer(self, kept: Record) -> None:
        """Return its staging buffer if the drive has the bytes: now, or when the copy to the device completes."""
        released = kept.release_buffer()
        if released is None:
            return
        buffer, leaving = released
        del self._staged[kept.number]
        if leaving is None or leaving.done():
            self._memory.give(buffer)
        else:
            self._ending.append(([leaving], [buffer]))

    # The end of a record.

    def _settle(self) -> None:
        while self._dead:
            self._forget(self._dead.popleft())
        ending, self._ending = self._ending, []
        for transfers, pieces in ending:
            if all([transfer.done() for transfer in transfers]):
                for piece in pieces:
                    (self._memory if piece.block.file is None else self._drive or self._memory).give(piece)
            else:
                self._ending.append((transfers, pieces))
        self._write_behind()
        if not self._live and not self._ending:
            self._known.clear()
            self._memory.settle()
            if self._drive is not None:
                self._drive.settle()

    def _forget(self, kept: Record) -> None:
        if self._live.pop(kept.number, None) is None:
            return
        if kept.up is not None:
            # Its memory goes back to the device's allocator, which must not reuse it before the copy completes.
            kept.up[1].wait()
            self._ledger.add(Tier.GPU, Kind.ACTIVATION, -kept.up[0].nbytes)
        transfers = kept.transfers
        # A tensor that is gone need not be written.
        _cancel(transfers)
        self._staged.pop(kept.number, None)
        self._ending.append((transfers, kept.release()))

    # Tensors that several callers save.

    def _existing(self, tensor: Tensor) -> SavedTensor | None:
        found = self._known.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        storage, look, saved = found
        return saved() if not storage.expired() and look == _look(tensor) else None

    def _alive(self) -> None:
        if self._closed:
            raise StateError(
                "this graph's activations were on a tier of an engine that is closed: run its backward before close()"
            )


def _needed(kept: Record) -> tuple[int, int]:
    """By when a tensor is needed: in the order of backwards, and in each of them the one put last comes first."""
    return kept.turn, -kept.number


def _flat(tensor: Tensor) -> Tensor | None:
    """The memory that a tensor spans, as one row of elements; None where much of it would be other tensors'."""
    if not tensor.numel():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return None if span > 2 * tensor.numel() else tensor.detach().as_strided((span,), (1,))


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """A value that is equal for two tensors on one storage if they hold the same values in the same layout."""
    return tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _take(slabs: GrowablePool, nbytes: int) -> PoolBuffer:
    """A piece; a new slab, where it takes one, is as large as all before it, so that there are few."""
    piece = slabs.take(nbytes)
    if piece is None:
        slabs.grow(max(nbytes, slabs.nbytes))
        piece = slabs.take(nbytes)
    assert piece is not None
    return piece


def _cancel(transfers: Sequence[Transfer]) -> None:
    """Cancel what has not begun; a copy of the device goes on."""
    for transfer in transfers:
        cancel = getattr(transfer, "cancel", None)
        if cancel is not None and not transfer.done():
            cancel()
