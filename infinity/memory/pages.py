"""CPU memory by the page: mappings of exact size, in large pages where the kernel has them."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from infinity.plan.types import EXTENT_ALIGNMENT, HUGE_PAGE, align_up


def mapping(nbytes: int) -> mmap.mmap:
    """Zeroed private memory of at least `nbytes` bytes that is nobody else's, not yet touched."""
    size = max(align_up(nbytes, EXTENT_ALIGNMENT), EXTENT_ALIGNMENT)
    region = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= 2 * HUGE_PAGE:
        # Large pages cut the cost of the first touch and of every look-up, where the kernel has them.
        with contextlib.suppress(OSError):
            region.madvise(mmap.MADV_HUGEPAGE)
    return region


def page_aligned(nbytes: int) -> Tensor:
    """A zeroed uint8 tensor of `nbytes` bytes in a mapping of its own, so that direct I/O takes it as it is."""
    return torch.frombuffer(mapping(nbytes), dtype=torch.uint8)
