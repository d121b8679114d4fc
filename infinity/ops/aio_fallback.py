"""The Python implementation of csrc/aio: one worker thread with preadv and pwritev, which needs no compiler.

Results and errors are the same. Requests are served one at a time, in their order and whatever their priorities.
"""

from __future__ import annotations

import ctypes
import errno
import os
import queue
import threading
import time
from typing import NamedTuple

from infinity.ops.crc32c import crc32c
from infinity.ops.file import Descriptors

# The errno of a read beyond the end of the file, as in csrc/aio/request.h.
END_OF_FILE = -1
# Pause before a system call that failed with EAGAIN is repeated.
_PAUSE_S = 0.001
# The bytes that a request's CRC-32C covers: none, all, or one line of each page (csrc/aio/request.h).
CHECK_NONE, CHECK_ALL, CHECK_SAMPLE = 0, 1, 2
_PAGE_NBYTES, _LINE_NBYTES = 4096, 64


class IoRequest(NamedTuple):
    """A transfer of `nbytes` bytes between memory at `address` and a file at `offset`."""

    write: bool
    descriptors: Descriptors
    alignment: int
    memory_alignment: int
    address: int
    offset: int
    nbytes: int
    priority: int
    # The bytes that the CRC-32C covers: CHECK_NONE, CHECK_ALL or CHECK_SAMPLE.
    check: int


class PythonHandle:
    """A request of a `PythonEngine`. The lock guards what has begun, the failure and the end."""

    def __init__(self, job: IoRequest) -> None:
        self.job = job
        self._lock = threading.Lock()
        self._over = threading.Event()
        # The bytes that are moved, and the end of the last block that has begun.
        self._position = 0
        self._begun_nbytes = 0
        self._error = 0
        self._crc = 0
        # perf_counter_ns when the first block began (0: none did), and when the request was over.
        self._began_ns = 0
        self._ended_ns = 0

    def done(self) -> bool:
        """Return whether the transfer is over, with or without an error."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether the transfer is over."""
        return self._over.wait(timeout_s)

    def urge(self) -> None:
        """Do nothing, because requests are served in their order."""

    def cancel(self) -> bool:
        """Begin no further block; return False if all have begun. A cancelled transfer ends with ECANCELED."""
        return self.stop(errno.ECANCELED)

    def stop(self, error: int) -> bool:
        """Begin no further block and fail with `error`; return False if all have begun."""
        with self._lock:
            if self._error or self._begun_nbytes == self.job.nbytes:
                return False
            self._error = error
            if not self._begun_nbytes:
                self._end()
            return True

    def outcome(self) -> tuple[int, int]:
        """Return (errno, 0 or END_OF_FILE; byte of the transfer at which it happened), once done."""
        return self._error, self._position

    def checksum(self) -> int:
        """Return the CRC-32C of the covered bytes, once done without an error."""
        return self._crc

    def moments(self) -> tuple[int, int]:
        """Return perf_counter_ns when the first block began (0: none did) and when the transfer was over, once done."""
        return self._began_ns, self._ended_ns

    def run(self, block_nbytes: int) -> None:
        """Move all bytes, one block after the other."""
        block_nbytes = -(-block_nbytes // self.job.alignment) * self.job.alignment
        error = 0
        while not error and self._position < self.job.nbytes:
            # After a partial transfer only the rest of the block, so that the next one is aligned again.
            end = min((self._position // block_nbytes + 1) * block_nbytes, self.job.nbytes)
            with self._lock:
                if self._error:
                    break
                self._begun_nbytes = end
                self._began_ns = self._began_ns or time.perf_counter_ns()
            error = self._move(self._position, end)
        with self._lock:
            # The last block's failure is at a lower byte than the blocks that `stop` has kept from beginning.
            self._error = error or self._error
            self._end()

    def _move(self, begin: int, end: int) -> int:
        """Move bytes [begin, end) or the first of them; return errno, 0 or END_OF_FILE."""
        job = self.job
        memory = memoryview((ctypes.c_char * (end - begin)).from_address(job.address + begin)).cast("B")
        aligned = (
            (job.offset + begin) % job.alignment == 0
            and (end - begin) % job.alignment == 0
            and (job.address + begin) % job.memory_alignment == 0
        )
        fd = job.descriptors.direct if aligned and job.descriptors.direct >= 0 else job.descriptors.buffered
        try:
            moved = (os.pwritev if job.write else os.preadv)(fd, [memory], job.offset + begin)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return error.errno or errno.EIO
            time.sleep(_PAUSE_S)
            return 0
        if not moved:
            return END_OF_FILE
        if job.check != CHECK_NONE:
            covered = memory[:moved] if job.check == CHECK_ALL else _lines(memory[:moved], begin)
            self._crc = crc32c(covered, self._crc)
        self._position += moved
        return 0

    def _end(self) -> None:
        if not self._over.is_set():
            self._ended_ns = time.perf_counter_ns()
            self._over.set()


def _lines(memory: memoryview, begin: int) -> bytes:
    """Return the line of each page, at a place that differs from page to page, of the bytes from `begin` on."""
    pages = range(begin // _PAGE_NBYTES, -(-(begin + len(memory)) // _PAGE_NBYTES))
    lines = [page * _PAGE_NBYTES + page * 37 % 64 * _LINE_NBYTES - begin for page in pages]
    return b"".join(memory[max(line, 0) : max(line + _LINE_NBYTES, 0)] for line in lines)


class PythonEngine:
    """A queue of requests and its worker, a daemon thread, so that a hanging system call does not block the exit."""

    name = "python"

    def __init__(self, block_nbytes: int, pending_max: int) -> None:
        self._block_nbytes = block_nbytes
        # The requests that may still be submitted.
        self._room = threading.Semaphore(pending_max)
        # None ends the worker.
        self._pending: queue.SimpleQueue[PythonHandle | None] = queue.SimpleQueue()
        self._running: PythonHandle | None = None
        self._worker = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
        self._worker.start()

    def submit(self, job: IoRequest) -> PythonHandle | None:
        """Queue a transfer of at least one byte; return None if `pending_max` requests are not over yet."""
        if not self._room.acquire(blocking=False):
            return None
        request = PythonHandle(job)
        self._pending.put(request)
        return request

    def wait_room(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether another request would be accepted."""
        if not self._room.acquire(timeout=timeout_s):
            return False
        self._room.release()
        return True

    def close(self, timeout_s: float) -> bool:
        """Complete the queued requests for up to `timeout_s` and end the worker; return False if it hangs."""
        self._pending.put(None)
        self._worker.join(timeout_s)
        if not self._worker.is_alive():
            return True
        if (running := self._running) is not None:
            running.stop(errno.ETIMEDOUT)
        # One None ends this loop, the other the worker if its call ever returns.
        self._pending.put(None)
        for request in iter(self._pending.get, None):
            request.stop(errno.ETIMEDOUT)
        return False

    def _serve(self) -> None:
        while True:
            self._running = self._pending.get()
            if self._running is None:
                return
            self._running.run(self._block_nbytes)
            # An idle worker must not keep descriptors open.
            self._running = None
            self._room.release()
