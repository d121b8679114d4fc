"""Asynchronous reads and writes between CPU tensors and files.

    with File.create(path, nbytes) as file, Queue() as queue:
        request = queue.write(file, offset, tensor)
        ...
        request.wait()      # TransferError names path, offset, bytes and cause

A queue takes `pending_max` requests without blocking, has at most `depth` blocks in flight, and cuts large requests
into blocks that are served side by side. Reads and writes take turns: a drive moves more when it has both. Of one kind
greater priorities go first, and before all of them what somebody waits for; what has a priority below 0 stays behind
both kinds. No order between requests in flight may be relied on, and two of which one writes must not share a page of
4096 bytes.
Every completion is checked; what a system call leaves is asked for again.
The back ends differ in speed only: "io_uring" and "libaio" queue in the kernel, "threads" is a pool of threads with
pread and pwrite, "python" the Python fallback (`infinity.ops.aio_reference`).
"""

from __future__ import annotations

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
from infinity.ops.aio_native import CODES, NativeEngine
from infinity.ops.aio_reference import CHECK_ALL, CHECK_NONE, CHECK_SAMPLE, END_OF_FILE, IoRequest, PythonEngine
from infinity.ops.file import Descriptors, File

__all__ = ["BACKENDS", "File", "Queue", "Request"]

# In the order in which "auto" tries them.
BACKENDS = (*CODES, "python")
_IN_KERNEL = ("io_uring", "libaio")

# Drives differ: one is read 8 % faster with 512 KiB, another 5 % slower, and written 12 % slower. With 1 MiB both are
# as fast as fio's best (docs/benchmarks.md); `infinity bench` finds a drive's own.
BLOCK_NBYTES = 1 << 20
PENDING_MAX = 16384
# Failures that nobody asked about and that are kept for `close`.
_UNSEEN_MAX = 64
# Between two looks at the clock and at signals.
_SLICE_S = 0.2
# What threads get to end when no transfer is in flight, or when those that are have been given up.
_GRACE_S = 0.5

_log = logging.getLogger("infinity")
# What hanging system calls may still write to: never freed.
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
        # The CRC-32C of the bytes, where it was asked for and once they are moved.
        self.checksum: int | None = None
        # When its first byte began to move (0: none did) and when it was over, once it is done; perf_counter_ns.
        self.moments = (0, 0)
        self._queue = queue
        self._buffer: Tensor | None = buffer
        self._expected = expected
        self._handle: _Handle | None = None
        # errno and reason of what went wrong. Not the exception: its traceback would keep frames and files alive.
        self._outcome: tuple[int, str] | None = None
        self._reported = False
        self._given_up = False
        self._checked = False

    def done(self) -> bool:
        """Whether the transfer has ended, well or not: `wait` then returns or raises at once."""
        handle = self._handle
        if handle is not None and handle.done():
            self._finish(handle)
        return self._handle is None

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when all bytes are moved; TransferError where they are not, again at each call.

        What has not begun goes before all of its kind, reads or writes, that nobody waits for.
        timeout_s: None waits as long as the queue's `timeout_s`. When it is over, TransferError with errno ETIMEDOUT is
        raised and the transfer goes on: the buffer stays in use, and a later `wait` may succeed.
        """
        limit_s = self._queue.timeout_s if timeout_s is None else timeout_s
        self._queue._check_process()
        started = time.monotonic()
        self._urge()
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

    def cancel(self) -> bool:
        """Begin no further block. False where there is none to be stopped: then nothing changes.

        The buffer is in use until what is in flight is over: `wait` then raises TransferError with errno ECANCELED.
        """
        self._queue._check_process()
        handle = self._handle
        return handle is not None and handle.cancel()

    @property
    def _unseen(self) -> bool:
        return self._outcome is not None and not self._reported and self._outcome[0] != errno.ECANCELED

    def _urge(self) -> None:
        handle = self._handle
        if handle is not None and not handle.done():
            handle.urge()

    def _look(self, seconds: float) -> None:
        handle = self._handle
        if handle is not None:
            handle.wait(seconds)

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
    """A queue of transfers with its own threads. Use as a context manager.

    backend: one of BACKENDS, or "auto" for the first of them that works here; `backend` tells which it is.
    depth: blocks in flight in a kernel queue. threads: threads of a pool. timeout_s: what `wait` and `close` allow.
    block_nbytes: size of the blocks that requests are cut into. pending_max: requests that are not done at a time: a
    further one waits for room, and raises TransferError with errno ETIMEDOUT where there is none in `timeout_s`.
    ExtensionError where a back end asked for by name does not work here.
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
        # Bytes that may have begun before a request whose turn is next.
        self.ahead_nbytes = (depth if self.backend in _IN_KERNEL else threads) * block_nbytes
        # Last: `__del__` takes a queue without it for one that was never made.
        self._closed = False

    def read(
        self, file: File, offset: int, buffer: Tensor, *,
        priority: int = 0, checksum: bool = False, expected: int | None = None, sampled: bool = False,
    ) -> Request:  # fmt: skip
        """Fill `buffer` (contiguous, CPU, any dtype) from byte `offset` of `file`. Greater priorities go first.

        checksum: the request shall know its CRC-32C. expected: what that must be; else `wait` raises TransferError with
        errno EBADMSG. sampled: the CRC-32C is of one line of 64 bytes of each page of 4096, at places that differ from
        page to page: bytes of another page, or of an older state of it, are found for a 64th of the cost.
        """
        check = _check(checksum or expected is not None, sampled)
        return self._submit("read", file, offset, buffer, priority, check, expected)

    def write(
        self, file: File, offset: int, buffer: Tensor, *,
        priority: int = 0, checksum: bool = False, sampled: bool = False,
    ) -> Request:  # fmt: skip
        """Write `buffer` (contiguous, CPU, any dtype) to byte `offset` of `file`, within its size. See `read`."""
        if not file.writable:
            raise ValueError(f"{file.path} is open for reading only")
        if offset + buffer.nbytes > file.nbytes:
            raise ValueError(f"{buffer.nbytes} bytes at offset {offset} of {file.path}: it has {file.nbytes} bytes")
        return self._submit("write", file, offset, buffer, priority, _check(checksum, sampled), None)

    def register(self, what: Tensor | File) -> bool:
        """Make memory or a file that is used again and again known to the kernel: transfers on it cost less.

        It is kept (a file: open) until `unregister`, which nothing in flight may use any more, or `close`. False where
        the back end, the kernel or its limit on locked memory refuses: everything works without.
        """
        self._check_process()
        with self._lock:
            self._check_open()
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
        """Forget what `register` took; nothing happens to what it did not take."""
        self._check_process()
        with self._lock:
            held = self._registered.pop(id(what.descriptors if isinstance(what, File) else what), None)
            if held is None or self._closed:
                return
            if isinstance(held, Tensor):
                self._engine.unregister_buffer(held.data_ptr())
            else:
                self._engine.unregister_file(held)

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
                if not request._given_up and error.errno != errno.ECANCELED:
                    unseen.append(error)
        if not self._engine.close(_GRACE_S):
            self.abandoned = True
            stuck = [request for request in self._requests if not request.done()]
            _left_behind.extend((self._engine, stuck, self._registered))
            _log.error("%d transfers hang and were left behind with their threads and buffers", len(stuck))
        self._requests, self._registered = [], {}
        if unseen:
            raise unseen[0]

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
            # Whoever drops a request must not free a buffer in flight, nor lose an error.
            self._requests.append(request)
            if len(self._requests) >= self._sweep_at:
                self._sweep()
            return True

    def _sweep(self) -> None:
        unseen = 0
        kept = []
        for request in self._requests:
            if request.done():
                unseen += request._unseen
                if not request._unseen or unseen > _UNSEEN_MAX:
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
            # The error under way is the one to see; this one may well be its cause.
            _log.error("while closing the queue: %s", failure)

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and os.getpid() == self._pid:
            warnings.warn("a Queue was never closed: its threads stay", ResourceWarning, stacklevel=2)


def _check(wanted: bool, sampled: bool) -> int:
    if not wanted:
        return CHECK_NONE
    return CHECK_SAMPLE if sampled else CHECK_ALL


class _Handle(Protocol):
    def done(self) -> bool: ...
    def wait(self, timeout_s: float) -> bool: ...
    def urge(self) -> None: ...
    def cancel(self) -> bool: ...
    def outcome(self) -> tuple[int, int]: ...
    def checksum(self) -> int: ...
    def moments(self) -> tuple[int, int]: ...


class _Engine(Protocol):
    name: str

    def submit(self, job: IoRequest) -> _Handle | None: ...
    def wait_room(self, timeout_s: float) -> bool: ...
    def register_buffer(self, address: int, nbytes: int) -> bool: ...
    def unregister_buffer(self, address: int) -> None: ...
    def register_file(self, descriptors: Descriptors) -> bool: ...
    def unregister_file(self, descriptors: Descriptors) -> None: ...
    def close(self, timeout_s: float) -> bool: ...


def _make_engine(backend: str, depth: int, threads: int, block_nbytes: int, pending_max: int) -> _Engine:
    refusals = []
    for name in BACKENDS if backend == "auto" else (backend,):
        if name == "python":
            return PythonEngine(threads, block_nbytes, pending_max)
        library = build.require("aio") if backend != "auto" else build.load("aio")
        if library is None:
            continue
        try:
            return NativeEngine(library, name, depth, threads, block_nbytes, pending_max)
        except OSError as error:
            refusals.append(f"{name}: {error.strerror}")
            _log.debug("the I/O back end %s does not work here: %s", name, error)
    raise ExtensionError(f"the I/O back end {backend!r} does not work here ({'; '.join(refusals)}); use 'auto'")
