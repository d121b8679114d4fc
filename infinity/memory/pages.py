"""Mappings of CPU memory of exact size, in large pages where the kernel has them.

[Note: forks] A fork copies every page that a driver or an io_uring has pinned at once, and every other page when either
process writes it, so a data loader's workers would cost the engine's memory once more. Therefore a child does not
inherit the engine's memory: its mappings are wiped there (MADV_WIPEONFORK, Linux 4.14). Wiping keeps the addresses
taken. A mapping left out of the child (MADV_DONTFORK) would free them for the child's own allocations, which freeing
the inherited objects would then unmap. The child's pages are also protected, so that a stray access ends the child
instead of reading zeros; parameters raise an error that says what is wrong (`Unit.disown`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from infinity.plan.types import EXTENT_ALIGNMENT, HUGE_PAGE, align_up

# See madvise(2) and mprotect(2); Python's mmap names neither.
_WIPE_ON_FORK, _KEEP_ON_FORK = 18, 19
_PROT_NONE = 0

_libc = ctypes.CDLL(None)
# Mappings that a child does not inherit, with their addresses. See [Note: forks].
_private: WeakKeyDictionary[mmap.mmap, int] = WeakKeyDictionary()


def mapping(nbytes: int, *, inherited: bool = True) -> mmap.mmap:
    """Map zeroed private memory of at least `nbytes` bytes, not yet touched.

    inherited: whether a forked child has its content. See [Note: forks].
    """
    size = max(align_up(nbytes, EXTENT_ALIGNMENT), EXTENT_ALIGNMENT)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 2 * HUGE_PAGE:
        # Large pages cut the cost of the first touch and of every look-up, where the kernel has them.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    if not inherited:
        # An older kernel copies: slower, and nothing else.
        with contextlib.suppress(OSError):
            region.madvise(_WIPE_ON_FORK)
            _private[region] = _address(region)
    return region


def page_aligned(nbytes: int, *, inherited: bool = True) -> Tensor:
    """A zeroed uint8 tensor of `nbytes` bytes in a mapping of its own, so that direct I/O takes it as it is."""
    return torch.frombuffer(mapping(nbytes, inherited=inherited), dtype=torch.uint8)


def let_inherit(tensor: Tensor) -> None:
    """Let forked children inherit the content of the mapping that `tensor` lies in, from now on."""
    if not tensor.is_cpu:
        return
    for region, address in list(_private.items()):
        if address <= tensor.data_ptr() < address + len(region):
            region.madvise(_KEEP_ON_FORK)
            del _private[region]


def _address(region: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


def _protect_in_child() -> None:
    for region, address in list(_private.items()):
        _libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(region)), ctypes.c_int(_PROT_NONE))
    _private.clear()


os.register_at_fork(after_in_child=_protect_in_child)
