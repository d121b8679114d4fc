"""Meetings of all ranks before an engine is there, whose watchdog would look after them.

Ranks meet in the key-value store of torch's own group. A rank that has come alone says so, and ends its wait with an
error, instead of waiting in a collective for torch's time limit of half an hour or more.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from infinity.errors import DesyncError
from infinity.log import logger

# As the default of watchdog_seconds; and from when on a rank says for whom it waits.
PATIENCE_SECONDS, REMIND_SECONDS = 600.0, 20.0
_LOOK_SECONDS = 0.005
_RAISED = "raised "
# Of the next meeting, in this process.
_number = 0


@contextmanager
def all_ranks_after(call: str, advice: str) -> Iterator[None]:
    """Wait after the block until every rank has ended a block with the same `call`. Nothing to do for one rank.

    DesyncError, with `advice` of what to do, where another rank does not come, comes with another call, or has raised
    in its block.
    """
    global _number
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    store = dist.PrefixStore("infinity/meeting", _get_default_store())
    mine = f"{_number}/{dist.get_rank()}"
    try:
        yield
    except BaseException as error:
        store.set(mine, f"{_RAISED}{type(error).__name__} in {call}")
        _number += 1
        raise
    store.set(mine, call)
    try:
        found = [_said(store, rank, call, advice) for rank in range(dist.get_world_size())]
    except BaseException:
        # Whoever comes now meets nobody, and the next meeting has this number.
        store.delete_key(mine)
        raise
    _number += 1
    for rank, said in enumerate(found):
        if said != call:
            raise DesyncError(f"rank {rank} {_other(said)} where rank {dist.get_rank()} has ended {call}. {advice}")


def _said(store: dist.Store, rank: int, call: str, advice: str) -> str:
    """Wait for a rank, and return with what it has come."""
    key, began, reminded = f"{_number}/{rank}", time.monotonic(), False
    for look in itertools.count():
        if store.check([key]):
            return str(store.get(key).decode())
        waited = time.monotonic() - began
        if waited > PATIENCE_SECONDS:
            raise DesyncError(
                f"rank {dist.get_rank()} has waited {waited:.0f} s for rank {rank}, which has not come to the end of "
                f"{call}. {advice}"
            )
        if waited > REMIND_SECONDS and not reminded:
            reminded = True
            logger.warning(
                "rank %d waits for rank %d to come to the end of %s, until %.0f s are over",
                dist.get_rank(), rank, call, PATIENCE_SECONDS,
            )  # fmt: skip
        time.sleep(_LOOK_SECONDS if look < 1000 else 10 * _LOOK_SECONDS)
    raise AssertionError


def _other(said: str) -> str:
    return f"has {said}" if said.startswith(_RAISED) else f"has ended {said}"
