"""Meetings of all ranks before an engine is there, whose watchdog would look after them.

Ranks meet in the key-value store of torch's own group. A rank that has come alone says so, and ends its wait with an
error, instead of waiting in a collective for torch's time limit of half an hour or more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from infinity.distributed.process_groups import Ranks, detect, job_store, leave_store
from infinity.errors import DesyncError
from infinity.log import logger

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
            raise DesyncError(f"rank {rank} {_other(said)} where rank {ranks.rank} has ended {call}. {advice}")


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


def _other(said: str) -> str:
    return f"has {said}" if said.startswith(_RAISED) else f"has ended {said}"
