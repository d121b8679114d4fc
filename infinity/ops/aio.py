"""Asynchronous reads and writes between CPU tensors and files.

    with File.create(path, nbytes) as file, Queue() as queue:
        request = queue.write(file, offset, tensor)
        ...
        request.wait()      # TransferError names path, offset, bytes and cause

A queue accepts `pending_max` requests without blocking, cuts large ones into blocks and has at most `depth` blocks in
flight. Reads and writes alternate, because a drive moves more bytes with both in flight. Within one kind a request that
a thread waits for goes first, then greater priorities. Priorities below 0 come after all other reads and writes. The
order of requests in flight is not guaranteed, and a write must not share a page of 4096 bytes with another request in
flight.

Every completion is checked, and a partial transfer is continued. The back ends differ only in speed: "io_uring" and
"libaio" queue in the kernel, "threads" is a pool of threads with pread and pwrite. "python" is the Python fallback
(`infinity.ops.aio_fallback`), whose one thread serves one request at a time, in their order and without priorities.

The native I/O back ends: csrc/aio through its C ABI (csrc/aio/abi.cpp).
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import threading
import time
import warnings
from types import TracebackType
from typing import Any

from torch import Tensor

from infinity.errors import ExtensionError, TransferError
from infinity.ops import build
from infinity.ops.aio_fallback import (
    CHECK_ALL,
    CHECK_NONE,
    CHECK_SAMPLE,
    END_OF_FILE,
    IoRequest,
    PythonEngine,
    PythonHandle,
)
from infinity.ops.file import Descriptors, File

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


_Handle = NativeHandle | PythonHandle
_Engine = NativeEngine | PythonEngine

__all__ = ["BACKENDS", "File", "Queue", "Request"]

# The order in which "auto" tries them.
BACKENDS = (*CODES, "python")

# With 1 MiB the measured drives reach fio's best bandwidth (docs/benchmarks.md). Other sizes help one drive and slow
# down another; `infinity bench` finds the best size of a drive.
BLOCK_NBYTES = 1 << 20
PENDING_MAX = 16384
# The most unreported failures that are kept for `close`.
_UNREPORTED_MAX = 64
# Longest blocking wait before the clock and signals are checked again.
_SLICE_S = 0.2
# Time for threads to end once no transfer is in flight or all that are have been given up.
_GRACE_S = 0.5
# Buffers of hanging system calls, which may still write to them: never freed.
_left_behind: list[object] = []


class Request:
    """One read or write in flight. It keeps its tensor and its file's descriptors alive until it is done."""

    __slots__ = (
        "__weakref__", "_buffer", "_checked", "_expected", "_given_up", "_handle", "_outcome", "_queue", "_reported",
        "checksum", "moments", "nbytes", "offset", "operation", "path",
    )  # fmt: skip

    def __init__(
        self, queue: Queue, file: File, operation: str, offset: int, buffer: Tensor, expected: int | None
    ) -> None:
        self.operation = operation
        self.path = file.path
        self.offset = offset
        self.nbytes = buffer.nbytes
        # The CRC-32C of the bytes, if it was requested and the transfer has succeeded.
        self.checksum: int | None = None
        # perf_counter_ns when the first block began (0: none did) and when the request was over; valid once done.
        self.moments = (0, 0)
        self._queue = queue
        self._buffer: Tensor | None = buffer
        self._expected = expected
        self._handle: _Handle | None = None
        # errno and reason of a failure. Not the exception, whose traceback would keep frames and files alive.
        self._outcome: tuple[int, str] | None = None
        self._reported = False
        self._given_up = False
        self._checked = False

    def done(self) -> bool:
        """Return whether the transfer is over, with or without an error; `wait` then returns or raises at once."""
        handle = self._handle
        if handle is not None and handle.done():
            self._finish(handle)
        return self._handle is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return once all bytes are moved.

        The call moves the blocks that have not begun before all reads, or writes, that no thread waits for.

        timeout_s: limit in seconds; None: the queue's `timeout_s`.

        Raises:
            TransferError: the transfer failed; every call raises it again. After errno ETIMEDOUT the transfer continues
                and uses its buffer, and a later `wait` may succeed.
        """
        limit_s = self._queue.timeout_s if timeout_s is None else timeout_s
        self._queue._check_process()
        started = time.monotonic()
        handle = self._handle
        if handle is not None and not handle.done():
            handle.urge()
        while not self.done():
            waited_s = time.monotonic() - started
            if waited_s >= limit_s or self._queue.abandoned:
                # `close` does not wait for the queue's time limit again.
                self._given_up = self._given_up or timeout_s is None
                raise self._failure(errno.ETIMEDOUT, f"not complete after {waited_s:.1f} s of waiting")
            if (handle := self._handle) is not None:
                handle.wait(min(limit_s - waited_s, _SLICE_S))
        self._reported = True
        if self._outcome is not None:
            raise self._failure(*self._outcome)

    def cancel(self) -> bool:
        """Begin no further block; return False without any effect if all blocks have begun.

        The buffer stays in use until the blocks in flight are over; `wait` then raises TransferError with errno
        ECANCELED.
        """
        self._queue._check_process()
        handle = self._handle
        return handle is not None and handle.cancel()

    @property
    def _unreported(self) -> bool:
        return self._outcome is not None and not self._reported and self._outcome[0] != errno.ECANCELED

    def _begin(self, handle: _Handle, checked: bool) -> None:
        self._handle = handle
        self._checked = checked

    def _end(self) -> None:
        self._handle, self._buffer = None, None

    def _finish(self, handle: _Handle) -> None:
        code, position = handle.outcome()
        self.moments = handle.moments()
        if code == END_OF_FILE:
            self._outcome = errno.EIO, f"got {position} of {self.nbytes} bytes, then the file ended"
        elif code:
            self._outcome = code, f"{os.strerror(code)} after {position} of {self.nbytes} bytes"
        elif self._checked:
            self.checksum = handle.checksum()
            if self._expected not in (None, self.checksum):
                reason = f"the bytes have CRC-32C {self.checksum:#010x}, but {self._expected:#010x} was expected"
                self._outcome = errno.EBADMSG, reason
        self._end()

    def _failure(self, code: int, reason: str) -> TransferError:
        return TransferError(
            self.operation, path=self.path, offset=self.offset, nbytes=self.nbytes, errno=code, reason=reason
        )

    def __repr__(self) -> str:
        state = "failed" if self.done() and self._outcome else "done" if self.done() else "in flight"
        return f"Request({self.operation} {self.nbytes} bytes at {self.offset} of {self.path!r}: {state})"


class Queue:
    """A queue of transfers with its own threads; thread-safe. Use as a context manager.

    Arguments:
        backend: one of BACKENDS, or "auto" for the first that works; the attribute `backend` names it.
        depth: blocks in flight in a kernel queue.
        threads: threads of the back end "threads".
        timeout_s: limit of `wait` and `close` in seconds.
        block_nbytes: size of the blocks that requests are cut into.
        pending_max: requests that are not over at a time. A further one waits for room, and raises TransferError with
            errno ETIMEDOUT after `timeout_s`.

    Raises:
        ExtensionError: the named back end does not work on this machine.
    """

    def __init__(
        self,
        backend: str = "auto",
        depth: int = 32,
        threads: int = 4,
        timeout_s: float = 300.0,
        block_nbytes: int = BLOCK_NBYTES,
        pending_max: int = PENDING_MAX,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"no back end {backend!r}: there are auto, {', '.join(BACKENDS)}")
        if min(depth, threads, block_nbytes, pending_max) < 1 or timeout_s <= 0:
            raise ValueError(
                f"depth {depth}, threads {threads}, block_nbytes {block_nbytes} and pending_max {pending_max} must be "
                f"at least 1, timeout_s {timeout_s} above 0"
            )
        self.timeout_s = timeout_s
        self.abandoned = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._sweep_at = 2 * depth
        self._sweep_least = 2 * depth
        self._registered: dict[int, Tensor | Descriptors] = {}
        self._engine = _make_engine(backend, depth, threads, block_nbytes, pending_max)
        self.backend = self._engine.name
        # The most bytes in flight before the next request begins.
        self.ahead_nbytes = {"threads": threads, "python": 1}.get(self.backend, depth) * block_nbytes
        # Set last, because `__del__` ignores a queue without it as incompletely constructed.
        self._closed = False

    def read(
        self, file: File, offset: int, buffer: Tensor, *,
        priority: int = 0, checksum: bool = False, expected: int | None = None, sampled: bool = False,
    ) -> Request:  # fmt: skip
        """Submit a read of `buffer.nbytes` bytes at `offset` of `file` into `buffer`.

        Arguments:
            offset: in bytes.
            buffer: contiguous CPU tensor of any dtype; in use until the request is over.
            priority: greater ones go first; those below 0 come after all other reads and writes.
            checksum: compute the CRC-32C of the bytes.
            expected: the CRC-32C that the bytes must have; otherwise `wait` raises TransferError with errno EBADMSG.
            sampled: the CRC-32C covers only one line of 64 bytes of each page of 4096, at a place that differs from
                page to page. It detects misplaced and stale pages at a 64th of the cost.
        """
        check = _check(checksum or expected is not None, sampled)
        return self._submit("read", file, offset, buffer, priority, check, expected)

    def write(
        self, file: File, offset: int, buffer: Tensor, *,
        priority: int = 0, checksum: bool = False, sampled: bool = False,
    ) -> Request:  # fmt: skip
        """Submit a write of `buffer` to `offset` of `file`, within its size; arguments as in `read`.

        Raises:
            ValueError: the file is open for reading only, or the bytes exceed its size.
        """
        if not file.writable:
            raise ValueError(f"{file.path} is open for reading only")
        if offset + buffer.nbytes > file.nbytes:
            raise ValueError(f"{buffer.nbytes} bytes at offset {offset} of {file.path}: it has {file.nbytes} bytes")
        return self._submit("write", file, offset, buffer, priority, _check(checksum, sampled), None)

    def register(self, what: Tensor | File) -> bool:
        """Register memory or a file with the kernel, which makes later transfers on it cheaper.

        The queue keeps it (a file: open) until `unregister` or `close`. Return False if the back end, the kernel or its
        limit on locked memory refuses; transfers work without registration too.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            if isinstance(self._engine, PythonEngine):
                return False
            held = what.descriptors if isinstance(what, File) else what
            if id(held) in self._registered:
                return True
            if isinstance(held, Tensor):
                taken = held.nbytes > 0 and self._engine.register_buffer(held.data_ptr(), held.nbytes)
            else:
                taken = self._engine.register_file(held)
            if taken:
                self._registered[id(held)] = held
            return taken

    def unregister(self, what: Tensor | File) -> None:
        """Undo `register`; do nothing if it returned False. No transfer in flight may use the memory or file."""
        self._check_process()
        with self._lock:
            held = self._registered.pop(id(what.descriptors if isinstance(what, File) else what), None)
            if held is None or self._closed or isinstance(self._engine, PythonEngine):
                return
            if isinstance(held, Tensor):
                self._engine.unregister_buffer(held.data_ptr())
            else:
                self._engine.unregister_file(held)

    def close(self) -> None:
        """Wait for the transfers in flight, then end the threads. Idempotent; does nothing in a forked child.

        Threads that hang in a system call are abandoned; neither `close` nor the exit of the process waits for them.

        Raises:
            TransferError: the first failure that no `wait` has raised, or a transfer that did not end in `timeout_s`.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        unreported: list[TransferError] = []
        deadline = time.monotonic() + self.timeout_s
        for request in self._requests:
            try:
                if not request._reported:
                    request.wait(0.0 if request._given_up else max(0.0, deadline - time.monotonic()))
            except TransferError as error:
                if not request._given_up and error.errno != errno.ECANCELED:
                    unreported.append(error)
        if not self._engine.close(_GRACE_S):
            self.abandoned = True
            stuck = [request for request in self._requests if not request.done()]
            _left_behind.extend((self._engine, stuck, self._registered))
            _log.error("%d transfers hang and were left behind with their threads and buffers", len(stuck))
        self._requests, self._registered = [], {}
        if unreported:
            raise unreported[0]

    def _submit(
        self, operation: str, file: File, offset: int, buffer: Tensor, priority: int, check: int,
        expected: int | None,
    ) -> Request:  # fmt: skip
        if buffer.device.type != "cpu":
            raise ValueError(f"buffer is on {buffer.device}: a CPU tensor is needed")
        if not buffer.is_contiguous():
            raise ValueError(f"buffer is not contiguous: strides {buffer.stride()} for shape {tuple(buffer.shape)}")
        if offset < 0:
            raise ValueError(f"offset {offset} of {file.path} is negative")
        self._check_process()
        self._check_open()
        request = Request(self, file, operation, offset, buffer, expected)
        job = IoRequest(
            operation == "write", file.descriptors, file.alignment, file.memory_alignment, buffer.data_ptr(), offset,
            request.nbytes, priority, check,
        )  # fmt: skip
        started = time.monotonic()
        while not self._try_submit(request, job):
            waited_s = time.monotonic() - started
            if waited_s >= self.timeout_s:
                reason = f"the queue was full for {waited_s:.1f} s: none of its requests ended"
                raise request._failure(errno.ETIMEDOUT, reason)
            self._engine.wait_room(min(self.timeout_s - waited_s, _SLICE_S))
        return request

    def _try_submit(self, request: Request, job: IoRequest) -> bool:
        with self._lock:
            self._check_open()
            if not job.nbytes:
                request._end()
                return True
            handle = self._engine.submit(job)
            if handle is None:
                return False
            request._begin(handle, job.check != CHECK_NONE)
            # The queue keeps the request, so that a caller who drops it neither frees a buffer in flight nor loses an
            # error.
            self._requests.append(request)
            if len(self._requests) >= self._sweep_at:
                self._sweep()
            return True

    def _sweep(self) -> None:
        unreported = 0
        kept = []
        for request in self._requests:
            if request.done():
                unreported += request._unreported
                if not request._unreported or unreported > _UNREPORTED_MAX:
                    continue
            kept.append(request)
        self._requests = kept
        self._sweep_at = max(self._sweep_least, 2 * len(kept))

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the queue is closed")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"this queue belongs to process {self._pid}: a forked child must make its own")

    def __enter__(self) -> Queue:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except TransferError as failure:
            if error is None:
                raise
            # Raise the original error; this one may be its cause, so it is logged.
            _log.error("while closing the queue: %s", failure)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn("a Queue was never closed: its threads stay", ResourceWarning, stacklevel=2)


def _check(wanted: bool, sampled: bool) -> int:
    if not wanted:
        return CHECK_NONE
    return CHECK_SAMPLE if sampled else CHECK_ALL


def _make_engine(backend: str, depth: int, threads: int, block_nbytes: int, pending_max: int) -> _Engine:
    refusals = []
    for name in BACKENDS if backend == "auto" else (backend,):
        if name == "python":
            return PythonEngine(block_nbytes, pending_max)
        library = build.require("aio") if backend != "auto" else build.load("aio")
        if library is None:
            continue
        try:
            return NativeEngine(library, name, depth, threads, block_nbytes, pending_max)
        except OSError as error:
            refusals.append(f"{name}: {error.strerror}")
            _log.debug("the I/O back end %s does not work here: %s", name, error)
    raise ExtensionError(f"the I/O back end {backend!r} does not work here ({'; '.join(refusals)}); use 'auto'")
