"""The CPU tier: anonymous mappings of exact size, page-aligned, pinned for the accelerator when there is one.

`Tensor.pin_memory()` rounds up to powers of two and copies; a mapping that we register with the driver takes the bytes
that the plan says. If the driver refuses a whole buffer, it is registered in chunks. A buffer is pinned whole or not at
all, because a copy may not cross the border of pinned memory. If that fails too, this buffer and those after it stay
pageable, with one warning that has the driver's reason: copies are slower, results the same.

A device whose driver pins only what it allocates itself (`Device.pinning`) allocates the buffers.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Iterator

import torch
from torch import Tensor

from infinity.config.load import heap_is_tuned
from infinity.log import warn_once
from infinity.memory.ledger import Ledger
from infinity.memory.resizable_buffer import page_aligned
from infinity.memory.tiers.device import Device
from infinity.plan.capacity import PROCESS

# Bytes of a chunk, once the driver has refused a whole buffer.
_CHUNK_NBYTES = 256 << 20
# Parameters of mallopt(3) by their numbers in <malloc.h>: what lies in a mapping of its own, and when the top of the
# heap goes back to the system. The values that hold while a model is built, and those while it is trained. Left to
# itself glibc ends at 32 and 64 MiB; activations and gradients below the first then leave holes among each other, at
# whose edge the heap goes on growing.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_BUILDING = {_MMAP_THRESHOLD: 1 << 20}
_TRAINING = {_MMAP_THRESHOLD: PROCESS.pooled_nbytes_max, _TRIM_THRESHOLD: 64 << 20}


def trim() -> None:
    """Return free memory of the C library to the system, after a phase that used much memory for a short time."""
    with contextlib.suppress(OSError, AttributeError):
        # glibc only; other C libraries return memory by themselves.
        ctypes.CDLL(None).malloc_trim(0)


@contextlib.contextmanager
def mappings_of_their_own() -> Iterator[None]:
    """While a model is built: what is allocated with 1 MiB or more goes back to the system when it is freed, and
    afterwards what is allocated with 8 MiB or more.

    From the heap it would leave holes, over which training would spread what it allocates: resident memory would creep
    up to what the heap had been at its longest. Left alone where the environment says how the heap is kept.
    """
    if heap_is_tuned():
        yield
        return
    _tell_heap(_BUILDING)
    try:
        yield
    finally:
        _tell_heap(_TRAINING)


def _tell_heap(values: dict[int, int]) -> None:
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for parameter, value in values.items():
            library.mallopt(parameter, value)


class HostMemory:
    """Allocates buffers in CPU memory. Buffers go back to the system when the last reference to them goes."""

    def __init__(self, device: Device, *, pin: bool, ledger: Ledger) -> None:
        self._device = device
        self._pin = pin and device.pinning != "none"
        self._ledger = ledger
        # The registrations (address, bytes) that cover each pinned buffer, by its address.
        self._pinned: dict[int, list[tuple[int, int]]] = {}
        # Bytes of buffers that the device has allocated, by address.
        self._allocated: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """A zeroed uint8 tensor of `nbytes` bytes that starts on a page."""
        if self._pin and nbytes and self._device.pinning == "allocation":
            return self._allocate_pinned(nbytes)
        buffer = page_aligned(nbytes, inherited=False)
        if self._pin and nbytes:
            whole_nbytes = buffer.numel()
            reason = self._register_by(buffer, whole_nbytes)
            if reason is not None and whole_nbytes > _CHUNK_NBYTES:
                reason = self._register_by(buffer, _CHUNK_NBYTES)
            if reason is not None:
                self._refused(whole_nbytes, reason)
        return buffer[:nbytes]

    def release(self, buffer: Tensor) -> None:
        """Unpin a buffer that is no longer used, before the last reference to it goes."""
        self._unregister(self._pinned.pop(buffer.data_ptr(), []))
        self._ledger.pin(-self._allocated.pop(buffer.data_ptr(), 0))

    def close(self) -> None:
        """Unpin every buffer, when no copy uses one any more. Call it before their last references go."""
        if self._pinned or self._allocated:
            self._device.synchronize()
        self._ledger.pin(-sum(self._allocated.values()))
        self._allocated.clear()
        while self._pinned:
            self._unregister(self._pinned.popitem()[1])

    def _allocate_pinned(self, nbytes: int) -> Tensor:
        """As `allocate`, from the device's own allocator of pinned memory."""
        try:
            whole = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            self._refused(nbytes, str(error))
            return page_aligned(nbytes, inherited=False)[:nbytes]
        buffer = whole[-whole.data_ptr() % mmap.PAGESIZE :][:nbytes].zero_()
        self._ledger.pin(nbytes)
        self._allocated[buffer.data_ptr()] = nbytes
        return buffer

    def _refused(self, nbytes: int, reason: str) -> None:
        self._pin = False
        warn_once(
            "pin-failed",
            f"pinning {nbytes / 1e6:.0f} MB beside {self._ledger.pinned_nbytes / 1e6:.0f} MB pinned failed ({reason}); "
            "CPU memory allocated from here on stays pageable: copies are slower, results the same. "
            "The driver sets this limit, not ulimit -l: free memory, or lower what is kept on the CPU.",
        )

    def _register_by(self, buffer: Tensor, chunk_nbytes: int) -> str | None:
        """Pin the whole buffer, `chunk_nbytes` at a time, or nothing of it; return the reason of a refusal."""
        done: list[tuple[int, int]] = []
        for offset in range(0, buffer.numel(), chunk_nbytes):
            chunk = buffer.data_ptr() + offset, min(chunk_nbytes, buffer.numel() - offset)
            reason = self._device.register(*chunk)
            if reason is not None:
                self._unregister(done)
                return reason
            self._ledger.pin(chunk[1])
            done.append(chunk)
        self._pinned[buffer.data_ptr()] = done
        return None

    def _unregister(self, chunks: list[tuple[int, int]]) -> None:
        for pointer, nbytes in chunks:
            self._device.unregister(pointer)
            self._ledger.pin(-nbytes)
