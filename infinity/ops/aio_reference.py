"""The Python fallback of csrc/aio: threads with preadv and pwritev. Same results, same errors, no compiler needed."""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from infinity.ops.crc32c import combine, crc32c
from infinity.ops.file import Descriptors

# errno of "the file ends here", as in csrc/aio/request.h.
END_OF_FILE = -1
_PATIENCE_S = 0.001
# Of which bytes of a job the CRC-32C is: none, all, or one line of each page (csrc/aio/request.h).
CHECK_NONE, CHECK_ALL, CHECK_SAMPLE = 0, 1, 2
_PAGE_NBYTES, _LINE_NBYTES = 4096, 64
# Before every priority of a 32-bit integer.
_URGENT = -(1 << 31)


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
    # Of which bytes the CRC-32C is wanted: see Check in csrc/aio/request.h.
    check: int

    def descriptor_for(self, begin: int, end: int) -> int:
        """The descriptor for bytes [begin, end) of the transfer: see Request::descriptor_for in csrc/aio/request.h."""
        aligned = (
            (self.offset + begin) % self.alignment == 0
            and (end - begin) % self.alignment == 0
            and (self.address + begin) % self.memory_alignment == 0
        )
        return self.descriptors.direct if aligned and self.descriptors.direct >= 0 else self.descriptors.buffered


# Of the heap: place (unique) and progress, or None.
_Entry = list[Any]


# Compared by identity: equal jobs are two transfers.
@dataclass(slots=True, eq=False)
class _Progress:
    """A job in the queue: what has begun, and how it ends. Guarded by the engine's lock."""

    job: IoRequest
    # Its entry in the heap, which is emptied where it is no longer meant.
    entry: _Entry = field(default_factory=list)
    begun_nbytes: int = 0
    blocks_active: int = 0
    error: int = 0
    position: int = 0
    # By the byte at which a block begins.
    checksums: dict[int, tuple[int, int]] = field(default_factory=dict)
    # perf_counter_ns: when the first block began (0: none did), and when the job was over.
    began_ns: int = 0
    ended_ns: int = 0
    over: threading.Event = field(default_factory=threading.Event)

    def fail(self, error: int, position: int) -> None:
        # Of several failures the one at the lowest byte counts, whatever the order of completion.
        if self.error == 0 or position < self.position:
            self.error, self.position = error, position

    @property
    def all_begun(self) -> bool:
        return bool(self.error) or self.begun_nbytes == self.job.nbytes


class PythonHandle:
    """One job as its submitter sees it."""

    def __init__(self, engine: PythonEngine, progress: _Progress) -> None:
        self._engine = engine
        self._progress = progress

    def done(self) -> bool:
        """Whether nothing of the transfer is in flight any more."""
        return self._progress.over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; whether it is done."""
        return self._progress.over.wait(timeout_s)

    def urge(self) -> None:
        """Put what has not begun before all of its kind that nobody waits for."""
        self._engine.urge(self._progress)

    def cancel(self) -> bool:
        """Whether blocks had not begun: they never will, and the transfer ends with ECANCELED."""
        return self._engine.cancel(self._progress)

    def outcome(self) -> tuple[int, int]:
        """(errno, 0 or END_OF_FILE; byte of the transfer at which that happened), once done."""
        progress = self._progress
        return progress.error, progress.position if progress.error else progress.job.nbytes

    def checksum(self) -> int:
        """The CRC-32C of the bytes that a job's check is of, once done without an error."""
        whole = 0
        for _, (crc, nbytes) in sorted(self._progress.checksums.items()):
            whole = combine(whole, crc, nbytes)
        return whole

    def moments(self) -> tuple[int, int]:
        """When the first block began (0: none did) and when the job was over (perf_counter_ns), once done."""
        return self._progress.began_ns, self._progress.ended_ns


class PythonEngine:
    """A pool of daemon threads, so that one that hangs in a system call keeps nobody from leaving."""

    name = "python"

    def __init__(self, threads: int, block_nbytes: int, pending_max: int) -> None:
        self._threads_max = threads
        self._block_nbytes = block_nbytes
        self._pending_max = pending_max
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        # Told when a job is over.
        self._room = threading.Condition(lock)
        self._unfinished = 0
        # Reads and writes, which take turns, by whether they write.
        self._pending: dict[bool, list[_Entry]] = {False: [], True: []}
        self._wrote_last = False
        self._arrivals = 0
        self._threads: list[threading.Thread] = []
        self._stop = False
        self._abandoned = False

    def submit(self, job: IoRequest) -> PythonHandle | None:
        """Queue a job of at least one byte; None where `pending_max` jobs are not over yet."""
        with self._changed:
            if self._unfinished >= self._pending_max:
                return None
            self._unfinished += 1
            while len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
                thread.start()
                self._threads.append(thread)
            progress = _Progress(job)
            self._push(progress, -job.priority)
            self._changed.notify_all()
        return PythonHandle(self, progress)

    def wait_room(self, timeout_s: float) -> bool:
        """Whether another job would be taken, after at most `timeout_s` seconds."""
        with self._room:
            return self._room.wait_for(lambda: self._unfinished < self._pending_max, timeout_s)

    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Nothing to gain here."""
        return False

    def unregister_buffer(self, address: int) -> None:
        """Nothing was registered."""

    def register_file(self, descriptors: Descriptors) -> bool:
        """Nothing to gain here."""
        return False

    def unregister_file(self, descriptors: Descriptors) -> None:
        """Nothing was registered."""

    def urge(self, progress: _Progress) -> None:
        """See PythonHandle."""
        with self._changed:
            if not progress.all_begun and progress.entry[0][0] != _URGENT:
                progress.entry[1] = None
                self._push(progress, _URGENT)

    def cancel(self, progress: _Progress) -> bool:
        """See PythonHandle."""
        with self._changed:
            if progress.all_begun:
                return False
            progress.entry[1] = None
            progress.fail(errno.ECANCELED, progress.begun_nbytes)
            self._settle(progress)
            return True

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
                for heap in self._pending.values():
                    for _, progress in heap:
                        if progress is not None and not progress.all_begun:
                            progress.fail(errno.ETIMEDOUT, progress.begun_nbytes)
                            self._settle(progress)
                    heap.clear()
        return clean

    def _push(self, progress: _Progress, rank: int) -> None:
        progress.entry = [(rank, self._arrivals), progress]
        self._arrivals += 1
        heapq.heappush(self._pending[progress.job.write], progress.entry)

    def _settle(self, progress: _Progress) -> None:
        if progress.blocks_active == 0 and progress.all_begun and not progress.over.is_set():
            # The entry and its progress refer to each other: descriptors must not wait for the collector.
            progress.entry[1] = None
            progress.ended_ns = time.perf_counter_ns()
            progress.over.set()
            self._unfinished -= 1
            self._room.notify_all()

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stop or any(self._pending.values()))
                block = self._pop()
                if block is None:
                    if self._stop:
                        return
                    continue
            progress, begin, end = block
            error, position = self._move(progress.job, begin, end)
            digest = _digest(progress.job, begin, end) if progress.job.check and not error else (0, 0)
            with self._changed:
                progress.blocks_active -= 1
                if error:
                    progress.fail(error, position)
                elif progress.job.check:
                    progress.checksums[begin] = digest
                self._settle(progress)
            # A thread at rest holds on to no descriptors.
            del block, progress

    def _pop(self) -> tuple[_Progress, int, int] | None:
        """The next block, begun."""
        heads = {write: head for write, heap in self._pending.items() if (head := _head(heap)) is not None}
        if not heads:
            return None
        # The kind that was not served last, unless one alone is to stay behind.
        in_front = [write for write, (rank, _) in heads.items() if rank <= 0] or [*heads]
        write = not self._wrote_last if len(in_front) == 2 else in_front[0]
        self._wrote_last = write
        progress = heads[write][1]
        job, begin = progress.job, progress.begun_nbytes
        step = -(-self._block_nbytes // job.alignment) * job.alignment
        end = min(begin + step, job.nbytes)
        progress.begun_nbytes = end
        progress.blocks_active += 1
        progress.began_ns = progress.began_ns or time.perf_counter_ns()
        if end == job.nbytes:
            heapq.heappop(self._pending[write])
        return progress, begin, end

    def _move(self, job: IoRequest, begin: int, end: int) -> tuple[int, int]:
        """(errno or 0, byte reached)."""
        while begin < end:
            memory = _memory(job, begin, end)
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


def _head(heap: list[_Entry]) -> tuple[int, _Progress] | None:
    """Rank and progress of the first that has something to begin; what is before it is forgotten."""
    while heap:
        (rank, _), progress = heap[0]
        if progress is not None and not progress.all_begun:
            return rank, progress
        heapq.heappop(heap)
    return None


def _digest(job: IoRequest, begin: int, end: int) -> tuple[int, int]:
    """CRC-32C and number of the bytes of a block that the job's check is of."""
    memory = _memory(job, begin, end)
    if job.check == CHECK_SAMPLE:
        pages = range(begin // _PAGE_NBYTES, -(-end // _PAGE_NBYTES))
        # In the block.
        lines = [page * _PAGE_NBYTES + page * 37 % 64 * _LINE_NBYTES - begin for page in pages]
        memory = memoryview(b"".join(memory[max(line, 0) : max(line + _LINE_NBYTES, 0)] for line in lines))
    return crc32c(memory), len(memory)


def _memory(job: IoRequest, begin: int, end: int) -> memoryview:
    return memoryview((ctypes.c_char * (end - begin)).from_address(job.address + begin)).cast("B")
