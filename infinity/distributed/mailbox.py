"""Notes that ranks leave for each other outside of the collectives, for threads that work behind the program.

A collective of such a thread would need the same place among the program's collectives on every rank. Notes go through
the process group's key-value store instead. A reader polls, so that requests of the watchdog and of other threads to
the store never wait behind it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from infinity.distributed.axis_place import AxisPlace

# Between two polls of the store.
_LOOK_SECONDS = 0.05
# A rank whose watchdog has not reported to the store for so long has ended.
_SILENT_SECONDS = 60.0
_NEWS = "news"
# Between two signs of life, as a share of the time limit.
_SAID_SHARE = 0.05


class StoreMailbox:
    """One topic's notes. `notes` is the store; None if this rank is the only one, which then reads its own notes."""

    def __init__(self, notes: Any, topic: str, *, group: AxisPlace, timeout_seconds: float) -> None:
        self._notes = notes
        self._topic = topic
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._own: dict[str, str] = {}
        self._said = -math.inf

    def post(self, name: str, text: str) -> None:
        """Leave a note. Use a name once."""
        self._own[name] = text
        if self._notes is not None:
            self._notes.set(self._key(name, self._group.index), text or " ")
        self.alive()

    def alive(self) -> None:
        """Tell readers that this rank makes progress, so that they go on waiting. Cheap: most calls do nothing."""
        now = time.monotonic()
        if self._notes is not None and now - self._said >= self._timeout_seconds * _SAID_SHARE:
            self._said = now
            self._notes.add(f"{self._topic}/{_NEWS}", 1)

    def collect(self, name: str, check: Callable[[], None]) -> list[str]:
        """Wait for the notes of all ranks; return them by rank. See `read`."""
        return [self.read(name, rank, check) for rank in range(self._group.size)]

    def read(self, name: str, rank: int, check: Callable[[], None]) -> str:
        """Wait for a rank's note and return it. `check` is called at every poll and may end the wait by raising.

        TimeoutError if no rank has made progress for the time limit, or if that rank gives no sign of life.
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
        """Return a rank's latest position report, which differs from every earlier one by its number."""
        key = f"at/{rank}"
        return bytes(self._notes.get(key)) if self._notes.check([key]) else b""

    def _key(self, name: str, rank: int) -> str:
        return f"{self._topic}/{name}/{rank}"
