"""A flat tensor whose memory can be given back and taken again while views of it live on.

On an accelerator its storage is resized, which its caching allocator makes cheap. In CPU memory it is a mapping of its
own: given back by the page, at once and wholly, where the C library would keep it in a heap among what others hold.
While it has no bytes the mapping is read-only, so that it counts neither as committed nor against RLIMIT_DATA; reading
it then gives zeros.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import torch

from infinity.memory.pages import mapping

_LIBC = ctypes.CDLL(None, use_errno=True)


class ElasticBuffer:
    """`tensor` is flat, [numel] of `dtype` on `device`; it has no bytes at first."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.has_bytes = False
        self._nbytes = numel * dtype.itemsize
        self._region: mmap.mmap | None = None
        if device.type == "cpu" and self._nbytes:
            self._region = mapping(self._nbytes)
            self.tensor = torch.frombuffer(self._region, dtype=torch.uint8)[: self._nbytes].view(dtype)
            self._protect(mmap.PROT_READ)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
            self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """Give it bytes, whose content is not defined. MemoryError where the system refuses."""
        if self.has_bytes:
            return
        if self._region is None:
            self.tensor.untyped_storage().resize_(self._nbytes)
        else:
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.has_bytes = True

    def free(self) -> None:
        """Give its bytes back. Nothing may read or write them until the next `take`."""
        if not self.has_bytes:
            return
        if self._region is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._region.madvise(mmap.MADV_DONTNEED)
            self._protect(mmap.PROT_READ)
        self.has_bytes = False

    def _protect(self, rights: int) -> None:
        assert self._region is not None
        address, length = ctypes.c_void_p(self.tensor.data_ptr()), ctypes.c_size_t(len(self._region))
        if _LIBC.mprotect(address, length, ctypes.c_int(rights)) != 0:
            raise MemoryError(f"no memory for {self._nbytes} bytes: {os.strerror(ctypes.get_errno())}")
