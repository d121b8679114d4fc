"""What one rank has submitted to its process groups, and the collective that it waits for."""

from __future__ import annotations

import threading
import time
import traceback
import zlib
from collections import deque
from functools import lru_cache
from typing import Any

from infinity.distributed.hang_detection.flight_record import NAMES_MAX, Wait

# Collectives of a group that are remembered.
_HISTORY_MAX = 4096
# A digest is a polynomial of what was submitted, modulo 2 ** 32 (Rabin and Karp); Knuth's multiplier.
_FACTOR, _MASK = 2_654_435_761, (1 << 32) - 1


@lru_cache(maxsize=_HISTORY_MAX)
def words_and_digest(name: str, nbytes: int) -> tuple[str, int]:
    """Return a collective in words, and a number of 32 bits for it."""
    said = f"{name}, {nbytes} bytes"
    return said, zlib.crc32(said.encode())


class CollectiveLog:
    """The collectives of each channel (one process group), by number and name.

    The training thread writes and the watchdog's thread reads: each change is one assignment, which needs no lock.
    """

    def __init__(self, channels: int) -> None:
        # By channel: collectives submitted so far.
        self.counts = [0] * channels
        # The latest collective of any channel.
        self.latest = ""
        self._wait: Wait | None = None
        # Collectives for which an accelerator's streams wait and the host does not: channel, number, name, torch's
        # work; and the wait for the first one that is not over, from when it became the first.
        self._queued: deque[tuple[int, int, str, Any]] = deque()
        self._device_wait: Wait | None = None
        self._lock = threading.Lock()
        # Traceback of what the engine raised, until this rank submits the next collective.
        self.failure = ""
        self._digests = [0] * channels
        self._names: list[deque[tuple[int, str]]] = [deque(maxlen=_HISTORY_MAX) for _ in range(channels)]

    def submit(self, channel: int, name: str, nbytes: int) -> int:
        """Note that a collective is submitted; return its number in its channel."""
        number = self.counts[channel] = self.counts[channel] + 1
        said, code = words_and_digest(name, nbytes)
        self._digests[channel] = (self._digests[channel] * _FACTOR + code) & _MASK
        self._names[channel].append((number, said))
        self.latest = name
        self.failure = ""
        return number

    @property
    def wait(self) -> Wait | None:
        """The collective that the host waits for; if there is none, the first that the device waits for."""
        if self._wait is not None:
            return self._wait
        with self._lock:
            while self._queued and self._queued[0][-1].is_completed():
                self._queued.popleft()
            if not self._queued:
                self._device_wait = None
                return None
            channel, number, name, _ = self._queued[0]
            known = self._device_wait
            if known is None or (known.group, known.number) != (channel, number):
                self._device_wait = known = Wait(channel, number, name, time.monotonic())
            return known

    def queued(self, channel: int, number: int, name: str, work: Any) -> None:
        """Note that the device waits for a collective, and the host goes on."""
        self._queued.append((channel, number, name, work))

    def begin_wait(self, channel: int, number: int, name: str) -> None:
        """Note that the host waits for a collective, until `end_wait`."""
        self._wait = Wait(channel, number, name, time.monotonic())

    def end_wait(self) -> None:
        """Note that the host waits no longer."""
        self._wait = None

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
