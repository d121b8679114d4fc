"""Which units hold device memory: gathered ones, and released ones whose memory waits for a later gather.

Where the device's memory is the process's, the system is slow to give freed pages again. So a released unit retains its
memory, and all units together stay within the plan's bound: the unit released longest ago gives its memory up first.
The engine gathers by this class, and the phases follow the schedule with it.
"""

from __future__ import annotations

from typing import NamedTuple


class Room(NamedTuple):
    """What has to happen before a unit takes memory."""

    # Released units that give up theirs, the oldest first.
    freed: tuple[int, ...] = ()
    # Bytes of pages without an owner that may stay, the unit's next ones included; None: the unit has its own memory.
    spare_nbytes_max: int | None = None


class UnitMemory:
    """Bytes of units by index. nbytes_max: what gathered and released units may hold together; a gathered unit is
    always let in. retain: whether released units keep their memory.
    """

    def __init__(self, nbytes_max: int, *, retain: bool) -> None:
        self._nbytes_max = nbytes_max
        self._retain = retain
        # Both from the oldest to the newest.
        self._live: dict[int, int] = {}
        self._retained: dict[int, int] = {}
        self.live_nbytes = self.retained_nbytes = 0

    def __contains__(self, unit: int) -> bool:
        return unit in self._live

    @property
    def nbytes(self) -> int:
        """Bytes of all units that hold memory."""
        return self.live_nbytes + self.retained_nbytes

    @property
    def live(self) -> tuple[int, ...]:
        """Gathered units."""
        return tuple(self._live)

    @property
    def retained(self) -> tuple[int, ...]:
        """Released units that hold memory."""
        return tuple(self._retained)

    def gather(self, unit: int, nbytes: int) -> Room:
        """Count a unit as gathered."""
        if unit in self._live:
            return Room()
        room = Room() if self._forget(unit) else self._make_room(nbytes)
        self._live[unit] = nbytes
        self.live_nbytes += nbytes
        return room

    def release(self, unit: int, *, retain: bool = True) -> bool:
        """Count a gathered unit as released. Returns whether it keeps its memory."""
        nbytes = self._live.pop(unit)
        self.live_nbytes -= nbytes
        if retain and self._retain:
            self._retained[unit] = nbytes
            self.retained_nbytes += nbytes
        return retain and self._retain

    def _make_room(self, nbytes: int) -> Room:
        freed = []
        while self._retained and self.nbytes + nbytes > self._nbytes_max:
            freed.append(next(iter(self._retained)))
            self._forget(freed[-1])
        return Room(tuple(freed), max(self._nbytes_max - self.nbytes, nbytes))

    def _forget(self, unit: int) -> bool:
        nbytes = self._retained.pop(unit, None)
        self.retained_nbytes -= nbytes or 0
        return nbytes is not None
