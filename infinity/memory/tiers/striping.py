"""The layout of one tier's bytes on several drives, by weights, so that all drives finish together.

The tier's bytes are divided into periods. Each period is cut into one piece a drive, in proportion to the drives'
weights, and a drive's pieces lie one behind the other in its file. The last period is shorter and cut in the same
proportion, so that the files together have exactly the tier's bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from infinity.memory.resizable_buffer import page_aligned
from infinity.ops.aio import File, Queue
from infinity.plan.types import EXTENT_ALIGNMENT, Extent

# Mean length of a piece: long enough for large requests, short enough for every extent to lie on all drives.
_PIECE_NBYTES = 4 << 20
# Bytes that a measurement writes to a drive and reads from it, twice.
PROBE_NBYTES = 64 << 20
# Drives whose rates differ by less count as equal: a measurement of a fraction of a second errs by as much.
_EQUAL_WITHIN = 0.15


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes [begin, begin + nbytes) of an extent, and where they are in the file of one drive."""

    drive: int
    offset: int
    begin: int
    nbytes: int


class Stripes:
    """`nbytes` bytes on as many drives as there are weights (positive; only their ratios count)."""

    def __init__(self, nbytes: int, weights: Sequence[float]) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights {tuple(weights)}: one above 0 is needed for each drive")
        whole = sum(weights)
        self._shares = [sum_ / whole for sum_ in accumulate(weights, initial=0.0)]
        self._nbytes = nbytes
        self._period = len(weights) * _PIECE_NBYTES
        self._cuts = self._cut(self._period)
        self._last = nbytes // self._period
        self._last_cuts = self._cut(nbytes % self._period)

    @property
    def nbytes_by_drive(self) -> tuple[int, ...]:
        """Sizes of the files."""
        return tuple(
            self._last * (end - begin) + last_end - last_begin
            for (begin, end), (last_begin, last_end) in zip(
                pairwise(self._cuts), pairwise(self._last_cuts), strict=True
            )
        )

    def pieces(self, extent: Extent) -> Iterator[Stripe]:
        """The pieces of an extent, in the order of its bytes."""
        if len(self._cuts) == 2:
            yield Stripe(0, extent.offset, 0, extent.nbytes)
            return
        at, end = extent.offset, extent.offset + extent.nbytes
        if end > self._nbytes:
            raise ValueError(f"{extent} is beyond the {self._nbytes} bytes of the tier")
        while at < end:
            period, inside = divmod(at, self._period)
            cuts = self._last_cuts if period == self._last else self._cuts
            drive = next(index for index, cut in enumerate(cuts[1:]) if inside < cut)
            nbytes = min(end - at, cuts[drive + 1] - inside)
            offset = period * (self._cuts[drive + 1] - self._cuts[drive]) + inside - cuts[drive]
            yield Stripe(drive, offset, at - extent.offset, nbytes)
            at += nbytes

    def _cut(self, nbytes: int) -> list[int]:
        """The beginnings of the drives' pieces in a period of `nbytes`, and its end."""
        inner = [int(nbytes * share) // EXTENT_ALIGNMENT * EXTENT_ALIGNMENT for share in self._shares[:-1]]
        return [*inner, nbytes]


@lru_cache
def measured_weights(directories: tuple[Path, ...], depth: int, timeout_seconds: float) -> tuple[float, ...]:
    """Measure the drives' rates over a short mix of writes and reads, in bytes a second; nearly equal ones as equal.

    Measured once a process, so that the same folders give the same weights. Raises TransferError where a drive fails.
    """
    rates = []
    for directory in directories:
        with Queue(depth=depth, timeout_s=timeout_seconds) as queue:
            rates.append(_rate(directory, queue))
    return even(rates)


def even(rates: Sequence[float]) -> tuple[float, ...]:
    """Return rates as weights, nearly equal ones as equal."""
    if min(rates) >= (1 - _EQUAL_WITHIN) * max(rates):
        return (1.0,) * len(rates)
    return tuple(rates)


def _rate(directory: Path, queue: Queue) -> float:
    path = directory / f".infinity-probe-{time.monotonic_ns()}"
    with File.create(path, PROBE_NBYTES) as file:
        # Unlinked at once, so that an error leaves no file.
        path.unlink()
        buffer = page_aligned(PROBE_NBYTES // 4)

        def pass_over(write: bool) -> float:
            started = time.perf_counter()
            submit = queue.write if write else queue.read
            for request in [submit(file, index * buffer.nbytes, buffer) for index in range(4)]:
                request.wait()
            return time.perf_counter() - started

        # The first pass allocates the file's blocks.
        pass_over(True)
        return 2 * PROBE_NBYTES / (pass_over(True) + pass_over(False))
