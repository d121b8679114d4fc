"""The activation tier: tensors that autograd keeps from forward for backward, in CPU memory or on NVMe meanwhile.

    saved = tier.put(tensor)        copied away; the tensor may go
    ...
    tensor = tier.get(saved)        the same bytes in the same layout

Autograd holds what `put` returns and nothing else does: when the graph goes, by backward or with an exception, so does
the copy. Data's way down: a copy to CPU memory, beside the computation where there is a copy engine; for NVMe that
memory is a staging buffer, from which the bytes are written behind forward. Its way up: backward asks for what forward
put last, so that each `get` has the ones put before it read, as far as staging has room. Staging is the bound of what
is in flight: a buffer whose bytes are on the drive is kept until somebody needs it, so that what was put last is not
even read; when all are in use, `put` waits for the oldest write.

Nobody but the training loop's thread and, in its stead, autograd's calls this; the lock orders the two.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from infinity.errors import StateError, TransferError
from infinity.memory.growable_pool import GrowablePool, PoolBuffer, file_pool, host_pool
from infinity.memory.ledger import Ledger
from infinity.memory.pool import piece_nbytes
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.nvme import NvmeTier
from infinity.memory.tiers.pinned import HostMemory
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.types import EXTENT_ALIGNMENT, Extent, Kind, Tier, align_up


@dataclass(frozen=True, slots=True)
class ActivationExtent(Extent):
    """A checkpoint's place in a swap file of the activation tier."""

    number: int

    def __str__(self) -> str:
        return f"checkpoint {self.number}"


@dataclass(slots=True, eq=False)
class _Record:
    """One tensor that is kept. `buffer` in CPU memory or `place` on the drive has its bytes, or both."""

    number: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    buffer: PoolBuffer | None = None
    place: PoolBuffer | None = None
    # Copies in flight: from the device to the buffer, to the drive and from there, and a tensor on its way up.
    down: Transfer | None = None
    writing: Transfer | None = None
    reading: Transfer | None = None
    up: tuple[Tensor, Transfer] | None = None
    # The copy to the device of a tensor that was handed out: the host has not waited for it, and it reads the buffer.
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
        """What may still use its buffer or its place."""
        up = self.up[1] if self.up is not None else None
        found = [self.down, self.writing, self.reading, up, self.leaving]
        return [transfer for transfer in found if transfer is not None]

    @property
    def spare(self) -> bool:
        """Whether its buffer could be given to another: the drive has the bytes, and nothing is in flight."""
        written = self.writing is not None and self.writing.done()
        left = self.leaving is None or self.leaving.done()
        return written and left and self.buffer is not None and self.reading is None and self.up is None


class SavedTensor:
    """Stands for a tensor of the tier in autograd's graph. The tensor is forgotten with it."""

    __slots__ = ("__weakref__", "_dead", "kept")

    def __init__(self, kept: _Record, dead: deque[_Record]) -> None:
        self.kept = kept
        self._dead = dead

    def __del__(self) -> None:
        # At any moment and in any thread, also inside the tier's own methods: forgotten at the next call.
        self._dead.append(self.kept)


class ActivationTier:
    """See the module's text.

    open_file: makes a swap file of so many bytes; None: values stay in CPU memory. buffer_count: staging buffers of an
    NVMe home, each of the size of the largest tensor. pin: page-lock CPU memory where there is an accelerator. overlap:
    write behind, and read ahead of use; without it every transfer is waited for where it begins.
    """

    def __init__(
        self, device: Device, *, ledger: Ledger, pin: bool = True, buffer_count: int = 4, overlap: bool = True,
        open_file: Callable[[int], NvmeTier] | None = None,
    ) -> None:  # fmt: skip
        self._device = device
        self._ledger = ledger
        self._host = HostMemory(device, pin=pin, ledger=ledger)
        self._memory = host_pool(self._host, ledger=ledger, holds_values=open_file is None)
        self._drive: GrowablePool | None = None if open_file is None else file_pool(open_file, ledger=ledger)
        self._buffer_count = buffer_count
        self._overlap = overlap
        self._lock = threading.Lock()
        self._closed = False
        self._count = 0
        # In the order in which they were put.
        self._live: dict[int, _Record] = {}
        self._dead: deque[_Record] = deque()
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
            kept = _Record(self._count, tensor.shape, tensor.stride(), tensor.dtype, flat.nbytes)
            self._count += 1
            kept.buffer = self._take_buffer(kept.nbytes)
            saved = SavedTensor(kept, self._dead)
            self._live[kept.number] = kept
            kept.down = self._device.copy(kept.values, flat)
            self._remember(tensor, saved)
            self._write_behind()
            if not self._overlap:
                self._device.arrived(kept.down or Completed())
                self._write_behind()
                if kept.writing is not None:
                    _wait(kept.writing, "NVMe write", kept)
            return saved

    def get(self, saved: SavedTensor) -> Tensor:
        """A new tensor with the bytes and the layout of the one that was put. It may be asked for again."""
        kept = saved.kept
        with self._lock, torch.no_grad():
            self._alive()
            self._settle()
            self._submit_up(kept)
            assert kept.up is not None
            flat, kept.leaving = kept.up
            kept.up = None
            self._ledger.add(Tier.GPU, Kind.ACTIVATION, -flat.nbytes)
            with trace.span(trace.WAIT, "copy to the device", kept, kept.nbytes):
                kept.leaving.wait()
            self._release_buffer(kept)
            if self._overlap:
                self._look_ahead(kept)
            return flat.as_strided(kept.shape, kept.stride)

    def settle(self) -> None:
        """Forget what autograd has let go of, and give its space back."""
        with self._lock:
            if not self._closed:
                self._settle()

    def close(self) -> None:
        """Return memory and files; what is still kept is lost. Raises the first failure that nobody has seen."""
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
            # A buffer must outlive what is in flight in it; the queue tells of failures when it is closed.
            for transfer in in_flight:
                with contextlib.suppress(TransferError):
                    transfer.wait()
            self._live.clear()
            self._ending.clear()
            self._known.clear()
            with ExitStack() as stack:
                stack.callback(self._host.close)
                stack.callback(self._memory.close)
                if self._drive is not None:
                    stack.callback(self._drive.close)

    # Down.

    def _take_buffer(self, nbytes: int) -> PoolBuffer:
        """CPU memory for a tensor, in whole pages. With an NVMe home it is bounded, and may have to be waited for."""
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
        """Give one staging buffer back, or wait until something in flight lets go of one. False: there is none."""
        spare = next((kept for kept in self._live.values() if kept.spare), None)
        if spare is not None:
            # The one put first: backward needs it last.
            self._release_buffer(spare)
            return True
        if self._ending:
            with trace.span(trace.WAIT, "room for a checkpoint"):
                for transfer in self._ending[0][0]:
                    # What it has failed with nobody needs to know, only that it has let go of its bytes.
                    with contextlib.suppress(TransferError):
                        self._device.arrived(transfer)
            self._settle()
            return True
        for kept in self._live.values():
            if kept.buffer is None or kept.up is not None:
                continue
            if kept.place is None:
                assert kept.down is not None
                self._device.arrived(kept.down)
                self._write_behind()
                return True
            if kept.reading is not None:
                _wait(kept.reading, "NVMe read", kept)
                self._release_buffer(kept)
                return True
            if kept.writing is not None:
                _wait(kept.writing, "NVMe write", kept)
                self._release_buffer(kept)
                return True
        return False

    def _write_behind(self) -> None:
        """Submit the write of every buffer that the device has filled."""
        if self._drive is None:
            return
        for kept in self._live.values():
            if kept.place is None and kept.buffer is not None and kept.down is not None and kept.down.done():
                kept.place = _take(self._drive, align_up(kept.nbytes, EXTENT_ALIGNMENT))
                kept.writing = _file(kept).write(_extent(kept), kept.buffer.memory)
                kept.down = None

    # Up.

    def _submit_up(self, kept: _Record) -> None:
        """Begin to copy a tensor to the device, once its bytes are in CPU memory."""
        if kept.up is not None:
            return
        if kept.buffer is None:
            self._read(kept, self._take_buffer(kept.nbytes))
        if kept.reading is not None:
            _wait(kept.reading, "NVMe read", kept)
            kept.reading = None
        if kept.down is not None:
            # Orders the two copies on the device; the host goes on.
            kept.down.wait()
        flat = torch.empty(kept.nbytes // kept.dtype.itemsize, dtype=kept.dtype, device=self._device.torch)
        kept.up = flat, self._device.copy(flat, kept.values)
        self._ledger.add(Tier.GPU, Kind.ACTIVATION, flat.nbytes)

    def _look_ahead(self, kept: _Record) -> None:
        """Backward goes on with what was put before: read it into staging that is free, and begin its way up."""
        before = [other for other in reversed(self._live.values()) if other.number < kept.number]
        for other in before[: self._buffer_count]:
            if other.buffer is None and other.up is None:
                piece = self._memory.take(align_up(other.nbytes, EXTENT_ALIGNMENT))
                if piece is None:
                    break
                self._read(other, piece)
        arrived = before and before[0].buffer is not None and (before[0].reading is None or before[0].reading.done())
        if arrived and self._device.is_accelerator:
            self._submit_up(before[0])

    def _read(self, kept: _Record, buffer: PoolBuffer) -> None:
        kept.buffer = buffer
        kept.reading = _file(kept).read(_extent(kept), buffer.memory)

    def _release_buffer(self, kept: _Record) -> None:
        """Give its staging buffer back where the drive has the bytes: now, or when the copy to the device is over.

        TransferError where they could not be written: then the buffer goes with the record.
        """
        if kept.buffer is None or kept.writing is None or not kept.writing.done():
            return
        kept.writing.wait()
        buffer, kept.buffer, kept.reading = kept.buffer, None, None
        leaving, kept.leaving = kept.leaving, None
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
                self._give(pieces)
            else:
                self._ending.append((transfers, pieces))
        self._write_behind()
        if not self._live and not self._ending:
            self._known.clear()
            self._memory.settle()
            if self._drive is not None:
                self._drive.settle()

    def _forget(self, kept: _Record) -> None:
        if self._live.pop(kept.number, None) is None:
            return
        if kept.up is not None:
            # Its memory goes back to the device's allocator: not before the copy into it is over.
            kept.up[1].wait()
            self._ledger.add(Tier.GPU, Kind.ACTIVATION, -kept.up[0].nbytes)
        transfers = kept.transfers
        # What is gone need not be written to its end.
        _cancel(transfers)
        self._ending.append((transfers, [piece for piece in (kept.buffer, kept.place) if piece is not None]))
        kept.buffer = kept.place = None

    def _give(self, pieces: Sequence[PoolBuffer]) -> None:
        for piece in pieces:
            (self._memory if piece.block.nvme is None else self._drive or self._memory).give(piece)

    # Tensors that several callers save.

    def _existing(self, tensor: Tensor) -> SavedTensor | None:
        found = self._known.get(tensor.untyped_storage().data_ptr())
        if found is None:
            return None
        storage, look, saved = found
        return saved() if not storage.expired() and look == _look(tensor) else None

    def _remember(self, tensor: Tensor, saved: SavedTensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage.data_ptr()] = StorageWeakRef(storage), _look(tensor), weakref.ref(saved)

    def _alive(self) -> None:
        if self._closed:
            raise StateError(
                "this graph's activations were on a tier of an engine that is closed: run its backward before close()"
            )


def _flat(tensor: Tensor) -> Tensor | None:
    """The memory that a tensor spans, as one row of its elements; None where much of it would be others' elements."""
    if not tensor.numel():
        return None
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return None if span > 2 * tensor.numel() else tensor.detach().as_strided((span,), (1,))


def _look(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors on one storage have in common if they hold the same values in the same layout."""
    return tensor._version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _take(slabs: GrowablePool, nbytes: int) -> PoolBuffer:
    """A piece, of a new slab if need be: as large as all before it, so that there are few."""
    piece = slabs.take(nbytes)
    if piece is None:
        slabs.grow(max(nbytes, slabs.nbytes))
        piece = slabs.take(nbytes)
    assert piece is not None
    return piece


def _file(kept: _Record) -> NvmeTier:
    assert kept.place is not None and kept.place.block.nvme is not None
    return kept.place.block.nvme


def _extent(kept: _Record) -> ActivationExtent:
    assert kept.place is not None
    return ActivationExtent(kept.place.offset, kept.place.nbytes, kept.number)


def _wait(transfer: Transfer, cause: str, kept: _Record) -> None:
    with trace.span(trace.WAIT, cause, kept, kept.nbytes):
        transfer.wait()


def _cancel(transfers: Sequence[Transfer]) -> None:
    """Begin nothing more of what has not begun; a copy of the device goes on."""
    for transfer in transfers:
        cancel = getattr(transfer, "cancel", None)
        if cancel is not None and not transfer.done():
            cancel()
