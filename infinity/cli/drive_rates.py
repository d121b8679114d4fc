"""Measurement of a drive's bandwidth through infinity's I/O queue, over block sizes and depths.

The measured file is unlinked right after its creation, so that it disappears however the process ends. It has one
gibibyte, or a quarter of the free space if that is less. It is written before it is read, because reads of blocks that
were never written do not reach the drive.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from infinity.errors import ConfigError
from infinity.memory.folder import FolderInfo, look
from infinity.memory.pages import page_aligned
from infinity.ops.aio import File, Queue, Request
from infinity.plan.hardware import Drive

FILE_NBYTES = 1 << 30
_FILE_NBYTES_MIN = 64 << 20
# A request is as large as a typical sub-group or layer partition; the queue cuts it into blocks.
_REQUEST_NBYTES = 16 << 20
_REQUESTS = 4
# (bytes of a block, blocks in flight), in the order in which they are tried.
SETTINGS = ((256 << 10, 32), (512 << 10, 16), (512 << 10, 32), (1 << 20, 32), (2 << 20, 16))
_PATTERNS = ("read", "write", "mixed")
# Shares of a drive's time: writing the file, searching for the best setting. The rest measures the best setting.
_FILL_SHARE, _SEARCH_SHARE = 0.15, 0.4


def measure_drive(
    folder: str | os.PathLike[str], *, seconds: float, endurance_nbytes: int | None = None,
    tell: Callable[[str], None] = lambda text: None, settings: tuple[tuple[int, int], ...] = SETTINGS,
) -> Drive:  # fmt: skip
    """Measure the drive of `folder` for about `seconds`.

    Arguments:
        endurance_nbytes: rated endurance, copied into the result.
        tell: receives a line of text for each phase.
        settings: (bytes of a block, blocks in flight) to try; a slow drive is measured at the first few only.

    Raises:
        ConfigError: `folder` does not exist, or the drive cannot be measured.
    """
    path = Path(folder)
    check_drive(path)
    try:
        return _measure(path, seconds, endurance_nbytes, tell, settings)
    except OSError as error:
        raise ConfigError(f"{path} cannot be measured: {error.strerror or error}") from error


def check_drive(folder: str | os.PathLike[str]) -> None:
    """Raise ConfigError if `folder` does not exist, is not writable or has too little free space for a measurement."""
    path = Path(folder)
    if not path.is_dir():
        what = "is no folder" if path.exists() else "there is no such folder"
        raise ConfigError(f"{path}: {what}; name one that is on the drive to measure")
    place = look(path)
    if not place.writable:
        raise ConfigError(f"{path}: the folder cannot be written to; name another, or change its owner")
    if _file_nbytes(place) < _FILE_NBYTES_MIN:
        raise ConfigError(
            f"{path}: {place.free_nbytes / 1e6:.0f} MB are free, and a measurement takes a quarter of that, at least "
            f"{_FILE_NBYTES_MIN / 1e6:.0f} MB: free some space, or choose another folder"
        )


def _file_nbytes(place: FolderInfo) -> int:
    return min(FILE_NBYTES, place.free_nbytes // 4) // _REQUEST_NBYTES * _REQUEST_NBYTES


def _measure(
    path: Path, seconds: float, endurance_nbytes: int | None, tell: Callable[[str], None],
    settings: tuple[tuple[int, int], ...],
) -> Drive:  # fmt: skip
    place = look(path)
    nbytes = _file_nbytes(place)
    ends = time.monotonic() + seconds
    file = _nameless(path, nbytes)
    with file:
        # Random bytes, because some drives compress.
        buffer = page_aligned(_REQUESTS * _REQUEST_NBYTES)
        buffer.random_(0, 256, generator=torch.Generator().manual_seed(0))
        tell(f"{path}: writing {nbytes / 1e9:.1f} GB to measure on")
        nbytes = _fill(file, nbytes, buffer, _FILL_SHARE * seconds)
        turn = _SEARCH_SHARE * seconds / (len(settings) * len(_PATTERNS))
        found: dict[tuple[int, int], tuple[float, float, float]] = {}
        searched = time.monotonic() + _SEARCH_SHARE * seconds
        for setting in settings:
            if found and time.monotonic() + turn > searched:
                # A slow drive leaves no time for the other settings.
                break
            tell(f"{path}: blocks of {setting[0] >> 10} KiB, {setting[1]} in flight")
            found[setting] = _rates(file, nbytes, buffer, setting, turn)
        best = max(found, key=lambda setting: 1 / sum(1 / rate for rate in found[setting]))
        tell(f"{path}: once more with the best, {best[0] >> 10} KiB and {best[1]} in flight")
        rest = max(ends - time.monotonic(), 0.0) / len(_PATTERNS)
        read, write, mixed = _rates(file, nbytes, buffer, best, rest)
    return Drive(
        folder=os.path.abspath(path), read_rate=read, write_rate=write, mixed_rate=mixed, block_nbytes=best[0],
        queue_depth=best[1], direct=file.direct, file_system=place.file_system, model=place.model,
        capacity_nbytes=place.capacity_nbytes, endurance_nbytes=endurance_nbytes,
    )  # fmt: skip


def _nameless(folder: Path, nbytes: int) -> File:
    """Return a new file of `nbytes` without a name, which the kernel removes with its last descriptor."""
    path = folder / f".infinity-bench-{uuid.uuid4().hex}"
    try:
        # Create it empty and reserve the space after the unlink, because that may take long.
        empty = File.create(path, 0)
    finally:
        path.unlink(missing_ok=True)
    os.posix_fallocate(empty.descriptors.buffered, 0, nbytes)
    return File(empty.path, nbytes, empty.descriptors, writable=True)


def _fill(file: File, nbytes: int, buffer: Tensor, seconds: float) -> int:
    """Write `nbytes` from the start of the file, for at most `seconds`; return the number of bytes written."""
    ends = time.monotonic() + seconds
    with Queue() as queue:
        for offset in range(0, nbytes, buffer.nbytes):
            queue.write(file, offset, buffer[: min(buffer.nbytes, nbytes - offset)]).wait()
            if time.monotonic() > ends and offset + buffer.nbytes < nbytes:
                return offset + buffer.nbytes
    return nbytes


def _rates(
    file: File, nbytes: int, buffer: Tensor, setting: tuple[int, int], seconds: float
) -> tuple[float, float, float]:
    """Return the bandwidths of reads, of writes and of both together, in bytes a second."""
    block_nbytes, depth = setting
    with Queue(depth=depth, block_nbytes=block_nbytes) as queue:
        queue.register(buffer)
        queue.register(file)
        read, write, mixed = (_rate(queue, file, nbytes, buffer, pattern, seconds) for pattern in _PATTERNS)
    return read, write, mixed


def _rate(queue: Queue, file: File, nbytes: int, buffer: Tensor, pattern: str, seconds: float) -> float:
    pieces = buffer.split(_REQUEST_NBYTES)
    in_flight: deque[Request] = deque()
    began = time.perf_counter()
    count = 0
    while time.perf_counter() - began < seconds or count < 2:
        if len(in_flight) == len(pieces):
            in_flight.popleft().wait()
        write = pattern == "write" or (pattern == "mixed" and count % 2 == 1)
        submit = queue.write if write else queue.read
        # The mixed pattern reads one half of the file and writes the other.
        half = nbytes // 2 // _REQUEST_NBYTES * _REQUEST_NBYTES if pattern == "mixed" else nbytes
        offset = (count * _REQUEST_NBYTES) % half + (half if write and pattern == "mixed" else 0)
        in_flight.append(submit(file, offset, pieces[count % len(pieces)]))
        count += 1
    for request in in_flight:
        request.wait()
    return count * _REQUEST_NBYTES / (time.perf_counter() - began)
