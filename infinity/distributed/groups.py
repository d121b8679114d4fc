"""This rank's place among all ranks, and the process groups of the axes that it lies on.

World size 1 needs no launcher, no environment variables and no process group. More ranks come from torchrun, or from a
process group that the program has opened itself. One watchdog looks after all groups.

Meetings of all ranks before an engine is there, whose watchdog would look after them.

Ranks meet in the key-value store of torch's own group. A rank that has come alone says so, and ends its wait with an
error, instead of waiting in a collective for torch's time limit of half an hour or more.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from infinity.distributed import collectives, watchdog
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.cma_transport import Introduction, acquaint, log_transport
from infinity.distributed.flight_record import ENDS, STAGE, WORLD, Channels
from infinity.distributed.mailbox import StoreMailbox
from infinity.distributed.watchdog import BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN, Watchdog
from infinity.errors import ConfigError, DesyncError
from infinity.log import keep_standard_descriptors, logger
from infinity.plan.pipeline import pipeline_links
from infinity.plan.types import Topology


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all, for names of files and log lines. Code that communicates is given an `AxisGroup`.

    local_rank, local_size: the same among the ranks of this node.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def detect() -> Ranks:
    """Read the open process group, else torchrun's environment; with neither, this is the only rank.

    Every entrance of the library begins with it, before a file or a socket is opened, so that it keeps the standard
    descriptors, too.
    ConfigError if WORLD_SIZE is set without an address to meet at.
    """
    keep_standard_descriptors()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_available() and dist.is_initialized():
        rank, world_size = dist.get_rank(), dist.get_world_size()
    else:
        rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if world_size > 1 and name not in os.environ]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {world_size} but {' and '.join(missing)} is not set: start the program with "
                f"torchrun, or unset "
                "WORLD_SIZE to train on one rank"
            )
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size)))
    return Ranks(rank=rank, world_size=world_size, local_rank=local_rank, local_size=local_size)


# The store in which the ranks have met before they open their group of all.
_met: list[dist.Store] = []


def job_store(ranks: Ranks, limit_seconds: float) -> dist.Store:
    """Return the key-value store of all ranks, also before their group is open, which is then opened with it. Blocks
    until rank 0, which may keep it, has come.
    """
    if dist.is_initialized():
        return _get_default_store()
    if not _met:
        limit = timedelta(seconds=limit_seconds)
        store, *_ = next(dist.rendezvous("env://", ranks.rank, ranks.world_size, timeout=limit))
        # As torch names it; torchrun's own store outlives the ranks, and has the addresses of those before a restart.
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _met.append(dist.PrefixStore(f"default_pg/{restarts}", store))
    return _met[0]


def leave_store() -> None:
    """Open no group with the store in which the ranks have met: they part, and may meet elsewhere."""
    _met.clear()


def open_group(ranks: Ranks, *, backends: str = "gloo", timeout: timedelta | None = None) -> None:
    """Open torch.distributed's group of all ranks unless one is open; `timeout` defaults to torch's own.

    backends: the back ends of collectives as torch has them: one for every device, or "cpu:gloo,cuda:nccl".

    It stays open until the process ends: ranks that closed it at different times would meet each other's old store.
    """
    if "nccl" in backends:
        # Gathers and reductions have communicators of their own: NCCL launches what both have in the host's order.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    if dist.is_initialized():
        return
    if ranks.world_size > 1:
        job_store(ranks, PATIENCE_SECONDS if timeout is None else timeout.total_seconds())
    # One rank alone needs no address to meet at.
    store = _met.pop() if _met else dist.HashStore()
    dist.init_process_group(
        backends, rank=ranks.rank, world_size=ranks.world_size, timeout=timeout, store=store
    )
    atexit.register(_end, os.getpid())


class _Kind(NamedTuple):
    """A group of a rank: the name of its axis, the axis of the topology, and whether it is for decisions on the CPU."""

    name: str
    axis: str
    control: bool = False


# The groups of a rank, by channel. The latter ones are opened only where there is more than one rank on their axis.
_GROUPS = (
    _Kind("data", "dp"), _Kind("data", "dp"), _Kind("world", WORLD, control=True), _Kind("sequence", "sp"),
    _Kind("tensor", "tp"), _Kind("stage", STAGE, control=True), _Kind("pipeline", "pp", control=True),
    _Kind("pipeline", "pp"), _Kind("pipeline", "pp"), _Kind("pipeline ends", ENDS, control=True),
)  # fmt: skip
# The channel of the group of all ranks, of those that share each sequence, and of those of a stage.
_CONTROL, _SEQUENCE, _STAGE = 2, 3, 5
_ENDS = len(_GROUPS) - 1
# The groups that were opened last in this process.
_latest: list[weakref.ref[ProcessGroups]] = []


def latest_groups() -> ProcessGroups | None:
    """Return the groups that were opened last, for a program that asks for ranks without an engine; None if closed."""
    groups = _latest[0]() if _latest else None
    return None if groups is None or groups.closed else groups


class ProcessGroups:
    """The groups of the axes that this rank lies on.

    world: every rank, for small decisions; its process group is on the CPU and never waits for the device.
    data: the ranks that share the partitions of a unit, for gathers.
    reduction: the same ranks with a process group of their own, so that reductions and gathers may overtake each other.
    tensor: the ranks among which each layer is divided, for the sums of a forward and a backward.
    stage: the ranks that share a place on the pipeline axis, for small decisions on the CPU. Without a pipeline it is
        the very group `world`.
    pipeline: the ranks that differ on the pipeline axis only, for small decisions on the CPU.
    pipeline_forward, pipeline_backward: the same ranks, for activations and for their gradients (see `links`).

    A group of one rank has no process group. At world size 1 there is no watchdog.
    """

    def __init__(
        self, ranks: Ranks, topology: Topology | None = None, *, backends: str = "gloo", timeout_seconds: float,
        cross_memory_attach: bool = True,
    ) -> None:  # fmt: skip
        """Open the process groups. Collective.

        topology: the axes of the ranks; default: all of them along the data axis.
        backends: see `open_group`; tensors on the device use the last one.
        timeout_seconds: how long a rank may let others wait before the watchdog ends the job.
        cross_memory_attach: without an accelerator, ranks of one host read each other's memory (`cma_transport`).
        """
        self.ranks = ranks
        self.topology = Topology(dp=ranks.world_size, local_size=ranks.local_size) if topology is None else topology
        self._process = os.getpid()
        self.closed = False
        self.watchdog: Watchdog | None = None
        notes: Any = None
        timeout = timedelta(seconds=max(timeout_seconds + BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN))
        kinds = _kinds(self.topology)
        channels = Channels(self.topology, (*(kind.axis for kind in kinds), *pipeline_links(self.topology.pp)))
        opened: list[Any] = [None] * len(_GROUPS)
        if ranks.world_size > 1:
            open_group(ranks, backends=backends, timeout=timeout)
            own = backends.rpartition(":")[2]
            for channel, kind in enumerate(kinds):
                backend = "gloo" if kind.control else own
                opened[channel] = _open_own(channels.groups(channel), ranks, backend=backend, timeout=timeout)
            notes = dist.PrefixStore(f"infinity/{opened[_CONTROL].group_name}/", _get_default_store())
            world = AxisPlace("world", ranks.rank, ranks.world_size)
            self.watchdog = Watchdog(notes, world, opened, channels, seconds=timeout_seconds)
            watchdog.guard(self.watchdog)
        groups = []
        for channel, kind in enumerate(_GROUPS):
            members = Channels(self.topology, (kind.axis,)).members(ranks.rank, 0) or (ranks.rank,)
            groups.append(
                AxisGroup(
                    kind.name, members.index(ranks.rank), len(members), opened[channel], members, channel=channel,
                    watchdog=self.watchdog, host_waits=kind.control or backends == "gloo",
                )
            )  # fmt: skip
        if self.topology.pp == 1:
            groups[_STAGE] = groups[_CONTROL]
        self.data, self.reduction, self.world, _, self.tensor, self.stage, self.pipeline, *directions = groups
        self.pipeline_forward, self.pipeline_backward = directions[:2]
        # By channel; one may have two of them.
        self._groups = groups
        self._mailbox = partial(StoreMailbox, notes, group=self.world, timeout_seconds=timeout_seconds)
        _latest[:] = [weakref.ref(self)]
        if ranks.world_size > 1 and backends == "gloo":
            self._meet(Introduction(wanted=cross_memory_attach), timeout.total_seconds())

    def _meet(self, mine: Introduction, limit_seconds: float) -> None:
        """Find the ranks of this host that can read each other's memory; all groups use it from then on."""

        def tell(said: Any) -> list[Any]:
            return collectives.exchange_values(said, self.world, "introduction of ranks")

        found = acquaint(tell(mine.said), self.world.index, mine)
        # Which ranks each can read, and the reason if it can read none.
        answers = tell([sorted(found), mine.reason])
        mutual = {other: pid for other, pid in found.items() if self.world.index in answers[other][0]}
        log_transport(mutual, [reason for _, reason in answers])
        for group in {id(group): group for group in self._groups}.values():
            pids = {index: mutual[member] for index, member in enumerate(group.members) if member in mutual}
            if pids and group.process_group is not None:
                group.read_memory_of(pids, limit_seconds)

    @property
    def replica(self) -> int:
        """This rank's place among those with samples of their own, of which there are `topology.replicas`."""
        return self.data.index // self.topology.sp

    @property
    def sequence(self) -> AxisGroup:
        """The ranks that share each sequence, for the exchanges of attention."""
        return self._groups[_SEQUENCE]

    @property
    def pipeline_ends(self) -> AxisGroup:
        """The first and the last of the ranks along the pipeline axis, for what both have; each other is alone in it.
        """
        return self._groups[_ENDS]

    def mailbox(self, topic: str) -> StoreMailbox:
        """Return a topic for notes that ranks leave for each other outside of the collectives. Use a topic once."""
        return self._mailbox(topic)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """If the block raises, tell the ranks that wait for this one, unless this one goes on."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """Do the same for an error that was caught. An error of a forked child does not count as this rank's."""
        if self.watchdog is not None and os.getpid() == self._process:
            self.watchdog.failed(error)

    def check(self) -> None:
        """Raise DesyncError if the ranks can no longer go on together."""
        if self.watchdog is not None:
            self.watchdog.end.check()

    def close(self) -> None:
        """Destroy these groups; idempotent. The program's own group stays open until the process ends."""
        self.closed = True
        if self.watchdog is None:
            return
        watchdog.close(self.watchdog)
        self.watchdog = None
        for group in self._groups:
            # Idempotent.
            group.close()


def _kinds(topology: Topology) -> tuple[_Kind, ...]:
    """The groups that are opened, by channel."""
    if topology.pp > 1:
        return _GROUPS
    if topology.tp > 1:
        return _GROUPS[:_STAGE]
    return _GROUPS[: _SEQUENCE + 1] if topology.sp > 1 else _GROUPS[:_SEQUENCE]


def _open_own(groups: Sequence[Sequence[int]], ranks: Ranks, *, backend: str, timeout: timedelta) -> Any:
    """Open a process group for each of `groups` (global ranks); return this rank's, None where it is alone. Collective
    over all ranks: torch names a group by how many were opened, and only its members meet.
    """
    mine = None
    for members in groups:
        if len(members) == 1:
            continue
        everyone = None if len(members) == ranks.world_size else list(members)
        group = dist.new_group(everyone, backend=backend, timeout=timeout)
        mine = group if ranks.rank in members else mine
    return mine


def _end(owner: int) -> None:
    if os.getpid() != owner:
        # A forked child ends: see `_after_fork`.
        return
    watchdog.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _after_fork() -> None:
    # The groups' destructors wait for threads that only the parent has, so a child must never run them.
    for group in list(_world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_after_fork)

# As the default of watchdog_seconds; and from when on a rank says for whom it waits.
PATIENCE_SECONDS, REMIND_SECONDS = 600.0, 20.0
_LOOK_SECONDS = 0.005
# How long a rank that raises tries to tell the others.
_TELL_SECONDS = 5.0
_RAISED = "raised "
# Of the next meeting, in this process.
_number = 0


class Patience:
    """How long a rank waits for the others."""

    def __init__(self) -> None:
        self.seconds = PATIENCE_SECONDS

    def last(self, seconds: float) -> None:
        """Wait at least as long."""
        self.seconds = max(self.seconds, seconds)


@contextmanager
def all_ranks_after(call: str, advice: str) -> Iterator[Patience]:
    """Wait after the block until every rank has ended a block with the same `call`. Nothing to do for one rank.

    DesyncError, with `advice` of what to do, where another rank does not come, comes with another call, or has raised
    in its block. The group of all ranks need not be open.
    """
    global _number
    ranks, patience = detect(), Patience()
    if ranks.world_size == 1:
        yield patience
        return
    try:
        yield patience
    except BaseException as error:
        # The others may not have come yet, and their wait has its own end.
        with suppress(RuntimeError):
            store = job_store(ranks, _TELL_SECONDS)
            store.set(_key(ranks.rank), f"{_RAISED}{type(error).__name__} in {call}: {error}")
            store.add(_key("heard"), 1)
            _linger(store, ranks)
        _number += 1
        leave_store()
        raise
    store = job_store(ranks, patience.seconds)
    store.set(_key(ranks.rank), call)
    try:
        found = [_said(store, rank, call, advice, patience.seconds) for rank in range(ranks.world_size)]
        store.add(_key("heard"), 1)
    except BaseException:
        # Whoever comes now meets nobody, and the next meeting has this number.
        store.delete_key(_key(ranks.rank))
        leave_store()
        raise
    _number += 1
    for rank, said in enumerate(found):
        if said != call:
            leave_store()
            other = said if said.startswith(_RAISED) else f"ended {said}"
            raise DesyncError(f"rank {rank} has {other} where rank {ranks.rank} has ended {call}. {advice}")


def _key(name: object) -> str:
    return f"infinity/meeting/{_number}/{name}"


def _linger(store: dist.Store, ranks: Ranks) -> None:
    """Let the others hear what rank 0 has said: the store may end with its process."""
    deadline = time.monotonic() + _TELL_SECONDS
    while ranks.rank == 0 and store.add(_key("heard"), 0) < ranks.world_size and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _said(store: dist.Store, rank: int, call: str, advice: str, patience_seconds: float) -> str:
    """Wait for a rank, and return with what it has come."""
    key, began, reminded = _key(rank), time.monotonic(), False
    for look in itertools.count():
        if store.check([key]):
            return str(store.get(key).decode())
        waited = time.monotonic() - began
        if waited > patience_seconds:
            raise DesyncError(
                f"rank {detect().rank} has waited {waited:.0f} s for rank {rank}, which has not come to the end of "
                f"{call}. {advice}"
            )
        if waited > REMIND_SECONDS and not reminded:
            reminded = True
            logger.warning(
                "rank %d waits for rank %d to come to the end of %s, until %.0f s are over",
                detect().rank, rank, call, patience_seconds,
            )  # fmt: skip
        time.sleep(_LOOK_SECONDS if look < 1000 else 10 * _LOOK_SECONDS)
    raise AssertionError
