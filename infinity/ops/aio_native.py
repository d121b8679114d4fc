"""The native I/O back ends: csrc/aio through its C ABI (csrc/aio/abi.cpp)."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from typing import Any

from infinity.ops.aio_reference import IoRequest
from infinity.ops.file import Descriptors

# Back end -> code in csrc/aio/queue.h, in the order in which "auto" tries them.
CODES = {"io_uring": 2, "libaio": 1, "threads": 0}

_log = logging.getLogger("infinity")
_int32_at, _uint64_at = ctypes.POINTER(ctypes.c_int32), ctypes.POINTER(ctypes.c_uint64)
_int64_at = ctypes.POINTER(ctypes.c_int64)


class _TargetC(ctypes.Structure):
    # struct Target of csrc/aio/request.h
    _fields_ = (
        ("direct_fd", ctypes.c_int32),
        ("buffered_fd", ctypes.c_int32),
        ("alignment", ctypes.c_uint32),
        ("memory_alignment", ctypes.c_uint32),
        ("registered", ctypes.c_int32),
    )


# Function -> (result, arguments). Functions that may block release the interpreter's lock. The prompt ones keep it,
# because they take less time than releasing and reacquiring it.
_address, _i32, _i64, _u64, _seconds = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_uint64, ctypes.c_double
_BLOCKING = {
    "open": (_address, (_i32, ctypes.c_uint32, _i32, _u64, _u64, _int32_at)),
    "close": (_i32, (_address, _seconds)),
    "wait": (_i32, (_address, _seconds)),
    "wait_room": (_i32, (_address, _seconds)),
    "register_buffer": (_i32, (_address, _address, _u64)),
    "unregister_buffer": (None, (_address, _address)),
}
_PROMPT = {
    "submit": (_address, (_address, _i32, ctypes.POINTER(_TargetC), _address, _i64, _u64, _i32, _i32, _int32_at)),
    "done": (_i32, (_address,)),
    "urge": (None, (_address,)),
    "cancel": (_i32, (_address,)),
    "outcome": (None, (_address, _int32_at, _uint64_at)),
    "checksum": (ctypes.c_uint32, (_address,)),
    "moments": (None, (_address, _int64_at, _int64_at)),
    "release": (None, (_address,)),
    "register_file": (_i32, (_address, _i32)),
    "unregister_file": (None, (_address, _i32)),
}


class Calls:
    """The functions of the library, with their types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        for table, prototype in ((_BLOCKING, ctypes.CFUNCTYPE), (_PROMPT, ctypes.PYFUNCTYPE)):
            for name, (result, arguments) in table.items():
                setattr(self, name, prototype(result, *arguments)((f"infinity_aio_{name}", library)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


class NativeHandle:
    """A request of the native queue, released with this object; it keeps the file's descriptors open."""

    __slots__ = ("_calls", "_descriptors", "_pointer")

    def __init__(self, calls: Calls, pointer: int, descriptors: Descriptors) -> None:
        self._calls = calls
        self._pointer = pointer
        self._descriptors = descriptors

    def done(self) -> bool:
        return bool(self._calls.done(self._pointer))

    def wait(self, timeout_s: float) -> bool:
        return bool(self._calls.wait(self._pointer, timeout_s))

    def urge(self) -> None:
        self._calls.urge(self._pointer)

    def cancel(self) -> bool:
        return bool(self._calls.cancel(self._pointer))

    def outcome(self) -> tuple[int, int]:
        code, position = ctypes.c_int32(), ctypes.c_uint64()
        self._calls.outcome(self._pointer, code, position)
        return code.value, position.value

    def checksum(self) -> int:
        return int(self._calls.checksum(self._pointer))

    def moments(self) -> tuple[int, int]:
        began, ended = ctypes.c_int64(), ctypes.c_int64()
        self._calls.moments(self._pointer, began, ended)
        return began.value, ended.value

    def __del__(self) -> None:
        self._calls.release(self._pointer)


class NativeEngine:
    """A queue of csrc/aio. The constructor raises OSError if the system does not offer the back end."""

    def __init__(
        self, library: ctypes.CDLL, name: str, depth: int, threads: int, block_nbytes: int, pending_max: int
    ) -> None:
        self.name = name
        self._calls = Calls(library)
        # id of descriptors -> (number of the registered file, descriptors); the reference keeps the id valid.
        self._files: dict[int, tuple[int, Descriptors]] = {}
        # Reused by all calls; the queue's lock guards it.
        self._error = ctypes.c_int32()
        pointer = self._calls.open(CODES[name], depth, threads, block_nbytes, pending_max, self._error)
        if pointer is None:
            raise OSError(self._error.value, os.strerror(self._error.value))
        self._pointer: int = pointer

    def submit(self, job: IoRequest) -> NativeHandle | None:
        """Queue a transfer of at least one byte; return None if `pending_max` requests are not over yet."""
        descriptors = job.descriptors
        registered = self._files.get(id(descriptors), (-1,))[0]
        target = _TargetC(descriptors.direct, descriptors.buffered, job.alignment, job.memory_alignment, registered)
        pointer = self._calls.submit(
            self._pointer, job.write, target, job.address, job.offset, job.nbytes, job.priority, job.check,
            self._error,
        )  # fmt: skip
        if pointer is not None:
            return NativeHandle(self._calls, pointer, descriptors)
        if self._error.value == errno.EBUSY:
            return None
        raise OSError(self._error.value, os.strerror(self._error.value))

    def wait_room(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether another request would be accepted."""
        return bool(self._calls.wait_room(self._pointer, timeout_s))

    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Register memory with the kernel; return False if it refuses."""
        code = self._calls.register_buffer(self._pointer, address, nbytes)
        if code:
            _log.debug("%s does not register %d bytes of memory: %s", self.name, nbytes, os.strerror(code))
        return not code

    def unregister_buffer(self, address: int) -> None:
        """Undo `register_buffer`."""
        self._calls.unregister_buffer(self._pointer, address)

    def register_file(self, descriptors: Descriptors) -> bool:
        """Register a file with the kernel, which keeps it open until `unregister_file`; return False if it refuses."""
        if descriptors.direct < 0:
            return False
        number = self._calls.register_file(self._pointer, descriptors.direct)
        if number < 0:
            _log.debug("%s does not register a file: %s", self.name, os.strerror(-number))
            return False
        self._files[id(descriptors)] = number, descriptors
        return True

    def unregister_file(self, descriptors: Descriptors) -> None:
        """Undo `register_file`."""
        number, _ = self._files.pop(id(descriptors))
        self._calls.unregister_file(self._pointer, number)

    def close(self, timeout_s: float) -> bool:
        """Complete the queued requests for up to `timeout_s` and end the threads; return False if a thread hangs."""
        self._files.clear()
        return bool(self._calls.close(self._pointer, timeout_s))
