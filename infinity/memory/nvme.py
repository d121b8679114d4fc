"""The NVMe tier: one preallocated swap file a rank, moved through the asynchronous queue.

The file's name is unique, its owner holds a lock on it for as long as it lives, and it is unlinked on close. A file
whose lock is free belongs to a process that was killed: the next start on the same directory removes it. Creation and
removal happen under a lock on the directory, so that nobody takes a file for stale between its creation and its first
lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from infinity.log import logger
from infinity.ops.aio import File, Queue
from infinity.plan.types import Extent
from infinity.transfer import Transfer

_PREFIX = "infinity-swap-"
_SUFFIX = ".bin"


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How the drive is used: blocks in flight, I/O threads, the time limit of one request, bytes of a block."""

    depth: int = 64
    threads: int = 4
    timeout_seconds: float = 300.0
    block_nbytes: int = 1 << 20


class NvmeTier:
    """This rank's swap file and the queue that moves its extents."""

    def __init__(self, directory: str | Path, *, nbytes: int, rank: int, queue: Queue) -> None:
        """Create and preallocate the file; raises TransferError when the drive has no room for `nbytes`."""
        self._queue = queue
        self._owner = os.getpid()
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        with _directory_lock(self.directory):
            remove_stale(self.directory)
            self.path = self.directory / f"{_PREFIX}{uuid.uuid4().hex}-rank{rank}{_SUFFIX}"
            self._file = File.create(self.path, nbytes)
            try:
                self._lock = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                self._file.close()
                self.path.unlink()
                raise
            _try_lock(self._lock)
        # A program that ends without close() leaves no file either.
        self._remove = weakref.finalize(self, _remove_owned, self.path, self._owner)

    @classmethod
    def open(cls, directory: str | Path, *, nbytes: int, rank: int, options: QueueOptions) -> NvmeTier:
        """A tier with a queue of its own, closed with it."""
        queue = Queue(
            depth=options.depth,
            threads=options.threads,
            timeout_s=options.timeout_seconds,
            block_nbytes=options.block_nbytes,
        )
        try:
            return cls(directory, nbytes=nbytes, rank=rank, queue=queue)
        except BaseException:
            queue.close()
            raise

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._file.nbytes

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT)."""
        return self._file.direct

    def read(self, extent: Extent, buffer: Tensor) -> Transfer:
        """Submit a read of one extent into `buffer` (uint8, `extent.nbytes` long)."""
        return self._queue.read(self._file, extent.offset, buffer)

    def write(self, extent: Extent, buffer: Tensor) -> Transfer:
        """Submit a write of `buffer` (uint8, `extent.nbytes` long), which must not change meanwhile, to one extent."""
        return self._queue.write(self._file, extent.offset, buffer)

    def close(self) -> None:
        """Stop the queue and remove the file. A forked child that inherited the tier leaves both alone."""
        if os.getpid() != self._owner or self._lock < 0:
            return
        try:
            self._queue.close()
        finally:
            self._file.close()
            self._remove()
            os.close(self._lock)
            self._lock = -1


def clean(directory: Path) -> list[Path]:
    """Remove swap files that killed processes left in `directory`; returns their paths."""
    with _directory_lock(directory):
        return remove_stale(directory)


def remove_stale(directory: Path) -> list[Path]:
    """Remove swap files whose owner is gone; returns their paths. Call it under the directory's lock."""
    removed = []
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        # What cannot be opened or removed is not ours: another user's, or no file at all.
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _try_lock(descriptor):
                    nbytes = os.fstat(descriptor).st_size
                    path.unlink()
                    removed.append(path)
                    logger.info("removed %s (%.2f GB), left by a process that was killed", path, nbytes / 1e9)
            finally:
                os.close(descriptor)
    return removed


def _remove_owned(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # File systems without locks (some network ones) lose the protection against a race, not the function.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Take the exclusive lock if nobody has it. False also on a file system without locks: then nothing is stale."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise
    return True
