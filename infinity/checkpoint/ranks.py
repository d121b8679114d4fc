"""What ranks do side by side and must all have done: when one fails, every one raises, and training can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.distributed.collectives import exchange_values
from infinity.distributed.process_groups import ProcessGroups
from infinity.errors import CheckpointError, InfinityError


def run_on_all_ranks(groups: ProcessGroups, name: str, job: Callable[[], Any], *, path: object) -> list[Any]:
    """Run `job` on every rank; its values (JSON) by rank. Collective.

    Where it raises, this rank raises the same, and every other one a CheckpointError about `path` that says which rank
    failed, and why. An error of the system is a CheckpointError on this rank, too.
    """
    error: Exception | None = None
    value: Any = None
    try:
        value = job()
    except Exception as caught:
        error = caught
        if isinstance(caught, OSError) and not isinstance(caught, InfinityError):
            # One kind on all ranks: a program that catches it goes on with all of them.
            error = CheckpointError(path, f"the system refused ({caught})", "Mend that, or name another folder")
            error.__cause__ = caught
    except BaseException as caught:
        # Somebody ends this process: the others are not to wait for it.
        groups.failed(caught)
        raise
    if groups.world.process_group is None:
        if error is not None:
            raise error
        return [value]
    said = [None if error is None else f"{type(error).__name__}: {error}", value]
    rows = exchange_values(said, groups.world, name)
    if error is not None:
        raise error
    failed = [f"rank {rank} failed with {reason}" for rank, (reason, _) in enumerate(rows) if reason is not None]
    if failed:
        raise CheckpointError(path, "; ".join(failed), "This rank could go on, and all ranks stopped together")
    return [value for _, value in rows]
