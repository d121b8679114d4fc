"""CPU memory by the page: mappings of exact size, in large pages where the kernel has them.

[Note: forks] A fork copies every page that a driver or an io_uring has pinned, at once, and every other page as soon as
either process writes it: a data loader's workers would cost the engine's memory once more. An engine's memory is
therefore not inherited. Its mappings are wiped in a child (MADV_WIPEONFORK, Linux 4.14), which keeps their addresses
taken: a mapping that were missing there (MADV_DONTFORK) would leave a hole for the child's own allocations, and freeing
the inherited objects would unmap those. The child's pages are protected as well, so that a stray tensor into them ends
it instead of reading zeros; parameters are made to say what is wrong (`Unit.disown`).
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
    """Zeroed private memory of at least `nbytes` bytes that is nobody else's, not yet touched.

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
    """From now on a forked child has the content of the mapping that `tensor` lies in, whatever `mapping` was told."""
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
