"""What one rank has submitted to its process groups, and the collective that it waits for."""

from __future__ import annotations

import time
import traceback
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from infinity.distributed.hang_detection.flight_record import NAMES_MAX, Wait

# Collectives of a group that are remembered.
_HISTORY_MAX = 4096


class CollectiveLog:
    """The collectives of each channel (one process group), by number and name.

    The training thread writes and the watchdog's thread reads: each change is one assignment, so there is no lock.
    """

    def __init__(self, channels: int) -> None:
        # By channel: collectives submitted so far.
        self.counts = [0] * channels
        # The latest collective of any channel.
        self.latest = ""
        # The collective that the host waits for.
        self.wait: Wait | None = None
        # Traceback of what the engine raised, until this rank submits the next collective.
        self.failure = ""
        self._digests = [0] * channels
        self._names: list[deque[tuple[int, str]]] = [deque(maxlen=_HISTORY_MAX) for _ in range(channels)]

    def submit(self, channel: int, name: str, nbytes: int) -> int:
        """Note that a collective is submitted; return its number in its channel."""
        number = self.counts[channel] = self.counts[channel] + 1
        said = f"{name}, {nbytes} bytes"
        self._digests[channel] = zlib.crc32(said.encode(), self._digests[channel])
        self._names[channel].append((number, said))
        self.latest = name
        self.failure = ""
        return number

    @contextmanager
    def waiting(self, channel: int, number: int, name: str) -> Iterator[None]:
        """Note that the host waits for a collective while the block runs."""
        self.wait = Wait(channel, number, name, time.monotonic())
        try:
            yield
        finally:
            self.wait = None

    def fail(self, error: BaseException) -> None:
        """Note that the engine is about to raise this."""
        self.failure = "".join(traceback.format_exception(type(error), error, error.__traceback__))

    def digests(self) -> list[float]:
        """Return one number a channel, the same on every rank that has submitted the same."""
        return [float(digest) for digest in self._digests]

    def histories(self) -> list[dict[int, str]]:
        """Return the latest collectives of each channel, name by number."""
        return [dict(names) for names in self._names]

    def recent_names(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Return the latest collectives of each channel that a position carries: (number, name)."""
        return tuple(tuple(names.copy())[-NAMES_MAX:] for names in self._names)
