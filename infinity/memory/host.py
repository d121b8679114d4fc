"""CPU memory of exact size: own anonymous mappings, page-aligned, pinned for the accelerator when there is one.

`Tensor.pin_memory()` rounds up to powers of two and copies; a mapping of our own that is registered with the driver
takes what the plan says. Registration that fails (RLIMIT_MEMLOCK, driver) falls back to pageable memory with one
warning.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch
from torch import Tensor

from infinity.log import warn_once
from infinity.memory.device import Device
from infinity.memory.ledger import Ledger
from infinity.plan.types import EXTENT_ALIGNMENT, align_up

_HUGE_PAGE = 2 << 20


def trim() -> None:
    """Give back to the system what the C library holds free, after a phase that used much memory for a short time."""
    with contextlib.suppress(OSError, AttributeError):
        # glibc only; other C libraries return memory by themselves.
        ctypes.CDLL(None).malloc_trim(0)


def page_aligned(nbytes: int) -> Tensor:
    """A zeroed uint8 tensor of `nbytes` bytes in a mapping of its own, so that direct I/O takes it as it is."""
    size = max(align_up(nbytes, EXTENT_ALIGNMENT), EXTENT_ALIGNMENT)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 2 * _HUGE_PAGE:
        # Large pages cut the cost of the first touch, where the kernel has them.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


class HostMemory:
    """Allocates buffers in CPU memory. Buffers go back to the system when the last reference to them goes."""

    def __init__(self, device: Device, *, pin: bool, ledger: Ledger) -> None:
        self._device = device
        self._pin = pin and device.is_accelerator
        self._ledger = ledger
        self._pinned: dict[int, int] = {}

    def allocate(self, nbytes: int) -> Tensor:
        """A zeroed uint8 tensor of `nbytes` bytes that starts on a page."""
        buffer = page_aligned(nbytes)
        if self._pin and nbytes:
            self._register(buffer)
        return buffer[:nbytes]

    def release(self, buffer: Tensor) -> None:
        """Unpin a buffer that is no longer used, before the last reference to it goes."""
        size = self._pinned.pop(buffer.data_ptr(), 0)
        if size:
            self._device.unregister(buffer.data_ptr())
            self._ledger.pinned_nbytes -= size

    def close(self) -> None:
        """Unpin every buffer, when no copy uses one any more. Call it before their last references go."""
        if self._pinned:
            self._device.synchronize()
        for pointer in self._pinned:
            self._device.unregister(pointer)
        self._ledger.pinned_nbytes -= sum(self._pinned.values())
        self._pinned.clear()

    def _register(self, buffer: Tensor) -> None:
        reason = self._device.register(buffer.data_ptr(), buffer.numel())
        if reason is None:
            self._pinned[buffer.data_ptr()] = buffer.numel()
            self._ledger.pinned_nbytes += buffer.numel()
        else:
            self._pin = False
            warn_once(
                "pin-failed",
                f"pinning {buffer.numel() / 1e6:.0f} MB failed ({reason}); CPU memory stays pageable and copies are "
                f"slower. "
                "Raise the locked-memory limit (ulimit -l) or lower what is kept on the CPU.",
            )
