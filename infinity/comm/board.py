"""Notes that ranks leave for each other outside of the collectives: for threads that work behind the program.

A collective of theirs would have to come at the same place among the program's on every rank. Notes go through the
key-value store of the process group instead, and are waited for by looking again and again: nothing that the watchdog
or another thread asks of the store waits meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

# Between two looks at the store.
_LOOK_SECONDS = 0.05
_NEWS = "news"


class Board:
    """One topic's notes. `notes`: the store, None where this rank is the only one; then it reads its own."""

    def __init__(self, notes: Any, topic: str, *, rank: int, world_size: int, timeout_seconds: float) -> None:
        self._notes = notes
        self._topic = topic
        self._rank = rank
        self._world_size = world_size
        self._timeout_seconds = timeout_seconds
        self._own: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        """Leave a note, once for each name."""
        self._own[name] = text
        if self._notes is not None:
            self._notes.set(self._key(name, self._rank), text or " ")
        self.alive()

    def alive(self) -> None:
        """Say that something moves on this rank: whoever waits for it goes on waiting."""
        if self._notes is not None:
            self._notes.add(f"{self._topic}/{_NEWS}", 1)

    def collect(self, name: str, check: Callable[[], None]) -> list[str]:
        """The notes of all ranks, by rank. See `read`."""
        return [self.read(name, rank, check) for rank in range(self._world_size)]

    def read(self, name: str, rank: int, check: Callable[[], None]) -> str:
        """Another rank's note, once it is there. `check` is called meanwhile, and ends the wait by raising.

        TimeoutError where no rank has moved for the time limit.
        """
        if rank == self._rank:
            return self._own[name]
        key, news, since = self._key(name, rank), -1, time.monotonic()
        while not self._notes.check([key]):
            check()
            latest = int(self._notes.add(f"{self._topic}/{_NEWS}", 0))
            if latest != news:
                news, since = latest, time.monotonic()
            elif time.monotonic() - since > self._timeout_seconds:
                raise TimeoutError(
                    f"rank {rank} has not come to '{name}' and nothing has moved for {self._timeout_seconds:.0f} s "
                    "(watchdog_seconds)"
                )
            time.sleep(_LOOK_SECONDS)
        return str(self._notes.get(key).decode()).strip()

    def _key(self, name: str, rank: int) -> str:
        return f"{self._topic}/{name}/{rank}"
