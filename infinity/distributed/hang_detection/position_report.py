"""Publishing where this rank is, so that every other rank can judge who waits for whom."""

from __future__ import annotations

import time
from typing import Any

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.hang_detection.collective_log import CollectiveLog
from infinity.distributed.hang_detection.flight_record import Position, Wait
from infinity.distributed.hang_detection.thread_stack import where

# Between two reports of a rank. A rank that waits for longer is shown with all that is known of it.
BEAT_SECONDS = 0.5


class PositionReport:
    """This rank's position in the job's store, under "at/RANK". `thread_id`: the training thread."""

    def __init__(self, store: Any, log: CollectiveLog, world: AxisPlace, *, thread_id: int) -> None:
        self._store = store
        self._log = log
        self._world = world
        self._thread_id = thread_id
        self._beat = 0
        # How often other ranks had asked where this one is at the latest report.
        self._asked = 0
        # Counts and wait when the training thread was last looked for, and where it was.
        self._seen_at: tuple[tuple[tuple[int, ...], Wait | None], str] = ((), None), ""

    def publish(self, *, connection_lost: bool) -> Position:
        """Write the position of now to the store, and return it."""
        self._beat += 1
        before, self._asked = self._asked, int(self._store.add(f"asked/{self._world.index}", 0))
        mine = self.position(connection_lost=connection_lost, asked=self._asked > before)
        self._store.set(f"at/{self._world.index}", mine.encode())
        return mine

    def position(self, *, connection_lost: bool, asked: bool = False) -> Position:
        """Return the position of now. asked: another rank wants to know where in the program this one is."""
        log, wait = self._log, self._log.wait
        waited = time.monotonic() - wait.began if wait is not None else 0.0
        shown = waited > BEAT_SECONDS or connection_lost
        return Position(
            rank=self._world.index, beat=self._beat, counts=tuple(log.counts), wait=wait, waited_seconds=waited,
            names=log.recent_names() if shown else (), latest=log.latest, where=self._where(wait, shown, asked),
            failure=log.failure,
        )  # fmt: skip

    def _where(self, wait: Wait | None, wanted: bool, asked: bool) -> str:
        """Where the training thread is in the program's own code; looked up only once there is reason to."""
        state = tuple(self._log.counts), wait
        known = self._seen_at[1] if self._seen_at[0] == state else ""
        if asked or (wanted and not known):
            known = where(self._thread_id)
        self._seen_at = state, known
        return known
