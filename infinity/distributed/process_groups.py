"""This rank's place among all ranks, and the process groups of the axes that it lies on.

World size 1 needs no launcher, no environment variables and no process group. More ranks come from torchrun, or from a
process group that the program has opened itself. One watchdog looks after all groups.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.axis_place import AxisPlace
from infinity.distributed.cma_transport import Introduction, acquaint, log_transport
from infinity.distributed.hang_detection import process_exit
from infinity.distributed.hang_detection.channels import ENDS, STAGE, WORLD, Channels
from infinity.distributed.hang_detection.mailbox import StoreMailbox
from infinity.distributed.hang_detection.watchdog import BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN, Watchdog
from infinity.errors import ConfigError
from infinity.log import keep_standard_descriptors
from infinity.plan.pipeline import pipeline_links
from infinity.plan.topology import Topology


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
        # As torch names it.
        _met.append(dist.PrefixStore("default_pg", store))
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
    # One rank alone needs no address to meet at.
    store = dist.HashStore() if ranks.world_size == 1 else _met.pop() if _met else None
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
    _Kind("data", "dp"), _Kind("data", "dp"), _Kind("world", WORLD, control=True), _Kind("tensor", "tp"),
    _Kind("stage", STAGE, control=True), _Kind("pipeline", "pp", control=True), _Kind("pipeline", "pp"),
    _Kind("pipeline", "pp"), _Kind("pipeline ends", ENDS, control=True),
)  # fmt: skip
# The channel of the group of all ranks, and of that of a stage.
_CONTROL, _STAGE = 2, 4
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
            process_exit.guard(self.watchdog)
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
        self.data, self.reduction, self.world, self.tensor, self.stage, self.pipeline, *directions = groups
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
        process_exit.close(self.watchdog)
        self.watchdog = None
        for group in self._groups:
            # Idempotent.
            group.close()


def _kinds(topology: Topology) -> tuple[_Kind, ...]:
    """The groups that are opened, by channel."""
    if topology.pp > 1:
        return _GROUPS
    return _GROUPS[:_STAGE] if topology.tp > 1 else _GROUPS[: _STAGE - 1]


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
    process_exit.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _after_fork() -> None:
    # The groups' destructors wait for threads that only the parent has, so a child must never run them.
    for group in list(_world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_after_fork)
