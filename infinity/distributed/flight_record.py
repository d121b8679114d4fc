"""The position of every rank among the collectives, and comparisons of positions. Pure.

Every rank numbers the collectives that it submits, by group. Collective n of a group must be the same on every member;
if its names differ, the ranks have parted. A rank waits for the members that have not submitted what it waits for;
ranks that wait for each other in a circle, through whichever groups, wait for ever.

What one rank has submitted to its process groups, and the collective that it waits for.

The process groups of all ranks by number, so that a rank can tell who waits for whom in a group of others.

Messages between neighbours on the pipeline axis are counted by directed link: a rank takes part in four at most.

Publishing where this rank is, so that every other rank can judge who waits for whom.
"""

from __future__ import annotations

import json
import threading
import time
import traceback
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.thread_stack import where
from infinity.plan.pipeline import MessageLink
from infinity.plan.types import Topology

# The axis of a channel that every rank is in, of one for the ranks that share a place on the pipeline axis, and of one
# for the first and the last rank along it.
WORLD, STAGE, ENDS = "world", "stage", "ends"


@dataclass(frozen=True, slots=True)
class Channels:
    """A channel is a number that every rank has for one of its process groups, or for a link between two of them.

    axes: by channel, the axis of the topology (`dp`, `sp`, `tp`, `pp`) along which its groups lie, `WORLD`, `STAGE` or
    `ENDS`; or a link, whose group is its sender and its receiver. Ranks that differ on another axis have another
    group of the same channel, whose collectives, or messages, are numbered apart.
    """

    topology: Topology
    axes: tuple[str | MessageLink, ...] = (WORLD,)

    def members(self, rank: int, channel: int) -> tuple[int, ...]:
        """Return the global ranks of the group that `rank` has in a channel; none if it is not on that link."""
        axis, topology = self.axes[channel], self.topology
        if isinstance(axis, MessageLink):
            here = topology.coordinate(rank)
            ends = axis.sender, axis.receiver
            return tuple(topology.rank(here._replace(pp=end)) for end in ends) if here.pp in ends else ()
        if axis == ENDS:
            along = topology.axis_members(rank, "pp")
            return (along[0], along[-1]) if rank in (along[0], along[-1]) else ()
        if axis == STAGE:
            size = topology.dp * topology.tp
            return tuple(range(rank // size * size, (rank // size + 1) * size))
        return tuple(range(topology.world_size)) if axis == WORLD else topology.axis_members(rank, axis)

    def groups(self, channel: int) -> tuple[tuple[int, ...], ...]:
        """Return the members of each group of a channel."""
        axis = self.axes[channel]
        if axis in ("pp", "dp", "sp", "tp"):
            return self.topology.axis_groups(str(axis))
        ranks = (0,) if axis == WORLD else range(self.topology.world_size)
        return tuple(filter(None, dict.fromkeys(self.members(rank, channel) for rank in ranks)))

    @property
    def has_links(self) -> bool:
        """Whether ranks lie along a pipeline."""
        return any(isinstance(axis, MessageLink) for axis in self.axes)

    def of_link(self, link: MessageLink) -> int:
        """Return the channel of a link between two indices of the pipeline axis."""
        return self.axes.index(link)

    def place(self, rank: int) -> str:
        """Return a rank's number, with its place on each axis where ranks have several."""
        axes = [axis for axis in ("pp", "dp", "tp") if getattr(self.topology, axis) > 1]
        if len(axes) < 2:
            return str(rank)
        here = self.topology.coordinate(rank)
        return f"{rank} ({', '.join(f'{axis} {getattr(here, axis)}' for axis in axes)})"


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
