"""Asynchronous reads and writes between CPU tensors and files.

    with File.create(path, nbytes) as file, Queue() as queue:
        request = queue.write(file, offset, tensor)
        ...
        request.wait()      # TransferError names path, offset, bytes and cause

A queue takes any number of requests without blocking, has at most `depth` blocks in flight, and cuts large requests
into blocks that are served side by side. Every completion is checked; what a system call leaves is asked for again.
The back ends differ in speed only: "io_uring" and "libaio" queue in the kernel, "threads" is a pool of threads with
pread and pwrite, "python" the plain twin (`infinity.ops.aio_reference`).
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
from typing import Protocol

from torch import Tensor

from infinity.errors import ExtensionError, TransferError
from infinity.ops import build
from infinity.ops.aio_reference import END_OF_FILE, Job, PythonEngine
from infinity.ops.file import File

__all__ = ["BACKENDS", "File", "Queue", "Request"]

# In the order in which "auto" tries them, with their codes in csrc/aio/queue.h.
_NATIVE_CODES = {"io_uring": 2, "libaio": 1, "threads": 0}
BACKENDS = (*_NATIVE_CODES, "python")

BLOCK_NBYTES = 1 << 20
# Between two looks at the clock and at signals.
_SLICE_S = 0.2
# What threads get to end when no transfer is in flight, or when those that are have been given up.
_GRACE_S = 0.5

_log = logging.getLogger("infinity")
# What hanging system calls may still write to: never freed.
_left_behind: list[object] = []


class Request:
    """One read or write in flight. It keeps its tensor and its file's descriptors alive until it is done."""

    def __init__(self, queue: Queue, file: File, operation: str, offset: int, buffer: Tensor) -> None:
        self.operation = operation
        self.path = file.path
        self.offset = offset
        self.nbytes = buffer.nbytes
        self._queue = queue
        self._buffer: Tensor | None = buffer
        self._handle: _Handle | None = None
        # errno and reason of what went wrong. Not the exception: its traceback would keep frames and files alive.
        self._outcome: tuple[int, str] | None = None
        self._reported = False
        self._given_up = False

    def done(self) -> bool:
        """Whether the transfer has ended, well or not: `wait` then returns or raises at once."""
        handle = self._handle
        if handle is not None and handle.done():
            self._finish(handle)
        return self._handle is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all bytes are moved; TransferError where they are not, again at each call.

        timeout_s: None waits as long as the queue's `timeout_s`. When it is over, TransferError with errno ETIMEDOUT is
        raised and the transfer goes on: the buffer stays in use, and a later `wait` may succeed.
        """
        limit_s = self._queue.timeout_s if timeout_s is None else timeout_s
        self._queue._check_process()
        started = time.monotonic()
        while not self.done():
            waited_s = time.monotonic() - started
            if waited_s >= limit_s or self._queue.abandoned:
                # The queue's whole time limit is over: `close` need not allow it a second time.
                self._given_up = self._given_up or timeout_s is None
                raise self._failure(errno.ETIMEDOUT, f"not complete after {waited_s:.1f} s of waiting")
            self._look(min(limit_s - waited_s, _SLICE_S))
        self._reported = True
        if self._outcome is not None:
            raise self._failure(*self._outcome)

    @property
    def _unseen(self) -> bool:
        return self._outcome is not None and not self._reported

    def _look(self, seconds: float) -> None:
        handle = self._handle
        if handle is not None:
            handle.wait(seconds)

    def _begin(self, handle: _Handle) -> None:
        self._handle = handle

    def _end(self) -> None:
        self._handle, self._buffer = None, None

    def _finish(self, handle: _Handle) -> None:
        code, position = handle.outcome()
        if code == END_OF_FILE:
            self._outcome = errno.EIO, f"got {position} of {self.nbytes} bytes, then the file ended"
        elif code:
            self._outcome = code, f"{os.strerror(code)} after {position} of {self.nbytes} bytes"
        self._end()

    def _failure(self, code: int, reason: str) -> TransferError:
        return TransferError(
            self.operation, path=self.path, offset=self.offset, nbytes=self.nbytes, errno=code, reason=reason
        )

    def __repr__(self) -> str:
        state = "failed" if self.done() and self._outcome else "done" if self.done() else "in flight"
        return f"Request({self.operation} {self.nbytes} bytes at {self.offset} of {self.path!r}: {state})"


class Queue:
    """A queue of transfers with its own threads. Use as a context manager.

    backend: one of BACKENDS, or "auto" for the first of them that works here; `backend` tells which it is.
    depth: blocks in flight in a kernel queue. threads: threads of a pool. timeout_s: what `wait` and `close` allow.
    block_nbytes: size of the blocks that requests are cut into.
    ExtensionError where a back end asked for by name does not work here.
    """

    def __init__(
        self,
        backend: str = "auto",
        depth: int = 64,
        threads: int = 4,
        timeout_s: float = 300.0,
        block_nbytes: int = BLOCK_NBYTES,
    ) -> None:
        if backend != "auto" and backend not in BACKENDS:
            raise ValueError(f"no back end {backend!r}: there are auto, {', '.join(BACKENDS)}")
        if min(depth, threads, block_nbytes) < 1 or timeout_s <= 0:
            raise ValueError(
                f"depth {depth}, threads {threads} and block_nbytes {block_nbytes} must be at least 1, "
                f"timeout_s {timeout_s} above 0"
            )
        self.timeout_s = timeout_s
        self.abandoned = False
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._sweep_at = 2 * depth
        self._sweep_least = 2 * depth
        self._engine = _make_engine(backend, depth, threads, block_nbytes)
        self.backend = self._engine.name
        # Last: `__del__` takes a queue without it for one that was never made.
        self._closed = False

    def read(self, file: File, offset: int, buffer: Tensor, *, priority: int = 0) -> Request:
        """Fill `buffer` (contiguous, CPU, any dtype) from byte `offset` of `file`. Greater priorities go first."""
        return self._submit("read", file, offset, buffer, priority)

    def write(self, file: File, offset: int, buffer: Tensor, *, priority: int = 0) -> Request:
        """Write `buffer` (contiguous, CPU, any dtype) to byte `offset` of `file`, within its size."""
        if not file.writable:
            raise ValueError(f"{file.path} is open for reading only")
        if offset + buffer.nbytes > file.nbytes:
            raise ValueError(f"{buffer.nbytes} bytes at offset {offset} of {file.path}: it has {file.nbytes} bytes")
        return self._submit("write", file, offset, buffer, priority)

    def close(self) -> None:
        """Wait for what is in flight, then end the threads. May be called again; does nothing in a forked child.

        Raises the first TransferError that no `wait` has raised: a transfer that failed, or one that did not end in
        `timeout_s`. Threads that hang in a system call are left behind, and neither `close` nor the end of the
        process waits for them.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        unseen: list[TransferError] = []
        deadline = time.monotonic() + self.timeout_s
        for request in self._requests:
            try:
                if not request._reported:
                    request.wait(0.0 if request._given_up else max(0.0, deadline - time.monotonic()))
            except TransferError as error:
                if not request._given_up:
                    unseen.append(error)
        if not self._engine.close(_GRACE_S):
            self.abandoned = True
            stuck = [request for request in self._requests if not request.done()]
            _left_behind.extend((self._engine, stuck))
            _log.error("%d transfers hang and were left behind with their threads and buffers", len(stuck))
        self._requests = []
        if unseen:
            raise unseen[0]

    def _submit(self, operation: str, file: File, offset: int, buffer: Tensor, priority: int) -> Request:
        if buffer.device.type != "cpu":
            raise ValueError(f"buffer is on {buffer.device}: a CPU tensor is needed")
        if not buffer.is_contiguous():
            raise ValueError(f"buffer is not contiguous: strides {buffer.stride()} for shape {tuple(buffer.shape)}")
        if offset < 0:
            raise ValueError(f"offset {offset} of {file.path} is negative")
        self._check_process()
        request = Request(self, file, operation, offset, buffer)
        with self._lock:
            if self._closed:
                raise ValueError("the queue is closed")
            job = Job(
                write=operation == "write",
                descriptors=file.descriptors,
                alignment=file.alignment,
                memory_alignment=file.memory_alignment,
                address=buffer.data_ptr(),
                offset=offset,
                nbytes=buffer.nbytes,
                priority=priority,
            )
            if buffer.nbytes == 0:
                request._end()
                return request
            request._begin(self._engine.submit(job))
            self._keep(request)
        return request

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(f"this queue belongs to process {self._pid}: a forked child must make its own")

    def _keep(self, request: Request) -> None:
        # Whoever drops a request must not free a buffer in flight, nor lose an error.
        self._requests.append(request)
        if len(self._requests) >= self._sweep_at:
            self._requests = [r for r in self._requests if not r.done() or r._unseen]
            self._sweep_at = max(self._sweep_least, 2 * len(self._requests))

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
            # The error under way is the one to see; this one may well be its cause.
            _log.error("while closing the queue: %s", failure)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn("a Queue was never closed: its threads stay", ResourceWarning, stacklevel=2)


class _Handle(Protocol):
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def outcome(self) -> tuple[int, int]: ...


class _Engine(Protocol):
    name: str

    def submit(self, job: Job) -> _Handle: ...
    def close(self, timeout_s: float) -> bool: ...


class _TargetC(ctypes.Structure):
    # struct Target of csrc/aio/request.h
    _fields_ = (
        ("direct_fd", ctypes.c_int32),
        ("buffered_fd", ctypes.c_int32),
        ("alignment", ctypes.c_uint32),
        ("memory_alignment", ctypes.c_uint32),
    )


class _NativeHandle:
    """A request of the native queue, released with this object; until done it keeps the descriptors open."""

    def __init__(self, library: ctypes.CDLL, pointer: int, job: Job) -> None:
        self._library = library
        self._pointer = ctypes.c_void_p(pointer)
        self._job = job

    def done(self) -> bool:
        return bool(self._library.infinity_aio_done(self._pointer))

    def wait(self, timeout_s: float) -> bool:
        return bool(self._library.infinity_aio_wait(self._pointer, ctypes.c_double(timeout_s)))

    def outcome(self) -> tuple[int, int]:
        code, position = ctypes.c_int32(), ctypes.c_uint64()
        self._library.infinity_aio_outcome(self._pointer, ctypes.byref(code), ctypes.byref(position))
        return code.value, position.value

    def __del__(self) -> None:
        self._library.infinity_aio_release(self._pointer)


class _NativeEngine:
    """A queue of csrc/aio. OSError where the system does not offer the back end."""

    def __init__(self, library: ctypes.CDLL, name: str, depth: int, threads: int, block_nbytes: int) -> None:
        self.name = name
        self._library = library
        library.infinity_aio_open.restype = library.infinity_aio_submit.restype = ctypes.c_void_p
        code = ctypes.c_int32()
        pointer = library.infinity_aio_open(
            ctypes.c_int32(_NATIVE_CODES[name]),
            ctypes.c_uint32(depth),
            ctypes.c_int32(threads),
            ctypes.c_uint64(block_nbytes),
            ctypes.byref(code),
        )
        if pointer is None:
            raise OSError(code.value, os.strerror(code.value))
        self._pointer = ctypes.c_void_p(pointer)

    def submit(self, job: Job) -> _NativeHandle:
        target = _TargetC(job.descriptors.direct, job.descriptors.buffered, job.alignment, job.memory_alignment)
        code = ctypes.c_int32()
        pointer = self._library.infinity_aio_submit(
            self._pointer,
            ctypes.c_int32(job.write),
            ctypes.byref(target),
            ctypes.c_void_p(job.address),
            ctypes.c_int64(job.offset),
            ctypes.c_uint64(job.nbytes),
            ctypes.c_int32(job.priority),
            ctypes.byref(code),
        )
        if pointer is None:
            raise OSError(code.value, os.strerror(code.value))
        return _NativeHandle(self._library, pointer, job)

    def close(self, timeout_s: float) -> bool:
        return bool(self._library.infinity_aio_close(self._pointer, ctypes.c_double(timeout_s)))


def _make_engine(backend: str, depth: int, threads: int, block_nbytes: int) -> _Engine:
    refusals = []
    for name in BACKENDS if backend == "auto" else (backend,):
        if name == "python":
            return PythonEngine(threads, block_nbytes)
        library = build.require("aio") if backend != "auto" else build.load("aio")
        if library is None:
            continue
        try:
            return _NativeEngine(library, name, depth, threads, block_nbytes)
        except OSError as error:
            refusals.append(f"{name}: {error.strerror}")
            _log.debug("the I/O back end %s does not work here: %s", name, error)
    raise ExtensionError(f"the I/O back end {backend!r} does not work here ({'; '.join(refusals)}); use 'auto'")
