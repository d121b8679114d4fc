"""CRC-32C of bytes in memory, by the native library or the Python fallback (`infinity.ops.crc32c`). Needs no torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from infinity.ops import build
from infinity.ops.crc32c import crc32c


def checksum(data: Any, crc: int = 0) -> int:
    """Return the checksum of bytes with checksum `crc` followed by `data` (bytes, a memoryview or numpy uint8)."""
    library = build.load("aio")
    if library is None:
        return crc32c(data, crc)
    values = np.frombuffer(data, dtype=np.uint8)
    function = library.infinity_aio_crc32c
    function.restype = ctypes.c_uint32
    return int(function(ctypes.c_uint32(crc), ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(values.nbytes), 0))
