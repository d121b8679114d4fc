"""Checksums of buffers' blocks, taken while steps write them: what has just been written is still in a cache.

A checksum of what has left the caches takes a core as long as memory needs to give it back; where every core computes,
all of them wait for that one. On its way out it costs a few hundredths of the step.

    digest = Digest(block_nbytes)
    digest.buffer = states
    adam_step(pieces, step=1, grad_scale=1.0, digests=[digest])
    digest.finish()   # nobody may have written to the buffer since
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from infinity.ops import build
from infinity.ops.checksum import checksum
from infinity.ops.piece import Piece

# Elements of a chunk of work: kChunkNumel of csrc/adam/abi.cpp, which gives two stretches for each.
_CHUNK_NUMEL = 32768

_Words = np.ndarray[Any, np.dtype[np.uint32]]
_Lengths = np.ndarray[Any, np.dtype[np.uint64]]


class _Stretches(NamedTuple):
    """Checksums and lengths in bytes of stretches one behind the other, from byte `begin` of the buffer on."""

    begin: int
    nbytes: int
    crcs: _Words
    lengths: _Lengths


class _ArrayC(ctypes.Structure):
    # struct Watch::Array of csrc/adam/types.h
    _fields_ = (("behind", ctypes.c_uint64), ("crcs", ctypes.c_void_p), ("nbytes", ctypes.c_void_p))


class _WatchC(ctypes.Structure):
    # struct Watch
    _fields_ = (("arrays", _ArrayC * 5),)


class _DigestC(ctypes.Structure):
    # struct Digest
    _fields_ = (("watches", ctypes.c_void_p), ("block_nbytes", ctypes.c_uint64), ("crc", ctypes.c_void_p))


class Digest:
    """Of one buffer, in blocks of `block_nbytes`, at least 256 KiB. Each byte is stepped at most once."""

    def __init__(self, block_nbytes: int) -> None:
        self.block_nbytes = block_nbytes
        # [n] uint8 on the CPU; from step to step it may move with all that it holds.
        self.buffer: Tensor | None = None
        self._found: list[_Stretches] = []

    def add(self, array: _ArrayC, tensor: Tensor, begin: int) -> None:
        """Let native code leave here what it finds of a tensor that begins at byte `begin` of the buffer."""
        count = 2 * -(-tensor.numel() // _CHUNK_NUMEL)
        found = _Stretches(begin, tensor.nbytes, np.zeros(count, dtype=np.uint32), np.zeros(count, dtype=np.uint64))
        self._found.append(found)
        array.behind = begin % self.block_nbytes
        array.crcs, array.nbytes = found.crcs.ctypes.data, found.lengths.ctypes.data

    def finish(self) -> tuple[int, ...]:
        """The checksum of each block, what no step has written included; () where nothing was digested."""
        library = build.load("aio")
        if library is None or self.buffer is None or not self._found:
            return ()
        self._found.sort(key=lambda stretches: stretches.begin)
        crcs: list[_Words] = []
        lengths: list[_Lengths] = []
        at = 0
        for found in [*self._found, None]:
            begin = self.buffer.numel() if found is None else found.begin
            while at < begin:
                end = min(begin, at - at % self.block_nbytes + self.block_nbytes)
                crcs.append(np.array([checksum(self.buffer[at:end].numpy())], dtype=np.uint32))
                lengths.append(np.array([end - at], dtype=np.uint64))
                at = end
            if found is not None:
                crcs.append(found.crcs)
                lengths.append(found.lengths)
                at = found.begin + found.nbytes
        every_crc, every_length = np.concatenate(crcs), np.concatenate(lengths)
        blocks = np.zeros(-(-self.buffer.numel() // self.block_nbytes), dtype=np.uint32)
        library.infinity_aio_crc32c_join(
            ctypes.c_void_p(every_crc.ctypes.data), ctypes.c_void_p(every_length.ctypes.data),
            ctypes.c_uint64(len(every_crc)), ctypes.c_uint64(self.block_nbytes),
            ctypes.c_void_p(blocks.ctypes.data),
        )  # fmt: skip
        return tuple(blocks.tolist())


def watches(digests: Sequence[Digest], pieces: Sequence[Piece]) -> Any:
    """The argument of the step's native code: what it writes to the digests' buffers is included in their checksums.

    None where there is none for checksums. All digests have blocks of the same size.
    """
    library = build.load("aio")
    if library is None or not digests:
        return None
    (block_nbytes,) = {digest.block_nbytes for digest in digests}
    begins = sorted((digest.buffer.data_ptr(), at) for at, digest in enumerate(digests) if digest.buffer is not None)
    table = (_WatchC * len(pieces))()
    for watch, piece in zip(table, pieces, strict=True):
        written = (piece.exp_avg, piece.exp_avg_sq, piece.remainder, piece.master, piece.param)
        for array, tensor in zip(watch.arrays, written, strict=True):
            if tensor is None or not tensor.numel():
                continue
            place = bisect_right(begins, (tensor.data_ptr(), len(digests))) - 1
            if place < 0:
                continue
            begin, digest = tensor.data_ptr() - begins[place][0], digests[begins[place][1]]
            if digest.buffer is not None and begin < digest.buffer.numel():
                digest.add(array, tensor, begin)
    argument = _DigestC(
        ctypes.addressof(table), block_nbytes, ctypes.cast(library.infinity_aio_crc32c, ctypes.c_void_p)
    )
    # It points to the table.
    argument.table = table
    return ctypes.byref(argument)
