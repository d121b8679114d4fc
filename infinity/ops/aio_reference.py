"""The plain twin of csrc/aio: Python threads with preadv and pwritev. Same results, same errors, no compiler needed."""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
import threading
import time
from dataclasses import dataclass, field

from infinity.ops.file import Descriptors

# errno of "the file ends here", as in csrc/aio/request.h.
END_OF_FILE = -1
_PATIENCE_S = 0.001


@dataclass(frozen=True, slots=True)
class Job:
    """A transfer of `nbytes` bytes between memory at `address` and a file at `offset`."""

    write: bool
    descriptors: Descriptors
    alignment: int
    memory_alignment: int
    address: int
    offset: int
    nbytes: int
    priority: int

    def descriptor_for(self, begin: int, end: int) -> int:
        """The descriptor for bytes [begin, end) of the transfer: see Request::descriptor_for in csrc/aio/request.h."""
        aligned = (
            (self.offset + begin) % self.alignment == 0
            and (end - begin) % self.alignment == 0
            and (self.address + begin) % self.memory_alignment == 0
        )
        return self.descriptors.direct if aligned and self.descriptors.direct >= 0 else self.descriptors.buffered


@dataclass(slots=True)
class _Progress:
    """A job in the queue: what has begun, and how it ends. Guarded by the engine's lock."""

    job: Job
    begun_nbytes: int = 0
    blocks_active: int = 0
    error: int = 0
    position: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: int, position: int) -> None:
        # Of several failures the one at the lowest byte counts, whatever the order of completion.
        if self.error == 0 or position < self.position:
            self.error, self.position = error, position

    def settle(self) -> None:
        if self.blocks_active == 0 and (self.error or self.begun_nbytes == self.job.nbytes):
            self.over.set()


class PythonHandle:
    """One job as its submitter sees it."""

    def __init__(self, progress: _Progress) -> None:
        self._progress = progress

    def done(self) -> bool:
        """Whether nothing of the transfer is in flight any more."""
        return self._progress.over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; whether it is done."""
        return self._progress.over.wait(timeout_s)

    def outcome(self) -> tuple[int, int]:
        """(errno, 0 or END_OF_FILE; byte of the transfer at which that happened), once done."""
        progress = self._progress
        return progress.error, progress.position if progress.error else progress.job.nbytes


class PythonEngine:
    """A pool of daemon threads, so that one that hangs in a system call keeps nobody from leaving."""

    name = "python"

    def __init__(self, threads: int, block_nbytes: int) -> None:
        self._threads_max = threads
        self._block_nbytes = block_nbytes
        self._changed = threading.Condition()
        self._pending: list[tuple[int, int, _Progress]] = []
        self._arrivals = 0
        self._threads: list[threading.Thread] = []
        self._stop = False
        self._abandoned = False

    def submit(self, job: Job) -> PythonHandle:
        """Queue a job of at least one byte."""
        progress = _Progress(job)
        with self._changed:
            while len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
                thread.start()
                self._threads.append(thread)
            heapq.heappush(self._pending, (-job.priority, self._arrivals, progress))
            self._arrivals += 1
            self._changed.notify_all()
        return PythonHandle(progress)

    def close(self, timeout_s: float) -> bool:
        """Move what is queued, for up to `timeout_s`, and end the threads; False where some hang and are left."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        clean = not any(thread.is_alive() for thread in self._threads)
        if not clean:
            with self._changed:
                self._abandoned = True
                for _, _, progress in self._pending:
                    progress.fail(errno.ETIMEDOUT, progress.begun_nbytes)
                    progress.settle()
                self._pending.clear()
        return clean

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or self._pending)
                block = self._pop()
                if block is None:
                    if self._stop:
                        return
                    continue
            progress, begin, end = block
            error, position = self._move(progress.job, begin, end)
            with self._changed:
                progress.blocks_active -= 1
                if error:
                    progress.fail(error, position)
                progress.settle()
            # A thread at rest holds on to no descriptors.
            del block, progress

    def _pop(self) -> tuple[_Progress, int, int] | None:
        """The next block, begun."""
        while self._pending:
            progress = self._pending[0][2]
            job, begin = progress.job, progress.begun_nbytes
            if progress.error:
                heapq.heappop(self._pending)
                continue
            step = -(-self._block_nbytes // job.alignment) * job.alignment
            end = min(begin + step, job.nbytes)
            progress.begun_nbytes = end
            progress.blocks_active += 1
            if end == job.nbytes:
                heapq.heappop(self._pending)
            return progress, begin, end
        return None

    def _move(self, job: Job, begin: int, end: int) -> tuple[int, int]:
        """(errno or 0, byte reached)."""
        while begin < end:
            memory = (ctypes.c_char * (end - begin)).from_address(job.address + begin)
            fd = job.descriptor_for(begin, end)
            try:
                if job.write:
                    moved = os.pwritev(fd, [memory], job.offset + begin)
                else:
                    moved = os.preadv(fd, [memory], job.offset + begin)
            except OSError as error:
                if error.errno != errno.EAGAIN:
                    return error.errno or errno.EIO, begin
                time.sleep(_PATIENCE_S)
            else:
                if moved == 0:
                    return END_OF_FILE, begin
                begin += moved
            if self._abandoned:
                return errno.ETIMEDOUT, begin
        return 0, end
