"""Files of a fixed size for direct I/O, created whole or not at all.

A file is opened a second time with O_DIRECT if the file system supports it. Requests with aligned offset, length and
address bypass the page cache, all others go through it; the kernel keeps both coherent.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from dataclasses import dataclass
from types import TracebackType

from infinity.errors import TransferError

_ALIGNMENT_FALLBACK = 4096
_log = logging.getLogger("infinity")
# Device numbers of the file systems that have been reported not to support O_DIRECT.
_told_buffered: set[int] = set()


@dataclass(slots=True)
class Descriptors:
    """The open descriptors of a file, closed with the last reference; a transfer in flight keeps them open."""

    buffered: int
    # -1 if the file system does not support O_DIRECT.
    direct: int

    def close(self) -> None:
        """Close the descriptors. Idempotent."""
        for fd in (self.buffered, self.direct):
            if fd >= 0:
                os.close(fd)
        self.buffered = self.direct = -1

    def __del__(self) -> None:
        self.close()


class File:
    """An open file of `nbytes` bytes at `path`. Use as a context manager.

    Attributes:
        direct: whether aligned requests bypass the page cache.
        alignment: bytes to which offset and length of such a request are aligned.
        memory_alignment: bytes to which its memory address is aligned.
    """

    def __init__(self, path: str, nbytes: int, descriptors: Descriptors, *, writable: bool) -> None:
        self.path = path
        self.nbytes = nbytes
        self.writable = writable
        self.direct = descriptors.direct >= 0
        self.alignment, self.memory_alignment = _alignments(descriptors)
        self._descriptors: Descriptors | None = descriptors

    @classmethod
    def create(cls, path: str | os.PathLike[str], nbytes: int) -> File:
        """Create a file with all its `nbytes` reserved on the drive.

        Raises:
            TransferError: the path exists (EEXIST), the space is not free (ENOSPC), or the system refuses. No new file
                is left behind.
        """
        if nbytes < 0:
            raise ValueError(f"a file cannot have {nbytes} bytes")
        name = os.fspath(path)
        descriptors = _open("create", name, os.O_RDWR | os.O_CREAT | os.O_EXCL, nbytes)
        space = os.fstatvfs(descriptors.buffered)
        free_nbytes = space.f_bavail * space.f_frsize
        try:
            # Checked first, because some file systems fill the drive before they report that it is too small.
            if nbytes > free_nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if nbytes:
                os.posix_fallocate(descriptors.buffered, 0, nbytes)
        except OSError as error:
            os.unlink(name)
            # Closed here, because the error's traceback keeps the object alive, and open descriptors keep the space.
            descriptors.close()
            reason = f"{error.strerror}; {free_nbytes} bytes were free, {nbytes} are needed"
            raise _failure("create", name, nbytes, error, reason) from error
        return cls(name, nbytes, descriptors, writable=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str], writable: bool = False) -> File:
        """Open an existing regular file at its present size; raise TransferError if that fails."""
        name = os.fspath(path)
        # Looked at first, because opening a pipe waits for its writer.
        if os.path.exists(name) and not os.path.isfile(name):
            raise _failure("open", name, 0, OSError(errno.EINVAL, ""), "not a regular file")
        descriptors = _open("open", name, os.O_RDWR if writable else os.O_RDONLY, 0)
        return cls(name, os.fstat(descriptors.buffered).st_size, descriptors, writable=writable)

    @property
    def descriptors(self) -> Descriptors:
        """The open descriptors, which a transfer keeps. Raises ValueError after `close`."""
        if self._descriptors is None:
            raise ValueError(f"{self.path} is closed")
        return self._descriptors

    def sync(self) -> None:
        """Return once all completed writes are on the drive (fdatasync); raise TransferError if that fails."""
        try:
            os.fdatasync(self.descriptors.buffered)
        except OSError as error:
            raise _failure("sync", self.path, self.nbytes, error, error.strerror or str(error)) from error

    def close(self) -> None:
        """Close the file; descriptors in use by a transfer are closed once it is over. Idempotent."""
        self._descriptors = None

    def __enter__(self) -> File:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        mode = "direct" if self.direct else "buffered"
        return f"File({self.path!r}, nbytes={self.nbytes}, {mode}, alignment={self.alignment})"


def _open(operation: str, path: str, flags: int, nbytes: int) -> Descriptors:
    flags |= os.O_CLOEXEC
    try:
        buffered = os.open(path, flags, 0o600)
    except OSError as error:
        raise _failure(operation, path, nbytes, error, error.strerror or str(error)) from error
    try:
        direct = os.open(path, flags & ~(os.O_CREAT | os.O_EXCL) | os.O_DIRECT)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            if operation == "create":
                os.unlink(path)
            os.close(buffered)
            raise _failure(operation, path, nbytes, error, error.strerror or str(error)) from error
        direct = -1
        device = os.fstat(buffered).st_dev
        if device not in _told_buffered:
            _told_buffered.add(device)
            _log.warning("the file system of %s does not take O_DIRECT: its files go through the page cache", path)
    return Descriptors(buffered, direct)


def _failure(operation: str, path: str, nbytes: int, error: OSError, reason: str) -> TransferError:
    return TransferError(operation, path=path, offset=0, nbytes=nbytes, errno=error.errno or errno.EIO, reason=reason)


def _alignments(descriptors: Descriptors) -> tuple[int, int]:
    """Return the alignments for direct I/O in bytes, powers of two: (of offset and length, of the address)."""
    if descriptors.direct < 0:
        return 1, 1
    if (found := _statx_alignments(descriptors.direct)) is not None:
        return found
    block = _device_block(os.fstat(descriptors.direct))
    return block, block


def _statx_alignments(fd: int) -> tuple[int, int] | None:
    """Return the alignments that the kernel reports (Linux 6.1 and later), or None."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    at_empty_path, statx_dioalign = 0x1000, 0x2000
    reply = (ctypes.c_uint32 * 64)()
    if statx(ctypes.c_int(fd), b"", ctypes.c_int(at_empty_path), ctypes.c_uint(statx_dioalign), reply) != 0:
        return None
    # struct statx: stx_mask at byte 0, stx_dio_mem_align at 152, stx_dio_offset_align at 156.
    if not reply[0] & statx_dioalign or not reply[39] or not reply[38]:
        return None
    return reply[39], reply[38]


def _device_block(status: os.stat_result) -> int:
    """Return the logical block size of the drive, else of the file system, in bytes."""
    device = f"/sys/dev/block/{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    # A partition has no queue; its drive, one folder up, has one.
    for queue in (f"{device}/queue", f"{device}/../queue"):
        try:
            with open(f"{queue}/logical_block_size") as text:
                return int(text.read())
        except (OSError, ValueError):
            continue
    block = status.st_blksize
    return block if block and block & (block - 1) == 0 else _ALIGNMENT_FALLBACK
