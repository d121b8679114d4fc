"""Who this rank is, and the process groups it needs.

World size 1 needs no launcher, no environment variables and no process group. With more ranks (torchrun, or a group
that the program has opened itself) gathers and reductions run in groups of their own, so that their mutual order is
free, and small decisions are exchanged through a CPU group that never waits for the device. A watchdog looks after
all three.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store, _world

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.cma_transport import Introduction, acquaint, log_transport
from infinity.distributed.hang_detection import process_exit
from infinity.distributed.hang_detection.mailbox import StoreMailbox
from infinity.distributed.hang_detection.watchdog import BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN, Watchdog
from infinity.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among all: what names files and log lines. Code that communicates is given an `AxisGroup`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1


def detect() -> Ranks:
    """Read an open process group, or the environment that torchrun sets; without both this is the only rank."""
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


def open_group(
    ranks: Ranks, *, accelerator: bool, timeout: timedelta | None = None, backend: str | None = None
) -> None:
    """Open torch.distributed's group of all ranks, where none is open; without a `timeout`, torch's own counts.

    It stays open for the next engine: ranks that close at different times would meet each other's old store.
    """
    if dist.is_initialized():
        return
    dist.init_process_group(
        backend or ("cpu:gloo,cuda:nccl" if accelerator else "gloo"),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timeout,
        # One rank alone needs nobody to meet.
        store=dist.HashStore() if ranks.world_size == 1 else None,
    )
    atexit.register(_end, os.getpid())


class ProcessGroups:
    """The groups of the axes that this rank lies on.

    world: every rank, through a process group on the CPU that never waits for the device: small decisions.
    data: the ranks that share the partitions of a unit; gathers. reduction: the same ranks in a process group of its
    own, so that reductions and gathers have no order among each other.

    At world size 1 no group has a process group, and there is no watchdog.
    """

    def __init__(
        self, ranks: Ranks, *, accelerator: bool, timeout_seconds: float, cross_memory_attach: bool = True
    ) -> None:
        """cross_memory_attach: off an accelerator ranks of one host may read each other's memory (`cma_transport`)."""
        self.ranks = ranks
        self._process = os.getpid()
        self.watchdog: Watchdog | None = None
        self._notes: Any = None
        self._timeout_seconds = timeout_seconds
        timeout = timedelta(seconds=max(timeout_seconds + BACKSTOP_SECONDS, BACKSTOP_SECONDS_MIN))
        opened: list[Any] = [None] * 3
        if ranks.world_size > 1:
            open_group(ranks, accelerator=accelerator, timeout=timeout)
            backend = "nccl" if accelerator else "gloo"
            opened = [dist.new_group(backend=name, timeout=timeout) for name in (backend, backend, "gloo")]
            self._notes = dist.PrefixStore(f"infinity/{opened[0].group_name}/", _get_default_store())
            self.watchdog = Watchdog(
                self._notes, opened, rank=ranks.rank, world_size=ranks.world_size, seconds=timeout_seconds,
            )  # fmt: skip
            process_exit.guard(self.watchdog)
        self.data, self.reduction, self.world = (
            AxisGroup(axis, ranks.rank, ranks.world_size, group, channel, self.watchdog)
            for channel, (axis, group) in enumerate(zip(("data", "data", "world"), opened, strict=True))
        )
        if ranks.world_size > 1 and not accelerator:
            self._meet(Introduction(wanted=cross_memory_attach), timeout.total_seconds())

    def _meet(self, mine: Introduction, limit_seconds: float) -> None:
        """Find the ranks of this host that can read each other's memory, and have all groups use it."""

        def tell(said: Any) -> list[Any]:
            return collectives.exchange_values(said, self.world, "introduction of ranks")

        found = acquaint(tell(mine.said), self.world.index, mine)
        # Whom each can read, and what kept it from reading the others of its host.
        answers = tell([sorted(found), mine.reason])
        mutual = {other: pid for other, pid in found.items() if self.world.index in answers[other][0]}
        log_transport(mutual, [reason for _, reason in answers])
        for group in (self.data, self.reduction, self.world):
            if mutual:
                group.read_memory_of(mutual, limit_seconds)

    def mailbox(self, topic: str) -> StoreMailbox:
        """A place where ranks leave notes for each other outside of the collectives; a topic names one for good."""
        return StoreMailbox(self._notes, topic, group=self.world, timeout_seconds=self._timeout_seconds)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """What is raised in the block is told to the ranks that wait for this one, should it not go on."""
        try:
            yield
        except BaseException as error:
            self.failed(error)
            raise

    def failed(self, error: BaseException) -> None:
        """As `telling`, for an error that has been caught. An error of a forked child is not this rank's."""
        if self.watchdog is not None and os.getpid() == self._process:
            self.watchdog.failed(error)

    def check(self) -> None:
        """Raise DesyncError when the ranks can no longer go on together."""
        if self.watchdog is not None:
            self.watchdog.end.check()

    def close(self) -> None:
        """Destroy these groups. The program's own group stays open, or ends with the process."""
        if self.watchdog is None:
            return
        process_exit.close(self.watchdog)
        self.watchdog = None
        for group in (self.data, self.reduction, self.world):
            group.close()


def _end(owner: int) -> None:
    if os.getpid() != owner:
        # A forked child ends: see `_after_fork`.
        return
    process_exit.leave()
    if dist.is_initialized():
        dist.destroy_process_group()


def _after_fork() -> None:
    # Groups are the parent's, and so are the threads that their destructors wait for: a child keeps them to its end.
    for group in list(_world.pg_map):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_after_fork)
