"""The position of every rank among the collectives, and comparisons of positions. Pure.

Every rank numbers the collectives that it submits, by group. Collective n of a group must be the same on every member;
if its names differ, the ranks have parted. A rank waits for the members that have not submitted what it waits for;
ranks that wait for each other in a circle, through whichever groups, wait for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from infinity.distributed.hang_detection.channels import Channels

# How many of a group's latest collectives a position carries.
NAMES_MAX = 64
_ADVICE = (
    "At stage 3 every rank has to use the same modules in the same order. A module that chooses by its data (a mixture "
    "of experts) must be one unit: name its class in zero_optimization.leaf_module.classes. One that chooses at random "
    "(LayerDrop) needs the same seed on every rank."
)
_PIPELINE_ADVICE = (
    "All ranks of a pipeline have to run the same schedule of the same micro-batches: look first at the schedule, at "
    "parallel.stages and at the data of each rank."
)


def advice_for(channels: Channels) -> str:
    """Return what to look at when ranks did different things."""
    return f"{_PIPELINE_ADVICE}\n{_ADVICE}" if channels.has_links else _ADVICE


class Wait(NamedTuple):
    """A collective that the host waits for, or the device. `group` is its channel, `began` is in seconds of the rank's
    clock.
    """

    group: int
    number: int
    name: str
    began: float


@dataclass(frozen=True, slots=True)
class Position:
    """One rank at one moment, as it reports itself."""

    rank: int
    # Grows with every report: a sign of life.
    beat: int
    # Collectives submitted so far, by group.
    counts: tuple[int, ...]
    wait: Wait | None = None
    waited_seconds: float = 0.0
    # The latest collectives by group, each its number and its name.
    names: tuple[tuple[tuple[int, str], ...], ...] = ()
    # The latest collective of any group.
    latest: str = ""
    # Where the training thread is in the program's own code: file, line, function.
    where: str = ""
    # Traceback of what the engine raised there, until the rank goes on.
    failure: str = ""

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str | bytes) -> Position:
        raw = json.loads(text)
        wait = Wait(*raw["wait"]) if raw["wait"] else None
        names = tuple(tuple((number, name) for number, name in group) for group in raw["names"])
        return cls(**{**raw, "counts": tuple(raw["counts"]), "names": names, "wait": wait})

    def describe(self, place: str) -> str:
        """Say in one line what the rank does; `place` names it (`Channels.place`)."""
        at = f" (at {self.where})" if self.where else ""
        if self.wait is not None:
            return f"rank {place} has waited {self.waited_seconds:.1f} s for {self.wait.name}{at}"
        latest = f"; its latest collective was {self.latest}" if self.latest else "; it has begun no collective"
        return f"rank {place} is in the program's own code{at}{latest}"


Positions = Mapping[int, Position]


def missing(positions: Positions, rank: int, wait: Wait, channels: Channels) -> list[int]:
    """Return the ranks that have not submitted what `rank`, which has this wait, waits for."""
    members = channels.members(rank, wait.group)
    return [other for other in members if positions[other].counts[wait.group] < wait.number]


def held_by(positions: Positions, rank: int, wait: Wait, channels: Channels) -> list[int]:
    """Return the ranks that `rank`, which has this wait, waits for in the end: those that lack the collective, and in
    place of one of them that waits itself those that it waits for. Of a mere circle: those that lack it.
    """
    lacking = missing(positions, rank, wait, channels)
    found, asked, todo = set(), {rank}, list(lacking)
    while todo:
        other = todo.pop()
        if other in asked:
            continue
        asked.add(other)
        theirs = positions[other].wait
        behind = missing(positions, other, theirs, channels) if theirs is not None else []
        todo += behind
        if not behind:
            found.add(other)
    return sorted(found) or lacking


def parted(positions: Positions, channels: Channels) -> str:
    """Describe the first collective that is not the same on two ranks of a group, a line a rank; empty if there is
    none.

    Compares only the collectives that the positions carry.
    """
    told = [rank for rank, position in positions.items() if position.names]
    for channel in range(len(channels.axes)):
        for members in channels.groups(channel):
            known = {rank: dict(positions[rank].names[channel]) for rank in members if rank in told}
            for number in sorted({number for names in known.values() for number in names}):
                names = {rank: names[number] for rank, names in known.items() if number in names}
                if len(set(names.values())) > 1:
                    return "\n".join(
                        f"  rank {channels.place(rank)}: {name} (number {number})"
                        for rank, name in sorted(names.items())
                    )
    return ""


def circle(positions: Positions, channels: Channels) -> set[int]:
    """Return the ranks that wait for each other in a circle, and the ranks that wait for those."""
    waits = {rank: position.wait for rank, position in positions.items() if position.wait is not None}
    lacking = {rank: set(missing(positions, rank, wait, channels)) for rank, wait in waits.items()}
    stuck = {rank for rank, others in lacking.items() if others}
    while True:
        freed = {rank for rank in stuck if not lacking[rank] & stuck}
        if not freed:
            return stuck
        stuck -= freed


def positions_table(positions: Positions, channels: Channels) -> str:
    """Describe the positions, a line a rank."""
    return "\n".join(f"  {positions[rank].describe(channels.place(rank))}" for rank in sorted(positions))


def first_difference(histories: Sequence[Mapping[int, str]]) -> tuple[int, list[str]] | None:
    """Return the first number at which the ranks' histories differ, and its name on each rank; None if they agree.

    histories: by rank, the latest collectives, name by number. Only numbers that every history may hold are compared.
    """
    if not all(histories):
        return None
    first, last = max(map(min, histories)), max(map(max, histories))
    for number in range(first, last + 1):
        names = [history.get(number, "none") for history in histories]
        if len(set(names)) > 1:
            return number, names
    return None
