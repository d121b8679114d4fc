"""Pipeline schedules as tables: for each rank, the forwards and backwards of a step in the order in which it runs them.

A model is cut into `pp * virtual` stages; stage s lies on rank s % pp, so that a rank has `virtual` chunks. A table
lists a rank's actions. The functions below derive from all ranks' tables what a step takes: activations in flight, time
and bubble, the order of messages, and the order in which units are used. All of it is known before the first step, and
equal on every rank, because a table depends on nothing but its four arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import NamedTuple

from infinity.errors import ConfigError
from infinity.plan.prefetch import UnitAccess

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")
# Those that run several chunks a rank, in rounds of equal numbers of micro-batches.
_IN_ROUNDS = ("interleaved", "zero_bubble")


class ActionKind(Enum):
    """What a rank does with one micro-batch in one of its stages.

    A backward is whole (B), or split: I computes the gradient of the stage's input, W those of its weights.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"

    __hash__ = object.__hash__

    @property
    def sends_backward(self) -> bool:
        """Whether the gradient of the stage's input comes of it."""
        return self in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)


class Action(NamedTuple):
    """One entry of a table; written as in "2F0", the forward of micro-batch 0 in stage 2."""

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


# What a stage may run.
_KINDS = (
    {ActionKind.FORWARD, ActionKind.BACKWARD},
    {ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT},
)  # fmt: skip

# By rank.
Tables = tuple[tuple[Action, ...], ...]


class MessageLink(NamedTuple):
    """A directed way between two ranks: activations (`forward`) and their gradients have communicators of their own."""

    sender: int
    receiver: int
    forward: bool


def pipeline_links(pp: int) -> tuple[MessageLink, ...]:
    """Return all links between `pp` ranks, whose stages lie one after another round a ring; none for one rank."""
    if pp == 1:
        return ()
    ring = [(index, (index + 1) % pp) for index in range(pp)]
    return tuple(
        link for rank, after in ring for link in (MessageLink(rank, after, True), MessageLink(after, rank, False))
    )


def check_schedule(schedule: str, pp: int, m: int, virtual: int = 1) -> None:
    """Raise ConfigError unless `make_tables` has tables for these arguments; the message names the nearest that do."""
    if schedule not in SCHEDULES:
        raise ConfigError(f"parallel.schedule is {schedule!r}; the schedules are {', '.join(SCHEDULES)}")
    for what, value in (
        ("parallel.pipeline", pp), ("the number of micro-batches", m), ("parallel.virtual_stages", virtual)
    ):  # fmt: skip
        if value < 1:
            raise ConfigError(f"{what} is {value}; it must be at least 1")
    if schedule not in _IN_ROUNDS:
        if virtual > 1:
            raise ConfigError(
                f"parallel.schedule {schedule!r} runs one stage a rank, and parallel.virtual_stages is {virtual}; set "
                f"it to 1, or parallel.schedule to {' or '.join(map(repr, _IN_ROUNDS))}"
            )
    elif m % (rounds := _rounds(pp, m)):
        below = next(n for n in range(m - 1, 0, -1) if n % _rounds(pp, n) == 0)
        above = next(n for n in range(m + 1, m + pp + 1) if n % _rounds(pp, n) == 0)
        raise ConfigError(
            f"parallel.schedule {schedule!r} on {pp} pipeline ranks runs {m} micro-batches in {rounds} equal rounds, "
            f"and {m} is not a multiple of {rounds}; the nearest numbers of micro-batches that work are {below} and "
            f"{above}"
        )


def _rounds(pp: int, m: int) -> int:
    return max(1, m // pp)


def make_tables(schedule: str, pp: int, m: int, virtual: int = 1) -> Tables:
    """Return for each of `pp` ranks the actions of a step of `m` micro-batches, in order.

    gpipe: all forwards, then all backwards (Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks
    using Pipeline Parallelism").
    1f1b: after pp - 1 - rank forwards, one forward and one backward in turns (PipeDream-Flush; Narayanan et al. 2021,
    "Memory-Efficient Pipeline-Parallel DNN Training").
    interleaved: the same with `virtual` chunks a rank, which take turns after one round of micro-batches each
    (Megatron-LM; Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
    A round has m // rounds micro-batches, as in torch.distributed.pipelining, where the paper has pp.
    zero_bubble: backwards are split, and weight gradients are computed as late as 1f1b's memory allows: ZB-H1 of Qi et
    al. 2023, "Zero Bubble Pipeline Parallelism" (ZB1P in torch), which with virtual > 1 is interleaved as above.

    Each stage runs its backwards in the order of micro-batches, so that sums of gradients have equal bits under all
    schedules.

    Raises:
        ConfigError: as `check_schedule`.
    """
    check_schedule(schedule, pp, m, virtual)
    return tuple(_actions(schedule, rank, pp, m, virtual) for rank in range(pp))


def forward_tables(pp: int, m: int, virtual: int = 1) -> Tables:
    """Return the tables of `m` micro-batches that only run forwards, as an evaluation does.

    With several chunks a rank, `pp` micro-batches go through all stages in one round, and the last round may be
    shorter. ConfigError unless all sizes are at least 1.
    """
    check_schedule(SCHEDULES[0], pp, m)
    if virtual < 1:
        raise ConfigError(f"parallel.virtual_stages is {virtual}; it must be at least 1")
    return tuple(
        tuple(
            Action(stage, ActionKind.FORWARD, micro_batch)
            for stage, micro_batch in _turns(range(rank, pp * virtual, pp), m, pp)
        )
        for rank in range(pp)
    )


def _actions(schedule: str, rank: int, pp: int, m: int, virtual: int) -> tuple[Action, ...]:
    later = pp - 1 - rank
    size = m // _rounds(pp, m) if virtual > 1 else m
    # The chunks' turns.
    first = (virtual - 1) * size
    warmup = {"gpipe": m, "1f1b": later, "interleaved": first + 2 * later, "zero_bubble": first + later}[schedule]
    warmup = min(warmup, virtual * m)
    chunks = [rank + chunk * pp for chunk in range(virtual)]
    forwards = list(_turns(chunks, m, size))
    backwards = list(_turns(chunks[::-1], m, size))
    split = schedule == "zero_bubble"
    kind = ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD
    actions = [Action(stage, ActionKind.FORWARD, each) for stage, each in forwards[:warmup]]
    for count, (stage, each) in enumerate(backwards):
        if warmup + count < len(forwards):
            ahead, other = forwards[warmup + count]
            actions.append(Action(ahead, ActionKind.FORWARD, other))
        actions.append(Action(stage, kind, each))
        if split and count >= rank:
            behind, other = backwards[count - rank]
            actions.append(Action(behind, ActionKind.BACKWARD_WEIGHT, other))
    rest = backwards[max(0, len(backwards) - rank) :] if split else []
    return (*actions, *(Action(stage, ActionKind.BACKWARD_WEIGHT, each) for stage, each in rest))


def _turns(stages: Sequence[int], m: int, size: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch): each stage in turn takes the next `size` micro-batches, or those that are left."""
    for begin in range(0, m, size):
        for stage in stages:
            for micro_batch in range(begin, min(begin + size, m)):
                yield stage, micro_batch


def activations_in_flight(
    tables: Tables, saved: Sequence[float] | None = None, deferred: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Return each rank's peak of what forwards have saved and backwards not yet released.

    saved: by stage, what its forward saves of one micro-batch, in any unit; 1 each by default: the peak counts
    micro-batches of a chunk. deferred: by stage, what a split backward still holds between its I and its W (inputs and
    the gradients of outputs, of its linears); all that was saved by default.
    """
    return tuple(max(0.0, *held_behind(actions, saved, deferred)) for actions in tables)


def held_behind(
    actions: Sequence[Action], saved: Sequence[float] | None = None, deferred: Sequence[float] | None = None
) -> Iterator[float]:
    """Yield what a rank holds behind each of its actions, as `activations_in_flight` counts it."""
    held = 0.0
    for stage, kind, _ in actions:
        whole = saved[stage] if saved is not None else 1
        late = deferred[stage] if deferred is not None else whole
        held += {
            ActionKind.FORWARD: whole, ActionKind.BACKWARD: -whole, ActionKind.BACKWARD_INPUT: late - whole,
            ActionKind.BACKWARD_WEIGHT: -late,
        }[kind]  # fmt: skip
        yield held


@dataclass(frozen=True, slots=True)
class ActionSeconds:
    """Seconds of one micro-batch, by stage; a whole backward takes the sum of its two parts."""

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]

    def of(self, action: Action) -> float:
        """Return the seconds that an action takes."""
        stage, kind, _ = action
        if kind is ActionKind.FORWARD:
            return self.forward[stage]
        late = self.backward_weight[stage] if kind is not ActionKind.BACKWARD_INPUT else 0.0
        return late + (self.backward_input[stage] if kind is not ActionKind.BACKWARD_WEIGHT else 0.0)


@dataclass(frozen=True, slots=True)
class PipelineTimes:
    """When each action of each rank begins and ends, in seconds from the beginning of the step."""

    spans: tuple[tuple[tuple[float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """Seconds until the last rank has ended."""
        return max(end for spans in self.spans for _, end in spans)

    @property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank computes nothing."""
        return tuple(self.makespan - sum(end - begin for begin, end in spans) for spans in self.spans)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they compute nothing."""
        return sum(self.idle) / (len(self.spans) * self.makespan) if self.makespan else 0.0


def time_tables(tables: Tables, seconds: ActionSeconds, *, message_seconds: float = 0.0) -> PipelineTimes:
    """Run the tables in simulated time: each action begins as soon as its rank is free and what it needs is there.

    message_seconds: from the end of an action to the arrival of what it sends; messages of one link go one after the
    other. Sending takes the sender's computation no time.
    """
    route = _Route(tables)
    spans: list[list[tuple[float, float]]] = [[] for _ in tables]
    # When an action's outcome is where it is needed.
    there: dict[Action, float] = {}
    free: dict[MessageLink, float] = {}
    ends: dict[Action, float] = {}
    for rank, action in _in_order(tables):
        begin = spans[rank][-1][1] if spans[rank] else 0.0
        for needed in route.needs(action):
            begin = max(begin, (ends if route.link(needed, action) is None else there)[needed])
        ends[action] = end = begin + seconds.of(action)
        spans[rank].append((begin, end))
        if (link := route.sends(action)) is not None:
            there[action] = free[link] = max(end, free.get(link, 0.0)) + message_seconds
    return PipelineTimes(tuple(map(tuple, spans)))


def message_order(tables: Tables) -> dict[MessageLink, tuple[Action, ...]]:
    """Return for each link the actions whose outcome goes over it, in the sender's order.

    The receiver posts its receives in this order. Neighbouring stages of one rank have no link.
    """
    route = _Route(tables)
    found: dict[MessageLink, list[Action]] = {}
    for actions in tables:
        for action in actions:
            if (link := route.sends(action)) is not None:
                found.setdefault(link, []).append(action)
    return {link: tuple(actions) for link, actions in found.items()}


def unit_uses(
    actions: Sequence[Action], units: Mapping[int, Sequence[int]],
    lookups: Mapping[int, Collection[int]] = MappingProxyType({}),
) -> tuple[UnitAccess, ...]:  # fmt: skip
    """Return the uses of units in a rank's step, for `make_schedule`.

    units: for each of the rank's stages, the units that its forward uses, in order. lookups: for each stage, positions
    in that order whose backward needs the unit's place but not its weights (see `plan.prefetch`). A forward uses them
    in order, B and I in the opposite one. W computes from queued inputs and gradients, without weights, and is no use.
    """
    uses: list[UnitAccess] = []
    for stage, kind, _ in actions:
        if kind is ActionKind.FORWARD:
            uses += [UnitAccess(unit) for unit in units[stage]]
        elif kind.sends_backward:
            unneeded = lookups.get(stage, ())
            backward = [UnitAccess(unit, position not in unneeded) for position, unit in enumerate(units[stage])]
            uses += reversed(backward)
    return tuple(uses)


def check_tables(tables: Tables, m: int) -> None:
    """Raise ValueError unless the tables are a step of `m` micro-batches whose actions cannot wait in a circle.

    Every stage lies on one rank and runs F and B, or F, I and W, once for each micro-batch, each kind in the order of
    micro-batches; or all stages run F alone. Every action finds what it needs, with each rank in its order.
    """
    route = _Route(tables)
    orders: dict[tuple[int, ActionKind], list[int]] = {}
    for rank, actions in enumerate(tables):
        for action in actions:
            orders.setdefault((action.stage, action.kind), []).append(action.micro_batch)
            if (other := route.rank_of[action.stage]) != rank:
                raise ValueError(f"stage {action.stage} lies on rank {other}, and {action} on rank {rank}")
    trains = {kind for _, kind in orders} != {ActionKind.FORWARD}
    for stage in range(max(route.rank_of) + 1):
        kinds = {kind for kind in ActionKind if (stage, kind) in orders}
        if (trains or not kinds) and kinds not in _KINDS:
            names = " ".join(sorted(kind.value for kind in kinds)) or "nothing"
            raise ValueError(f"stage {stage} runs {names}; it must run F and B, or F, I and W")
        for kind in kinds:
            if (order := orders[stage, kind]) != [*range(m)]:
                raise ValueError(f"stage {stage} runs {kind.value} of micro-batches {order}, not 0 to {m - 1} in order")
    for _ in _in_order(tables):
        pass


def check_messages(tables: Tables, *, sends_waiting: int, posted_ahead: int = 1) -> None:
    """Raise ValueError if the messages of tables that `check_tables` accepts can wait in a circle.

    On each link the receiver posts receives in the sender's order, `posted_ahead` beyond those that it has used. A send
    ends once its receive is posted. A rank goes on while at most `sends_waiting` of a link's sends have not ended; with
    0 it waits for each. Times do not matter: if one timing gets through, all do.
    """
    walk = _MessageWalk(tables, sends_waiting, posted_ahead)
    moved = True
    while moved:
        # Each rank in turn, whatever the others did.
        moved = sum(walk.advance(rank) for rank in range(len(tables))) > 0
    if stuck := list(walk.waiting()):
        raise ValueError(f"the ranks wait for each other: {'; '.join(stuck)}")


def sends_needed(tables: Tables, *, posted_ahead: int = 1) -> int:
    """Return how many sends of a link at least must be allowed to wait, so that no circle forms in `check_messages`.

    0 with one chunk a rank. Several close a ring of ranks, around which more messages may be under way than links hold:
    interleaved needs more than 0 only where a round is longer than `pp` micro-batches, zero_bubble also elsewhere (3
    with pp 8, m 16, virtual 2).
    """
    most = max(map(len, message_order(tables).values()), default=0)
    for needed in range(most):
        try:
            check_messages(tables, sends_waiting=needed, posted_ahead=posted_ahead)
        except ValueError:
            continue
        return needed
    return most


class _Route:
    """What an action needs, and over which link its outcome goes."""

    def __init__(self, tables: Tables) -> None:
        self.rank_of = {action.stage: rank for rank, actions in enumerate(tables) for action in actions}
        self._last = max(self.rank_of)
        split = any(action.kind is ActionKind.BACKWARD_INPUT for actions in tables for action in actions)
        self._backward = ActionKind.BACKWARD_INPUT if split else ActionKind.BACKWARD

    def needs(self, action: Action) -> set[Action]:
        """The actions that must have ended before this one begins."""
        stage, kind, micro_batch = action
        if kind is ActionKind.FORWARD:
            return {Action(stage - 1, kind, micro_batch)} if stage > 0 else set()
        if kind is ActionKind.BACKWARD_WEIGHT:
            return {Action(stage, ActionKind.BACKWARD_INPUT, micro_batch)}
        own = Action(stage, ActionKind.FORWARD, micro_batch)
        return {own, Action(stage + 1, self._backward, micro_batch)} if stage < self._last else {own}

    def link(self, action: Action, after: Action) -> MessageLink | None:
        """The link from an action to one that needs it; None on one rank."""
        sender, receiver = self.rank_of[action.stage], self.rank_of[after.stage]
        if sender == receiver:
            return None
        return MessageLink(sender, receiver, action.kind is ActionKind.FORWARD)

    def sends(self, action: Action) -> MessageLink | None:
        """The link over which an action's outcome goes; None where it stays."""
        stage, kind, _ = action
        after = stage + 1 if kind is ActionKind.FORWARD else stage - 1
        if kind is ActionKind.BACKWARD_WEIGHT or after not in self.rank_of:
            return None
        return self.link(action, action._replace(stage=after))

    def received(self, action: Action) -> tuple[MessageLink, Action] | None:
        """The message that an action uses, and its link; None where what it needs is on its rank."""
        for needed in self.needs(action):
            if (link := self.link(needed, action)) is not None:
                return link, needed
        return None


def _in_order(tables: Tables) -> Iterator[tuple[int, Action]]:
    """(rank, action) of all tables: each rank's in its order, each after what it needs. ValueError for a circle."""
    route = _Route(tables)
    at = [0] * len(tables)
    ended: set[Action] = set()

    def ready(rank: int) -> bool:
        return at[rank] < len(tables[rank]) and route.needs(tables[rank][at[rank]]) <= ended

    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(tables):
            while ready(rank):
                progress = True
                action = actions[at[rank]]
                yield rank, action
                ended.add(action)
                at[rank] += 1
    stuck = [(rank, actions[at[rank]]) for rank, actions in enumerate(tables) if at[rank] < len(actions)]
    if stuck:
        waiting = "; ".join(
            f"rank {rank} at {action} for {' and '.join(str(need) for need in route.needs(action) - ended)}"
            for rank, action in stuck
        )
        raise ValueError(f"the ranks wait for each other: {waiting}")


class _MessageWalk:
    """The ranks' positions in their tables, and the state of each link: messages sent, receives posted, messages used.

    Each step of a rank only lets others go further, so that one order of steps shows what all do.
    """

    def __init__(self, tables: Tables, sends_waiting: int, posted_ahead: int) -> None:
        self._tables = tables
        self._sends_waiting, self._posted_ahead = sends_waiting, posted_ahead
        self._route = _Route(tables)
        order = message_order(tables)
        self._place = {action: place for actions in order.values() for place, action in enumerate(actions)}
        self._sent, self._used = Counter(dict.fromkeys(order, 0)), Counter(dict.fromkeys(order, 0))
        self._posted = Counter(dict.fromkeys(order, posted_ahead))
        self._at = [0] * len(tables)
        # The link on which a rank, behind its last action, waits for its sends.
        self._sending: list[MessageLink | None] = [None] * len(tables)

    def waiting(self) -> Iterator[str]:
        """For each rank that is not at its end, what it waits for."""
        for rank, (at, actions) in enumerate(zip(self._at, self._tables, strict=True)):
            if (link := self._sending[rank]) is not None:
                yield f"rank {rank} behind {actions[at - 1]} until rank {link.receiver} receives"
            elif at < len(actions):
                message = " and ".join(str(need) for _, need in filter(None, [self._route.received(actions[at])]))
                yield f"rank {rank} at {actions[at]} for {message}"

    def advance(self, rank: int) -> bool:
        """Take the rank as far as it goes; return whether it has moved."""
        moved = False
        while self._step(rank):
            moved = True
        return moved

    def _step(self, rank: int) -> bool:
        if (link := self._sending[rank]) is not None:
            if self._sent[link] - self._posted[link] > self._sends_waiting:
                return False
            self._sending[rank] = None
            return True
        if self._at[rank] == len(self._tables[rank]):
            return False
        action = self._tables[rank][self._at[rank]]
        if (found := self._route.received(action)) is not None and not self._receive(*found):
            return False
        self._at[rank] += 1
        if (link := self._route.sends(action)) is not None:
            self._sent[link] += 1
            self._sending[rank] = link
        return True

    def _receive(self, link: MessageLink, message: Action) -> bool:
        """Post receives up to this message's; True once it has arrived."""
        place = self._place[message]
        self._posted[link] = max(self._posted[link], place + 1)
        if self._sent[link] <= place:
            return False
        self._used[link] += 1
        self._posted[link] = max(self._posted[link], self._used[link] + self._posted_ahead)
        return True
