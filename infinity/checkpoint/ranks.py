"""Work that every rank does its part of, and that fails on every rank when it fails on one: training can go on then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from infinity.distributed.collectives import exchange_values
from infinity.distributed.process_groups import ProcessGroups
from infinity.errors import CheckpointError, InfinityError

# What a rank tells the others of its part: the error in words or None, and the value (JSON).
Outcome = list[Any]


def run_on_all_ranks(groups: ProcessGroups, name: str, job: Callable[[], Any], *, path: object) -> list[Any]:
    """Run `job` on every rank; return its values (JSON) by rank. Collective.

    Where it raises, this rank raises the same, and every other one a CheckpointError about `path` that says which rank
    failed, and why. An error of the system is a CheckpointError on this rank, too.
    """

    def exchange(outcome: Outcome) -> list[Outcome]:
        return [outcome] if groups.world.process_group is None else exchange_values(outcome, groups.world, name)

    advice = "This rank could go on, and all ranks stopped together"
    return run_and_agree(groups, job, exchange, path=path, advice=advice)


def run_and_agree(
    groups: ProcessGroups, job: Callable[[], Any], exchange: Callable[[Outcome], list[Outcome]], *, path: object,
    advice: str,
) -> list[Any]:  # fmt: skip
    """As `run_on_all_ranks`, with `exchange` to tell the outcome of this rank and return every rank's."""
    error: Exception | None = None
    value: Any = None
    try:
        value = _run(job, path)
    except Exception as caught:
        error = caught
    except BaseException as caught:
        # This process is being ended: the others must not wait for it.
        groups.failed(caught)
        raise
    rows = exchange([None if error is None else f"{type(error).__name__}: {error}", value])
    if error is not None:
        raise error
    failed = [f"rank {rank} failed with {reason}" for rank, (reason, _) in enumerate(rows) if reason is not None]
    if failed:
        raise CheckpointError(path, "; ".join(failed), advice)
    return [value for _, value in rows]


def _run(job: Callable[[], Any], path: object) -> Any:
    try:
        return job()
    except OSError as caught:
        if isinstance(caught, InfinityError):
            raise
        # One type on all ranks: a program that catches it goes on with all of them.
        raise CheckpointError(path, f"the system refused ({caught})", "Mend that, or name another folder") from caught
