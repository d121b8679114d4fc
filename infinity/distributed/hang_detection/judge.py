"""Judging all ranks' positions: whether the job can go on, and if not, why. No store, no clock, no process group."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.hang_detection.channels import Channels
from infinity.distributed.hang_detection.flight_record import (
    Positions,
    Wait,
    advice_for,
    circle,
    held_by,
    missing,
    parted,
    positions_table,
)

# A rank without a sign of life for so long is dead: when a connection broke as well, and when nothing else says so. A
# rank that holds Python's lock for long (it unpickles something large) gives none either.
_DEAD_BROKEN_SECONDS, _DEAD_SECONDS = 3.0, 60.0
# After a wait of so long a rank says once what it waits for.
_REMIND_SECONDS = 60.0
# How long before it says where a late rank is, a rank that waits for it begins to ask.
_ASK_SECONDS = 2.0
# A transfer of the late rank has the same limit, and its error says more than that the rank is late.
_GRACE_SECONDS = 1.5
# From a verdict until the program's own code is interrupted.
_INTERRUPT_SECONDS = 1.0
# The same if a rank has only ended: others may be about to raise the same error themselves.
INTERRUPT_ENDED_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why this job cannot go on."""

    text: str
    # The rank that is gone, and what it had submitted by then: what others can still finish. None: no rank goes on.
    rank: int | None = None
    counts: tuple[int, ...] | None = None
    # Seconds until the program's own code is interrupted; None: it is not.
    interrupt_seconds: float | None = _INTERRUPT_SECONDS

    def stops(self, channel: int, number: int) -> bool:
        """Whether a collective can no longer happen."""
        return self.counts is None or number > self.counts[channel]

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Diagnosis:
        raw = json.loads(text)
        return cls(**{**raw, "counts": None if raw["counts"] is None else tuple(raw["counts"])})


@dataclass(frozen=True, slots=True)
class Judgement:
    """What follows from the positions of one moment.

    ask: ranks that should say where they are. reminder: a line for the log, or empty.
    """

    verdict: Diagnosis | None = None
    ask: tuple[int, ...] = ()
    reminder: str = ""


class Judge:
    """Compares positions with those of before. `seconds`: how long a rank may let others wait (watchdog_seconds)."""

    def __init__(self, world: AxisPlace, channels: Channels, seconds: float) -> None:
        self._world = world
        self._channels = channels
        self._seconds = seconds
        # By rank: its latest beat, and when that was first seen here.
        self._seen: dict[int, tuple[int, float]] = {}
        # By rank: its failure and wait, and the beat at which they began.
        self._since: dict[int, tuple[Any, int]] = {}
        self._reminded = False

    def forget(self) -> None:
        """Drop how long ranks have been in one state: positions were not looked at for a while."""
        self._since.clear()

    def judge(self, positions: Positions, wait: Wait | None, *, now: float, connection_lost: bool) -> Judgement:
        """Judge all ranks' positions at `now` (this rank's clock, seconds). `wait`: what this rank waits for."""
        steady = self._steady(positions, now)
        stuck, apart = circle(positions, self._channels), parted(positions, self._channels)
        if apart or (stuck and stuck <= steady):
            first = f"What they did first that is not the same:\n{apart}\n" if apart else ""
            text = f"ranks wait for different things:\n{self._table(positions)}\n{first}{advice_for(self._channels)}"
            return Judgement(Diagnosis(text))
        awaited = list(positions) if wait is None else self._missing(positions, wait)
        for rank in awaited:
            if positions[rank].failure and rank in steady:
                place = self._channels.place(rank)
                return Judgement(Diagnosis(f"rank {place} has raised:\n{positions[rank].failure}", rank=rank))
        limit = min(_DEAD_BROKEN_SECONDS if connection_lost else _DEAD_SECONDS, max(self._seconds, 1.0))
        for rank in awaited:
            silent = now - self._seen[rank][1]
            if silent > limit and rank != self._world.index and (connection_lost or limit < self._seconds):
                return Judgement(
                    Diagnosis(
                        f"rank {self._channels.place(rank)} gives no sign of life for {silent:.0f} s: it was killed "
                        f"or stopped, or its machine is gone; look at its own log. Last seen:\n"
                        f"{self._table(positions)}"
                    )
                )
        return Judgement() if wait is None else self._late(positions, wait, now)

    def _missing(self, positions: Positions, wait: Wait) -> list[int]:
        return missing(positions, self._world.index, wait, self._channels)

    def _table(self, positions: Positions) -> str:
        return positions_table(positions, self._channels)

    def _steady(self, positions: Positions, now: float) -> set[int]:
        """Ranks that have been in one state over two reports, and so at the moment of the first look at it."""
        for rank, position in positions.items():
            if rank not in self._seen or self._seen[rank][0] != position.beat:
                self._seen[rank] = (position.beat, now)
            state = (position.failure, position.wait)
            if rank not in self._since or self._since[rank][0] != state:
                self._since[rank] = (state, position.beat)
        return {rank for rank, position in positions.items() if position.beat >= self._since[rank][1] + 2}

    def _late(self, positions: Positions, wait: Wait, now: float) -> Judgement:
        late = held_by(positions, self._world.index, wait, self._channels)
        names = ", ".join(map(self._channels.place, late)) or "nobody: the bytes do not arrive"
        waited, reminder = now - wait.began, ""
        near = any(limit - _ASK_SECONDS < waited < limit + _GRACE_SECONDS for limit in (self._seconds, _REMIND_SECONDS))
        if waited > _REMIND_SECONDS and not self._reminded:
            self._reminded = True
            reminder = f"waiting for rank {names} since {waited:.0f} s:\n{self._table(positions)}"
        verdict = None
        if waited >= self._seconds + _GRACE_SECONDS:
            silent = [rank for rank in positions if now - self._seen[rank][1] > _DEAD_BROKEN_SECONDS]
            gone = ", ".join(map(self._channels.place, silent))
            stopped = f"\nNo sign of life from rank {gone}." if silent else ""
            verdict = Diagnosis(
                f"waited {waited:.1f} s for rank {names} (watchdog_seconds is {self._seconds:g}):\n"
                f"{self._table(positions)}"
                f"{stopped}\nRaise watchdog_seconds if a rank may take this long."
            )
        return Judgement(verdict, tuple(late) if near else (), reminder)
