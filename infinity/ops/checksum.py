"""The CRC-32C of bytes in memory: the native library's or the Python fallback's (`infinity.ops.crc32c`). No torch."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from infinity.ops import build
from infinity.ops.crc32c import crc32c


def checksum(data: Any, crc: int = 0) -> int:
    """The checksum of `data` (bytes, a memory view or a numpy array of bytes) behind bytes whose checksum is `crc`."""
    library = build.load("aio")
    if library is None:
        return crc32c(data, crc)
    values = np.frombuffer(data, dtype=np.uint8)
    function = library.infinity_aio_crc32c
    function.restype = ctypes.c_uint32
    return int(
        function(ctypes.c_uint32(crc), ctypes.c_void_p(values.ctypes.data), ctypes.c_uint64(values.nbytes), 0)
    )
