"""A flat tensor whose memory can be given back and taken again while views of it stay valid.

On an accelerator its storage is resized, which the caching allocator makes cheap. In CPU memory it is a mapping of its
own, whose pages go back to the system at once; the C library would keep them in a fragmented heap. While the buffer has
no bytes the mapping is read-only, so that it counts neither as committed nor against RLIMIT_DATA; reading it then gives
zeros.

Fresh pages are slow: each costs a fault and is cleared, and in a virtual machine that has returned unused memory to its
host, the host must find one, too. So pages that one buffer gives up may go to the next: see `SparePages`.

Mappings of CPU memory of exact size, in large pages where the kernel has them.

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

_LIBC = ctypes.CDLL(None, use_errno=True)
# The parts of the kernel's interface that Python does not name: see mremap(2).
_MREMAP_MAYMOVE, _MREMAP_FIXED, _MREMAP_DONTUNMAP = 1, 2, 4
# A part of a buffer whose pages have moved may be a mapping of its own to the kernel, which has 65,530 of them.
_PARTS_MAX = 8192


class SparePages:
    """Pages without an owner, in parts of HUGE_PAGE bytes at the addresses of their last owner.

    A part moves to its next owner's addresses with its content (mremap with MREMAP_DONTUNMAP, Linux 5.7). Where the
    kernel refuses, or would need too many mappings, no pages are kept.
    """

    def __init__(self) -> None:
        # By address, with the mapping that they lie in, which so stays mapped. The part added last is used first.
        self._parts: dict[int, mmap.mmap] = {}
        # Addresses to which parts have moved.
        self._targets: set[int] = set()
        self._usable = hasattr(_LIBC, "mremap")
        if self._usable:
            _LIBC.mremap.restype = ctypes.c_void_p

    @property
    def nbytes(self) -> int:
        """Bytes of pages that are spare."""
        return len(self._parts) * HUGE_PAGE

    def put(self, address: int, nbytes: int, region: mmap.mmap) -> bool:
        """Take over the pages of a range of `region`, a multiple of HUGE_PAGE; return whether they are kept."""
        if self._usable:
            self._parts.update(dict.fromkeys(range(address, address + nbytes, HUGE_PAGE), region))
        return self._usable

    def fill(self, address: int, nbytes: int) -> None:
        """Move pages into a range that has given up its own, as far as there are spare pages."""
        targets = range(address, address + nbytes, HUGE_PAGE)
        missing = [target for target in targets if target not in self._parts]
        for target in targets:
            self._parts.pop(target, None)
        for target in missing:
            if not self._parts:
                return
            source, _ = self._parts.popitem()
            if not self._move(source, target):
                _drop(source)
                self._usable = False
                self.trim(0)

    def trim(self, nbytes_max: int) -> None:
        """Return pages to the system, the longest spare first, until at most `nbytes_max` bytes are left."""
        while self.nbytes > max(nbytes_max, 0):
            part = next(iter(self._parts))
            del self._parts[part]
            _drop(part)

    def _move(self, source: int, target: int) -> bool:
        self._targets.add(target)
        if len(self._targets) > _PARTS_MAX:
            return False
        flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
        size, where = ctypes.c_size_t(HUGE_PAGE), ctypes.c_void_p(target)
        moved = _LIBC.mremap(ctypes.c_void_p(source), size, size, ctypes.c_int(flags), where)
        return bool(moved == target)


class ElasticBuffer:
    """`tensor` is flat, [numel] of `dtype` on `device`; it has no bytes at first. In CPU memory it takes its pages from
    `spare` first, if that is given.

    mapped: whether it is a mapping (by default in CPU memory) or a storage that is resized. Views of the latter can be
    cut only while it has bytes; they then live as long as it does.
    """

    def __init__(
        self, numel: int, dtype: torch.dtype, device: torch.device, spare: SparePages | None = None,
        *, mapped: bool | None = None,
    ) -> None:  # fmt: skip
        self.has_bytes = False
        self.mapped = device.type == "cpu" if mapped is None else mapped
        self._spare = spare
        self._nbytes = numel * dtype.itemsize
        self._region: mmap.mmap | None = None
        # The part of it, from its beginning on, that spare pages can fill.
        self._parts_nbytes = self._nbytes // HUGE_PAGE * HUGE_PAGE
        if self.mapped and self._nbytes:
            self._region = mapping(self._nbytes + (HUGE_PAGE if self._parts_nbytes else 0), inherited=False)
            whole = torch.frombuffer(self._region, dtype=torch.uint8)
            self._address = whole.data_ptr()
            offset = -self._address % HUGE_PAGE if self._parts_nbytes else 0
            self.tensor = whole[offset : offset + self._nbytes].view(dtype)
            # The rest would take a whole large page, too.
            self._rest = offset + self._parts_nbytes
            with contextlib.suppress(OSError):
                self._region.madvise(mmap.MADV_NOHUGEPAGE, self._rest, len(self._region) - self._rest)
            self._protect(mmap.PROT_READ)
        else:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
            self.tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """Give it bytes with undefined content; raise MemoryError where the system refuses."""
        if self.has_bytes:
            return
        if self._region is None:
            self.tensor.untyped_storage().resize_(self._nbytes)
        else:
            if self._spare is not None and self._parts_nbytes:
                self._spare.fill(self.tensor.data_ptr(), self._parts_nbytes)
            self._protect(mmap.PROT_READ | mmap.PROT_WRITE)
        self.has_bytes = True

    def free(self, *, to_spare: bool = False) -> None:
        """Return its bytes, or make its pages spare. No reader or writer may use them until the next `take`."""
        if not self.has_bytes:
            return
        if self._region is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            spare = self._spare if to_spare else None
            kept = spare is not None and spare.put(self.tensor.data_ptr(), self._parts_nbytes, self._region)
            first = self._rest if kept else 0
            self._region.madvise(mmap.MADV_DONTNEED, first, len(self._region) - first)
            self._protect(mmap.PROT_READ)
        self.has_bytes = False

    def _protect(self, rights: int) -> None:
        assert self._region is not None
        address, length = ctypes.c_void_p(self._address), ctypes.c_size_t(len(self._region))
        if _LIBC.mprotect(address, length, ctypes.c_int(rights)) != 0:
            raise MemoryError(f"no memory for {self._nbytes} bytes: {os.strerror(ctypes.get_errno())}")


def vacate(tensor: torch.Tensor) -> None:
    """Return the bytes of a flat tensor: those of torch's own storage, or the pages that lie in it whole, where that
    cannot be resized: in a mapping, and once a numpy array shares it.
    """
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
        return
    first = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - first
    if length > 0 and tensor.is_cpu:
        _LIBC.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_DONTNEED))


def occupy(tensor: torch.Tensor) -> None:
    """Give a tensor that `vacate` was called for bytes of undefined content."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < tensor.nbytes:
        storage.resize_(tensor.nbytes)


def _drop(part: int) -> None:
    _LIBC.madvise(ctypes.c_void_p(part), ctypes.c_size_t(HUGE_PAGE), ctypes.c_int(mmap.MADV_DONTNEED))
