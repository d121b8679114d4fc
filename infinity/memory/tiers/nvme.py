"""The NVMe tier: one preallocated swap file a rank and drive, moved through asynchronous queues.

A file's name is unique; its process holds two locks on it while it exists, and unlinks it on close. One is free as
soon as the process has ended, and its children have: the next start on the same directory removes such a file, unless
there are records beside it (see [Note: records]), which make it the state of a run. The other lies on what does the
I/O, so that it is free only once the last write of a process that was killed has ended: who takes the file over waits
for it. Creation and removal happen under a lock on the directory, so that no other process takes a file for stale
between its creation and its first lock.

Several drives share the tier's bytes by their bandwidth (see `infinity.memory.tiers.striping`). Each drive has its own
queue, so that a slow drive does not delay the others.

Bytes that a drive returns are checked. For every piece that is written, memory keeps the CRC-32C of a sample (one line
of each page; on request all bytes), by drive, offset and length, and every read of the piece must give the same.

[Note: swapped bytes] The checksum in memory identifies both the extent and its generation, so that extents need no
header. It belongs to this process: the file of another process or of an earlier run is never opened (names are unique,
files are made anew, and no partition is read that this process has not written), and bytes that another program writes
into our file differ. It belongs to this place: a misdirected write leaves older bytes here and foreign ones there. It
belongs to the latest write: older bytes differ in each page whose sampled line has changed, and a step changes every
element of the states that it steps. A difference in the sampled lines of a piece is missed once in 2**32. A bit that
flips outside the sampled lines is found only by checking all bytes; drives have their own codes against that.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from infinity.base import trace
from infinity.base.transfer import Transfer
from infinity.base.untrusted import open_regular, reason, shortened
from infinity.errors import CapacityError, ConfigError, StateError, TransferError
from infinity.log import logger
from infinity.memory.folder import look
from infinity.memory.tiers.base import Checked, Folders, QueueOptions, TierBackend
from infinity.memory.tiers.striping import PROBE_NBYTES, Stripe, Stripes, measured_weights
from infinity.ops.aio import File, Queue, Request
from infinity.plan.types import Extent

_PREFIX = "infinity-swap-"
_SUFFIX = ".bin"
# Of the files beside a swap file: its run, and the two records that are written in turn. See `checkpoint.records`.
RUN_SUFFIX, RECORD_SUFFIXES = ".run", (".step0", ".step1")
# How long the lock of a file is waited for whose process is about to end.
_LOCK_SECONDS = 30.0
_NAME_ANOTHER = "Name a folder on a drive that this process may write to"


class SwapFile:
    """One file on one drive, locked while it exists and then removed, and the queue that moves its bytes."""

    def __init__(self, path: Path, file: File, queue: Queue) -> None:
        """Take a file whose lock this process has."""
        self.path, self.file, self.queue = path, file, queue
        self._owner = os.getpid()
        self._open = True
        # A program that ends without close() leaves no file either.
        self._remove = weakref.finalize(self, _remove_owned, self.path, self._owner)
        queue.register(self.file)

    @classmethod
    def create(cls, directory: Path, *, nbytes: int, rank: int, queue: Queue) -> SwapFile:
        """Create and reserve it, under the directory's lock; TransferError when the drive has no room."""
        path = directory / f"{_PREFIX}{uuid.uuid4().hex}-rank{rank}{_SUFFIX}"
        file = File.create(path, nbytes)
        try:
            _try_lock(_lock_of(file))
            _try_life(file.descriptors.buffered, fcntl.F_WRLCK)
        except OSError:
            file.close()
            path.unlink()
            raise
        return cls(path, file, queue)

    @classmethod
    def adopt(cls, path: Path, *, nbytes: int, queue: Queue) -> SwapFile:
        """Take the file of a process that has ended; it is kept. TransferError where it has another size, or a process
        still has it after half a minute.
        """
        file = File.open(path, writable=True)
        if file.nbytes != nbytes:
            raise TransferError(
                "open", path=str(path), offset=0, nbytes=nbytes, errno=errno.EINVAL,
                reason=f"the file has {file.nbytes} bytes, and its record tells of {nbytes}",
            )  # fmt: skip
        _lock_within(_lock_of(file), path)
        _try_life(file.descriptors.buffered, fcntl.F_WRLCK)
        drive = cls(path, file, queue)
        drive.keep()
        return drive

    def keep(self) -> None:
        """Leave the file where it is from now on, however the process ends."""
        self._remove.detach()

    def remove(self) -> None:
        """Have it removed after all when it is closed."""
        if not self._remove.alive:
            self._remove = weakref.finalize(self, _remove_owned, self.path, self._owner)

    def close(self) -> None:
        """Stop the queue and remove the file, unless it is kept. A forked child that inherited it leaves both alone."""
        if os.getpid() != self._owner or not self._open:
            return
        self._open = False
        try:
            self.queue.close()
        finally:
            self._remove()
            # Nothing is in flight any more; who holds a transfer keeps the descriptor open.
            with contextlib.suppress(OSError):
                fcntl.flock(_lock_of(self.file), fcntl.LOCK_UN)
            self.file.close()


class NvmeTier(TierBackend):
    """This rank's swap files, one a drive, and the queues that move its extents."""

    def __init__(
        self, directory: Folders, *, nbytes: int, rank: int, queue: Queue | Sequence[Queue],
        weights: Sequence[float] = (), checksum: Checked = "sampled", found: Sequence[Path] = (),
    ) -> None:  # fmt: skip
        """Create and reserve the files. `queue` is one for each directory, and closed with the tier. found: files of a
        process that has ended, one a directory, to take instead; `expect` says what was written to them.

        Raises TransferError when the drive has no room for `nbytes`, CapacityError when one of several drives has none
        for its share: then nothing was written anywhere.
        """
        directories = swap_folders(directory)
        queues = [queue] if isinstance(queue, Queue) else list(queue)
        self.weights = tuple(weights) or (1.0,) * len(directories)
        self._stripes = Stripes(nbytes, self.weights)
        shares = self._stripes.nbytes_by_drive
        # How many bytes were written last, and their checksum, by drive and offset; a request knows its own once it is
        # done.
        self._written: dict[tuple[int, int], tuple[int, Request | int]] | None = {} if checksum else None
        self._sampled = checksum == "sampled"
        self._drives: list[SwapFile] = []
        if found:
            with ExitStack() as undo:
                for path, share, each in zip(found, shares, queues, strict=True):
                    self._drives.append(SwapFile.adopt(path, nbytes=share, queue=each))
                    undo.callback(self._drives[-1].close)
                undo.pop_all()
            return
        for path in directories:
            _make(path)
        with ExitStack() as locks, ExitStack() as undo:
            # In one order, so that two processes do not wait for each other.
            for path in sorted({path.resolve() for path in directories}):
                locks.enter_context(_directory_lock(path))
                remove_stale(path)
            if len(directories) > 1:
                _check_room(directories, shares, "its share of the swap files")
            for path, share, each in zip(directories, shares, queues, strict=True):
                drive = SwapFile.create(path, nbytes=share, rank=rank, queue=each)
                undo.callback(drive.close)
                self._drives.append(drive)
            undo.pop_all()

    @classmethod
    def open(
        cls, directory: Folders, *, nbytes: int, rank: int, options: QueueOptions, found: Sequence[Path] = ()
    ) -> NvmeTier:
        """A tier with queues of its own, closed with it. Several drives without given weights are measured first."""
        directories = swap_folders(directory)
        weights = options.weights
        if len(directories) > 1 and not weights:
            for path in directories:
                _make(path)
            _check_room(directories, [PROBE_NBYTES] * len(directories), "a measurement of its bandwidth")
            weights = measured_weights(tuple(directories), options.depth, options.timeout_seconds)
        if len(directories) > 1:
            shares = ", ".join(f"{path} {w / sum(weights):.0%}" for path, w in zip(directories, weights, strict=True))
            logger.debug("%.2f GB striped over %d drives: %s", nbytes / 1e9, len(directories), shares)
        with ExitStack() as undo:
            queues = []
            for _ in directories:
                queue = Queue(
                    depth=options.depth,
                    threads=options.threads,
                    timeout_s=options.timeout_seconds,
                    block_nbytes=options.block_nbytes,
                )
                undo.callback(queue.close)
                queues.append(queue)
            tier = cls(
                directories, nbytes=nbytes, rank=rank, queue=queues, weights=weights, checksum=options.checksum,
                found=found,
            )  # fmt: skip
            undo.pop_all()
        return tier

    @property
    def nbytes(self) -> int:
        """Size of the files together."""
        return sum(drive.file.nbytes for drive in self._drives)

    @property
    def nbytes_by_path(self) -> dict[Path, int]:
        """Size of each file."""
        return {drive.path: drive.file.nbytes for drive in self._drives}

    @property
    def path(self) -> Path:
        """The file on the first drive."""
        return self._drives[0].path

    @property
    def directory(self) -> Path:
        """Where that is."""
        return self.path.parent

    @property
    def direct(self) -> bool:
        """Whether transfers bypass the page cache (O_DIRECT) on every drive."""
        return all(drive.file.direct for drive in self._drives)

    @property
    def backend(self) -> str:
        """The I/O back end in use."""
        return self._drives[0].queue.backend

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that may have begun before a request whose turn is next."""
        return sum(drive.queue.ahead_nbytes for drive in self._drives)

    def register(self, buffer: Tensor) -> bool:
        """Register a long-lived buffer with the kernel until `close`: transfers in it cost less. False: refused."""
        return all([drive.queue.register(buffer) for drive in self._drives])

    def read(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        """Submit a read of one extent into `buffer` (uint8, `extent.nbytes` long). Greater priorities go first.

        `wait` raises TransferError (errno EBADMSG) where the bytes that are compared are not those that were written.
        """
        return self._submit(extent, buffer, write=False, priority=priority)

    def write(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        """Submit a write of `buffer` (uint8, `extent.nbytes` long), which must not change meanwhile, to one extent."""
        return self._submit(extent, buffer, write=True, priority=priority)

    def checksums(self, extent: Extent) -> list[int]:
        """Return the checksums of what was written to an extent last, piece by piece; nothing may be in flight there.

        StateError where an extent of this length was not written.
        """
        found = []
        for piece in self._stripes.pieces(extent):
            nbytes, written = self._known((piece.drive, piece.offset))
            if written is None or nbytes != piece.nbytes:
                raise StateError(f"no {piece.nbytes} bytes were written to byte {piece.offset} of the swap file")
            found.append(written)
        return found

    def expect(self, extents: Sequence[Extent], checksums: Sequence[int]) -> None:
        """Note what another process has written to extents: as `checksums` returned it there, of one after the other.
        ValueError where these are not as many.
        """
        assert self._written is not None
        pieces = [piece for extent in extents for piece in self._stripes.pieces(extent)]
        if len(pieces) != len(checksums):
            raise ValueError(f"{len(pieces)} pieces of the swap file have {len(checksums)} checksums")
        for piece, checksum in zip(pieces, checksums, strict=True):
            self._written[piece.drive, piece.offset] = piece.nbytes, checksum

    def sync(self) -> None:
        """Return once all that was written outlasts a loss of power."""
        for drive in self._drives:
            drive.file.sync()

    def keep(self, kept: bool) -> None:
        """Say whether the files stay when the process ends, or `close` is called."""
        for drive in self._drives:
            if kept:
                drive.keep()
            else:
                drive.remove()

    def close(self) -> None:
        """Stop the queues and remove the files; raise the first failure that no caller has seen."""
        with ExitStack() as stack:
            for drive in reversed(self._drives):
                stack.callback(drive.close)

    def _submit(self, extent: Extent, buffer: Tensor, *, write: bool, priority: int) -> Transfer:
        requests: list[Request] = []
        moves = f"NVMe {'writes' if write else 'reads'}"
        try:
            for piece in self._stripes.pieces(extent):
                whole = piece.nbytes == extent.nbytes
                part = buffer if whole else buffer[piece.begin : piece.begin + piece.nbytes]
                request = self._submit_piece(piece, part, write=write, priority=priority)
                # The extent tells whose bytes they are.
                lane = moves if len(self._drives) == 1 else f"{moves}, drive {piece.drive}"
                trace.follow(lane, extent, part.nbytes, request)
                requests.append(request)
        except BaseException:
            # The caller takes the buffer back: nothing may be in flight in it.
            striped = Striped(requests)
            striped.cancel()
            with contextlib.suppress(TransferError):
                striped.wait()
            raise
        return requests[0] if len(requests) == 1 else Striped(requests)

    def _submit_piece(self, piece: Stripe, part: Tensor, *, write: bool, priority: int) -> Request:
        drive = self._drives[piece.drive]
        if self._written is None:
            submit = drive.queue.write if write else drive.queue.read
            return submit(drive.file, piece.offset, part, priority=priority)
        key = (piece.drive, piece.offset)
        if write:
            request = drive.queue.write(
                drive.file, piece.offset, part, priority=priority, checksum=True, sampled=self._sampled
            )
            self._written[key] = piece.nbytes, request
            return request
        nbytes, written = self._known(key)
        # A part of a written piece has no checksum of its own.
        expected = written if nbytes == piece.nbytes else None
        return drive.queue.read(
            drive.file, piece.offset, part, priority=priority, expected=expected, sampled=self._sampled
        )

    def _known(self, key: tuple[int, int]) -> tuple[int, int | None]:
        """Return how many bytes were written to a place of a drive, and their checksum, None while that is unknown."""
        assert self._written is not None
        nbytes, written = self._written.get(key, (0, None))
        if isinstance(written, Request) and written.done():
            # The checksum is unknown after a failure; otherwise it replaces the request.
            if (written := written.checksum) is None:
                del self._written[key]
            else:
                self._written[key] = nbytes, written
        return nbytes, written if isinstance(written, int) else None


class Striped:
    """The requests of one extent on several drives, as one transfer."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests

    def done(self) -> bool:
        """Whether all have ended: the buffer is free."""
        return all([request.done() for request in self._requests])

    def wait(self) -> None:
        """Wait for all, also after a failure; then raise the first one's."""
        first: TransferError | None = None
        for request in self._requests:
            try:
                request.wait()
            except TransferError as error:
                first = first or error
        if first is not None:
            raise first

    def cancel(self) -> bool:
        """See Request.cancel: whether anything was stopped."""
        return any([request.cancel() for request in self._requests])


def swap_folders(directory: Folders) -> list[Path]:
    """The directories of one tier."""
    several = [directory] if isinstance(directory, (str, os.PathLike)) else directory
    return [Path(each) for each in several]


def check_usable(directory: Folders, key: str) -> None:
    """Raise ConfigError, naming the configuration's `key`, where a folder can hold no swap file.

    The folder need not exist yet, and nothing is created.
    """
    for path in swap_folders(directory):
        try:
            why = _defect(path.absolute())
        except (OSError, ValueError) as error:
            why = reason(error)
        if why:
            raise ConfigError(f"{key}: {shortened(str(path))} cannot hold swap files: {why}. {_NAME_ANOTHER}")


def _defect(path: Path) -> str:
    at = path
    while not os.path.lexists(at):
        at = at.parent
    mode = os.W_OK | os.X_OK | (os.R_OK if at == path else 0)
    if not at.is_dir():
        return f"{at} is not a folder"
    if not os.access(at, mode):
        return f"this process may not write to {at}"
    if not os.statvfs(at).f_blocks:
        return f"the file system of {at} keeps no files"
    longest = max((len(os.fsencode(name)) for name in path.relative_to(at).parts), default=0)
    if longest > (limit := os.pathconf(at, "PC_NAME_MAX")):
        return f"a name in it has {longest} bytes, and the file system of {at} takes {limit}"
    return ""


def _make(path: Path) -> None:
    try:
        path.mkdir(parents=True)
    except OSError as error:
        if path.is_dir():
            return
        raise ConfigError(f"nvme_path: {path} cannot be made: {error.strerror}. {_NAME_ANOTHER}") from error
    place = look(path)
    logger.info(
        "made the folder %s for swap files, on %s (%s) with %.1f GB free", path.absolute(),
        place.model or "an unknown drive", place.file_system, place.free_nbytes / 1e9,
    )  # fmt: skip


def _check_room(directories: Sequence[Path], needs: Sequence[int], purpose: str) -> None:
    """Raise CapacityError, with all the numbers, where a drive has less free than its directories need."""
    needed: dict[int, int] = {}
    for path, nbytes in zip(directories, needs, strict=True):
        device = path.stat().st_dev
        needed[device] = needed.get(device, 0) + nbytes
    for path in directories:
        space = os.statvfs(path)
        free = space.f_bavail * space.f_frsize
        if needed[path.stat().st_dev] > free:
            plans = ", ".join(f"{each} {nbytes:,}" for each, nbytes in zip(directories, needs, strict=True))
            raise CapacityError(
                f"the drive of {path} has {free:,} bytes free but {purpose} needs "
                f"{needed[path.stat().st_dev]:,} (bytes a folder: {plans}). Free space there, leave the drive out of "
                "nvme_path, or give it a smaller share with aio.drive_weights."
            )


def clean(directory: Path) -> list[Path]:
    """Remove swap files that killed processes left in `directory`; return their paths."""
    with _directory_lock(directory):
        return remove_stale(directory)


def remove_stale(directory: Path) -> list[Path]:
    """Remove swap files whose owner has ended; return their paths. Call it under the directory's lock.

    What has the name of a swap file and is none (a pipe, a link, a folder) stays, and is not waited for. So does one
    with a record beside it.
    """
    removed = []
    for path in sorted(directory.glob(f"{_PREFIX}*{_SUFFIX}")):
        # A path that cannot be opened or removed belongs to another user, or is no file.
        with contextlib.suppress(OSError):
            descriptor, status = open_regular(path, os.O_NOFOLLOW)
            try:
                ended = _try_life(descriptor, fcntl.F_RDLCK)
                if ended and not has_record(path):
                    nbytes = status.st_size
                    path.unlink()
                    path.with_suffix(RUN_SUFFIX).unlink(missing_ok=True)
                    removed.append(path)
                    logger.info("removed %s (%.2f GB), left by a process that was killed", path, nbytes / 1e9)
            finally:
                os.close(descriptor)
    return removed


def has_record(path: Path) -> bool:
    """Whether a record lies beside a swap file."""
    return any(path.with_suffix(each).exists() for each in RECORD_SUFFIXES)


def has_ended(path: Path) -> bool:
    """Whether the process that had a swap file has ended, and so have its children. OSError where it is no file."""
    descriptor, _ = open_regular(path, os.O_NOFOLLOW)
    try:
        return _try_life(descriptor, fcntl.F_RDLCK)
    finally:
        os.close(descriptor)


def _remove_owned(path: Path, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


@contextlib.contextmanager
def _directory_lock(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # File systems without locks (some network ones) lose the protection against a race, not the function.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def wait_for_end(path: Path) -> None:
    """Wait until no process has a swap file any more: one that was killed has it until its last write has ended, and so
    have its children. TransferError after half a minute.
    """
    with File.open(path) as file:
        _lock_within(file.descriptors.buffered, path)


def _lock_within(descriptor: int, path: Path) -> None:
    deadline = time.monotonic() + _LOCK_SECONDS
    while not _try_lock(descriptor):
        if time.monotonic() > deadline:
            raise TransferError(
                "open", path=str(path), offset=0, nbytes=0, errno=errno.EWOULDBLOCK,
                reason="a process still has it (`fuser` names it): wait until that has ended, or end it",
            )  # fmt: skip
        time.sleep(0.1)


def _lock_of(file: File) -> int:
    """The descriptor that has a file's lock: the one whose transfers a kernel may end after their process."""
    own = file.descriptors
    return own.direct if own.direct >= 0 else own.buffered


def _try_lock(descriptor: int) -> bool:
    """Take the lock of the I/O if it is free. False also on a file system without locks."""
    return _granted(lambda: fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB))


def _try_life(descriptor: int, kind: int) -> bool:
    """Take the lock of the process, to write (its own) or to read (who asks whether it is free). False also on a file
    system without locks: no file is stale there. It does not meet the other lock, and is not given up where the process
    closes another descriptor of the file.
    """
    everything = struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0)
    return _granted(lambda: fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, everything))


def _granted(ask: Callable[[], object]) -> bool:
    try:
        ask()
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL):
            return False
        raise
    return True
