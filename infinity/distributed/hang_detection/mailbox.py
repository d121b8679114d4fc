"""Notes that ranks leave for each other outside of the collectives: for threads that work behind the program.

A collective of theirs would have to come at the same place among the program's on every rank. Notes go through the
key-value store of the process group instead, and are waited for by looking again and again: nothing that the watchdog
or another thread asks of the store waits meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from infinity.distributed.axis_group import AxisGroup

# Between two looks at the store.
_LOOK_SECONDS = 0.05
# Every rank's watchdog reports to the store all the time; one that is silent for so long has ended.
_SILENT_SECONDS = 60.0
_NEWS = "news"
# Of the time limit, between two signs of life.
_SAID_SHARE = 0.05


class StoreMailbox:
    """One topic's notes. `notes`: the store, None where this rank is the only one; then it reads its own."""

    def __init__(self, notes: Any, topic: str, *, group: AxisGroup, timeout_seconds: float) -> None:
        self._notes = notes
        self._topic = topic
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._own: dict[str, str] = {}
        self._said = -math.inf

    def post(self, name: str, text: str) -> None:
        """Leave a note, once for each name."""
        self._own[name] = text
        if self._notes is not None:
            self._notes.set(self._key(name, self._group.index), text or " ")
        self.alive()

    def alive(self) -> None:
        """Say that something moves on this rank: whoever waits for it goes on waiting. May be called as often as one
        likes; most calls do nothing.
        """
        now = time.monotonic()
        if self._notes is not None and now - self._said >= self._timeout_seconds * _SAID_SHARE:
            self._said = now
            self._notes.add(f"{self._topic}/{_NEWS}", 1)

    def collect(self, name: str, check: Callable[[], None]) -> list[str]:
        """The notes of all ranks, by rank. See `read`."""
        return [self.read(name, rank, check) for rank in range(self._group.size)]

    def read(self, name: str, rank: int, check: Callable[[], None]) -> str:
        """Another rank's note, once it is there. `check` is called meanwhile, and ends the wait by raising.

        TimeoutError where no rank has moved for the time limit, or the other rank gives no sign of life.
        """
        if rank == self._group.index:
            return self._own[name]
        key, began = self._key(name, rank), time.monotonic()
        news, moved, sign, heard = -1, began, b"", began
        while not self._notes.check([key]):
            check()
            now = time.monotonic()
            latest, report = int(self._notes.add(f"{self._topic}/{_NEWS}", 0)), self._report(rank)
            news, moved = (latest, now) if latest != news else (news, moved)
            sign, heard = (report, now) if report != sign else (sign, heard)
            if now - heard > _SILENT_SECONDS:
                raise TimeoutError(f"rank {rank} has not come to '{name}' and has been silent for {now - heard:.0f} s")
            if now - moved > self._timeout_seconds:
                raise TimeoutError(
                    f"rank {rank} has not come to '{name}' and nothing has moved for {now - moved:.0f} s "
                    "(watchdog_seconds)"
                )
            time.sleep(_LOOK_SECONDS)
        return str(self._notes.get(key).decode()).strip()

    def _report(self, rank: int) -> bytes:
        """What a rank's watchdog has reported last, with the number of the report."""
        key = f"at/{rank}"
        return bytes(self._notes.get(key)) if self._notes.check([key]) else b""

    def _key(self, name: str, rank: int) -> str:
        return f"{self._topic}/{name}/{rank}"
