"""The Python implementation of csrc/aio: threads with preadv and pwritev, the same results and errors, no compiler."""

from __future__ import annotations

import ctypes
import errno
import heapq
import os
import threading
import time
from typing import Any, NamedTuple

from infinity.ops.crc32c import combine, crc32c
from infinity.ops.file import Descriptors

# The errno of a read beyond the end of the file, as in csrc/aio/request.h.
END_OF_FILE = -1
# Pause before a system call that failed with EAGAIN is repeated.
_PAUSE_S = 0.001
# The bytes that a request's CRC-32C covers: none, all, or one line of each page (csrc/aio/request.h).
CHECK_NONE, CHECK_ALL, CHECK_SAMPLE = 0, 1, 2
_PAGE_NBYTES, _LINE_NBYTES = 4096, 64
# Sorts before every negated 32-bit priority.
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
    # The bytes that the CRC-32C covers: CHECK_NONE, CHECK_ALL or CHECK_SAMPLE.
    check: int

    def descriptor_for(self, begin: int, end: int) -> int:
        """Return the direct descriptor if bytes [begin, end) of the transfer are aligned, else the buffered one."""
        aligned = (
            (self.offset + begin) % self.alignment == 0
            and (end - begin) % self.alignment == 0
            and (self.address + begin) % self.memory_alignment == 0
        )
        return self.descriptors.direct if aligned and self.descriptors.direct >= 0 else self.descriptors.buffered


# An entry of the heap: its unique rank, and the request, or None once the entry is void.
_Entry = list[Any]


class PythonHandle:
    """A request in the queue: the blocks that have begun, and the outcome. The engine's lock guards its state."""

    def __init__(self, engine: PythonEngine, job: IoRequest) -> None:
        self.job = job
        self._error = 0
        self._blocks_active = 0
        # perf_counter_ns when the first block began (0: none did), and when the request was over.
        self._began_ns = 0
        self._ended_ns = 0
        self._engine = engine
        self._entry: _Entry = [None, None]
        self._begun_nbytes = 0
        self._position = 0
        # First byte of a block -> CRC-32C and number of its covered bytes.
        self._checksums: dict[int, tuple[int, int]] = {}
        self._over = threading.Event()

    def done(self) -> bool:
        """Return whether the transfer is over, with or without an error."""
        return self._over.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether the transfer is over."""
        return self._over.wait(timeout_s)

    def urge(self) -> None:
        """Move the blocks that have not begun before all other reads, or writes, that no thread waits for."""
        self._engine.urge(self)

    def cancel(self) -> bool:
        """Begin no further block; return False if all have begun. A cancelled transfer ends with ECANCELED."""
        return self._engine.cancel(self)

    def outcome(self) -> tuple[int, int]:
        """Return (errno, 0 or END_OF_FILE; byte of the transfer at which it happened), once done."""
        return self._error, self._position if self._error else self.job.nbytes

    def checksum(self) -> int:
        """Return the CRC-32C of the covered bytes, once done without an error."""
        whole = 0
        for _, (crc, nbytes) in sorted(self._checksums.items()):
            whole = combine(whole, crc, nbytes)
        return whole

    def moments(self) -> tuple[int, int]:
        """Return perf_counter_ns when the first block began (0: none did) and when the transfer was over, once done."""
        return self._began_ns, self._ended_ns

    @property
    def all_begun(self) -> bool:
        """Whether no block is left to begin."""
        return bool(self._error) or self._begun_nbytes == self.job.nbytes

    @property
    def urgent(self) -> bool:
        """Whether the request is before all that no thread waits for."""
        return bool(self._entry[0] and self._entry[0][0] == _URGENT)

    def entry(self, rank: int, number: int) -> _Entry:
        """Return a new entry for the heap; it makes the old one void."""
        self.withdraw()
        self._entry = [(rank, number), self]
        return self._entry

    def withdraw(self) -> None:
        """Make the entry void."""
        self._entry[1] = None

    def begin_block(self, nbytes_max: int) -> tuple[int, int]:
        """Begin the next block; return its bytes [begin, end)."""
        begin = self._begun_nbytes
        self._begun_nbytes = min(begin + nbytes_max, self.job.nbytes)
        self._blocks_active += 1
        self._began_ns = self._began_ns or time.perf_counter_ns()
        return begin, self._begun_nbytes

    def end_block(self, begin: int, error: int, position: int, digest: tuple[int, int]) -> None:
        """Note the end of the block that began at byte `begin`."""
        self._blocks_active -= 1
        if error:
            self.fail(error, position)
        elif self.job.check:
            self._checksums[begin] = digest

    def fail(self, error: int, position: int | None = None) -> None:
        """Note a failure at byte `position` of the transfer; None: at the first byte that has not begun."""
        position = self._begun_nbytes if position is None else position
        # The failure at the lowest byte counts, whatever the order of completion.
        if self._error == 0 or position < self._position:
            self._error, self._position = error, position

    def settle(self) -> bool:
        """End the request if no block is active or left to begin; return whether this call ended it."""
        if self._blocks_active or not self.all_begun or self._over.is_set():
            return False
        # The entry and the request refer to each other; without this, only the collector would close descriptors.
        self.withdraw()
        self._ended_ns = time.perf_counter_ns()
        self._over.set()
        return True


class PythonEngine:
    """A queue of requests and its pool of daemon threads, so that a hanging system call does not block the exit."""

    name = "python"

    def __init__(self, threads: int, block_nbytes: int, pending_max: int) -> None:
        self._threads_max = threads
        self._block_nbytes = block_nbytes
        self._pending_max = pending_max
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        # Notified when a request is over.
        self._room = threading.Condition(lock)
        self._unfinished = 0
        # Whether requests write -> their heap. Reads and writes take turns.
        self._pending: dict[bool, list[_Entry]] = {False: [], True: []}
        self._wrote_last = False
        self._arrivals = 0
        self._threads: list[threading.Thread] = []
        self._stop = False
        self._abandoned = False

    def submit(self, job: IoRequest) -> PythonHandle | None:
        """Queue a transfer of at least one byte; return None if `pending_max` requests are not over yet."""
        with self._changed:
            if self._unfinished >= self._pending_max:
                return None
            self._unfinished += 1
            while len(self._threads) < self._threads_max:
                thread = threading.Thread(target=self._serve, name="infinity-aio", daemon=True)
                thread.start()
                self._threads.append(thread)
            request = PythonHandle(self, job)
            self._push(request, -job.priority)
            self._changed.notify_all()
        return request

    def wait_room(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds; return whether another request would be accepted."""
        with self._room:
            return self._room.wait_for(lambda: self._unfinished < self._pending_max, timeout_s)

    def register_buffer(self, address: int, nbytes: int) -> bool:
        """Return False: registration has no use without a kernel queue."""
        return False

    def unregister_buffer(self, address: int) -> None:
        """Do nothing, because nothing was registered."""

    def register_file(self, descriptors: Descriptors) -> bool:
        """Return False: registration has no use without a kernel queue."""
        return False

    def unregister_file(self, descriptors: Descriptors) -> None:
        """Do nothing, because nothing was registered."""

    def urge(self, request: PythonHandle) -> None:
        """See `PythonHandle.urge`."""
        with self._changed:
            if not request.all_begun and not request.urgent:
                self._push(request, _URGENT)

    def cancel(self, request: PythonHandle) -> bool:
        """See `PythonHandle.cancel`."""
        with self._changed:
            if request.all_begun:
                return False
            request.fail(errno.ECANCELED)
            self._settle(request)
            return True

    def close(self, timeout_s: float) -> bool:
        """Complete the queued requests for up to `timeout_s` and end the threads; return False if a thread hangs."""
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
                    for _, request in heap:
                        if request is not None and not request.all_begun:
                            request.fail(errno.ETIMEDOUT)
                            self._settle(request)
                    heap.clear()
        return clean

    def _push(self, request: PythonHandle, rank: int) -> None:
        heapq.heappush(self._pending[request.job.write], request.entry(rank, self._arrivals))
        self._arrivals += 1

    def _settle(self, request: PythonHandle) -> None:
        if request.settle():
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
            request, begin, end = block
            error, position = self._move(request.job, begin, end)
            digest = _digest(request.job, begin, end) if request.job.check and not error else (0, 0)
            with self._changed:
                request.end_block(begin, error, position, digest)
                self._settle(request)
            # An idle thread must not keep descriptors open.
            del block, request

    def _pop(self) -> tuple[PythonHandle, int, int] | None:
        """Begin the next block and return its request and bytes [begin, end); None if there is none."""
        heads = {write: head for write, heap in self._pending.items() if (head := _head(heap)) is not None}
        if not heads:
            return None
        # Alternate between reads and writes; serve a kind with a negative priority only if the other has one too.
        in_front = [write for write, (rank, _) in heads.items() if rank <= 0] or [*heads]
        write = not self._wrote_last if len(in_front) == 2 else in_front[0]
        self._wrote_last = write
        request = heads[write][1]
        alignment = request.job.alignment
        begin, end = request.begin_block(-(-self._block_nbytes // alignment) * alignment)
        if end == request.job.nbytes:
            heapq.heappop(self._pending[write])
        return request, begin, end

    def _move(self, job: IoRequest, begin: int, end: int) -> tuple[int, int]:
        """Transfer bytes [begin, end); return (errno, 0 or END_OF_FILE; byte reached)."""
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
                time.sleep(_PAUSE_S)
            else:
                if moved == 0:
                    return END_OF_FILE, begin
                begin += moved
            if self._abandoned:
                return errno.ETIMEDOUT, begin
        return 0, end


def _head(heap: list[_Entry]) -> tuple[int, PythonHandle] | None:
    """Return rank and request of the first entry with a block to begin; remove the entries before it."""
    while heap:
        (rank, _), request = heap[0]
        if request is not None and not request.all_begun:
            return rank, request
        heapq.heappop(heap)
    return None


def _digest(job: IoRequest, begin: int, end: int) -> tuple[int, int]:
    """Return CRC-32C and number of the covered bytes of a block."""
    memory = _memory(job, begin, end)
    if job.check == CHECK_SAMPLE:
        pages = range(begin // _PAGE_NBYTES, -(-end // _PAGE_NBYTES))
        # Relative to the block; the line of a page differs from page to page.
        lines = [page * _PAGE_NBYTES + page * 37 % 64 * _LINE_NBYTES - begin for page in pages]
        memory = memoryview(b"".join(memory[max(line, 0) : max(line + _LINE_NBYTES, 0)] for line in lines))
    return crc32c(memory), len(memory)


def _memory(job: IoRequest, begin: int, end: int) -> memoryview:
    return memoryview((ctypes.c_char * (end - begin)).from_address(job.address + begin)).cast("B")
