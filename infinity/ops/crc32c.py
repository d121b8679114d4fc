"""CRC-32C (Castagnoli) as iSCSI, ext4 and NVMe define it: the Python fallback of csrc/aio/crc32c.cpp.

The data is cut into strips of equal length, which numpy processes in parallel, one byte of each at a time. Combining
the checksums of neighbours multiplies by a power of x modulo the polynomial, as in zlib's crc32_combine (Mark Adler).

CRC-32C of bytes in memory, by the native library or the Python fallback (`infinity.ops.crc32c`). Needs no torch.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from infinity.ops import build

# Reflected: the highest bit is the lowest power of x.
_POLYNOMIAL = 0x82F63B78
_ONE = 0x80000000
_BYTE = 0x00800000
_STRIP_NBYTES = 256

_Words = np.ndarray[Any, np.dtype[np.uint32]]


def crc32c(data: memoryview | bytes, crc: int = 0) -> int:
    """Return the checksum of earlier bytes with checksum `crc` followed by `data`."""
    values = np.frombuffer(data, dtype=np.uint8)
    strips = len(values) // _STRIP_NBYTES
    whole = strips * _STRIP_NBYTES
    if strips:
        crc = _multiply(_power(whole), crc) ^ _of_strips(values[:whole].reshape(strips, _STRIP_NBYTES))
    table = _byte_table()
    crc ^= 0xFFFFFFFF
    for value in values[whole:].tolist():
        crc = (crc >> 8) ^ int(table[(crc ^ value) & 255])
    return crc ^ 0xFFFFFFFF


def _of_strips(strips: np.ndarray[Any, np.dtype[np.uint8]]) -> int:
    """Return the checksum of the concatenated rows."""
    table = _byte_table()
    crcs: _Words = np.full(len(strips), 0xFFFFFFFF, dtype=np.uint32)
    for column in np.ascontiguousarray(strips.T):
        crcs = (crcs >> np.uint32(8)) ^ table[(crcs ^ column) & np.uint32(255)]
    crcs = ~crcs
    nbytes = strips.shape[1]
    # A checksum of 0 in front changes nothing, so it pairs with an odd row.
    while len(crcs) > 1:
        if len(crcs) % 2:
            crcs = np.concatenate((np.zeros(1, dtype=np.uint32), crcs))
        crcs = _shift_many(crcs[0::2], nbytes) ^ crcs[1::2]
        nbytes *= 2
    return int(crcs[0])


@functools.cache
def _byte_table() -> _Words:
    crcs: _Words = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crcs = np.where(crcs & 1, (crcs >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), crcs >> np.uint32(1))
    return crcs


def _multiply(a: int, b: int) -> int:
    product, bit = 0, _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


@functools.lru_cache(maxsize=256)
def _power(nbytes: int) -> int:
    """Return the factor by which `nbytes` appended zero bytes multiply a remainder."""
    power, square = _ONE, _BYTE
    while nbytes:
        if nbytes & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        nbytes >>= 1
    return power


def _shift_many(crcs: _Words, nbytes: int) -> _Words:
    factor = _power(nbytes)
    product = np.zeros_like(crcs)
    # Add up the factor times one power of x, for each set bit of the operand.
    for bit in range(32):
        term = np.uint32(_multiply(factor, 1 << bit))
        product ^= np.where(crcs & np.uint32(1 << bit), term, np.uint32(0))
    return product


def checksum(data: Any, crc: int = 0) -> int:
    """Return the checksum of bytes with checksum `crc` followed by `data` (bytes, a memoryview or numpy uint8)."""
    library = build.load("aio")
    if library is None:
        return crc32c(data, crc)
    values = np.frombuffer(data, dtype=np.uint8)
    function = library.infinity_aio_crc32c
    function.restype = ctypes.c_uint32
    return int(function(ctypes.c_uint32(crc), ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(values.nbytes), 0))
