"""Checks that all ranks do the same: of the model and its plan at the start, of the collectives and of the numbers that
a step takes (rates, decays, clipping) at every step.

gloo never mixes different collectives ([Note: tags] in `axis_group`). With another backend, two ranks that gather
different units of one size do not hang: each gets parts of both. So every step compares a digest of all that was
submitted before it changes a weight.

Work that every rank does its part of, and that fails on every rank when it fails on one: training can go on then.

Ranks of a tensor group, and of a pipeline, compute one batch together: the program must give them the same.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import exchange, exchange_texts, exchange_values
from infinity.distributed.flight_record import advice_for, first_difference
from infinity.distributed.groups import ProcessGroups
from infinity.errors import CheckpointError, ConfigError, DesyncError, InfinityError
from infinity.plan.plan import Plan

# Lines of a difference that an error shows.
_SHOWN_MAX = 64


def agree_on_plan(plan: Plan, group: AxisGroup, world: AxisGroup) -> None:
    """Raise DesyncError on every rank unless all have the same plan of the same parameters in one order, or where a
    pipeline cuts the model, all of a stage (`group`), and all ranks (`world`) one cut and one schedule. Collective.
    """
    _agree_on_stages(plan, world)
    if group.process_group is None:
        return
    heard = exchange_texts(plan.fingerprint(), group, "exchange of plans")
    if len(set(heard)) == 1:
        return
    parameters = [
        f"{slot.name} {list(slot.shape)} {layout.dtype}, {'trained' if layout.trainable else 'frozen'}"
        for layout in plan.layouts
        for slot in layout.slots
    ]
    everyone = exchange_texts("\n".join(parameters), group, "exchange of parameter names")
    listed = [dict(enumerate(text.split("\n"))) for text in everyone]
    found = first_difference(listed)
    if found is None:
        raise DesyncError(
            "the ranks' models are the same but their plans differ: give initialize() the same configuration, the same "
            f"groups of parameters and the same offload on every rank (fingerprints: {', '.join(heard)})"
        )
    number, names = found
    place = group.watchdog.channels.place if group.watchdog is not None else str
    lines = "\n".join(
        f"  rank {place(rank)}: {name}" for rank, name in zip(group.members, names[:_SHOWN_MAX], strict=False)
    )
    raise DesyncError(
        f"the ranks have different models; parameter {number} is the first that differs:\n{lines}\n"
        "Build the same modules in the same order on every rank."
    )


def agree_on_numbers(
    values: list[float], group: AxisGroup, name: str, *, alike: Sequence[tuple[str, object]] = ()
) -> list[list[float]]:
    """Return every rank's numbers, by rank, as `exchange` does; DesyncError if ranks have submitted different things,
    or if what must be `alike` (by name; its `repr` counts) differs.

    Compares the digests of both in the same collective.
    """
    mine = group.watchdog.log.digests() if group.watchdog is not None else []
    said = float(zlib.crc32(repr(alike).encode()))
    rows = exchange([*values, said, *mine], group, name)
    _agree_on_history([row[len(values) + 1 :] for row in rows], group)
    if len({row[len(values)] for row in rows}) > 1:
        raise _different(alike, group)
    return [row[: len(values)] for row in rows]


class Vetoed(InfinityError):
    """Raised on all ranks by `Veto.ask` where one has objected; `said` is the number that it gave."""

    def __init__(self, said: float) -> None:
        super().__init__(f"a rank has objected: {said:g}")
        self.said = said


class Veto:
    """Lets one rank stop all of them. If it raised by itself, the others would wait for it in their next collective;
    so it objects, with a number for them, and all raise in front of that collective.
    """

    def __init__(self, group: AxisGroup, name: str) -> None:
        self._group, self._name = group, name
        self._mine: float | None = None

    def object(self, said: float) -> None:
        """This rank objects when it is asked next."""
        self._mine = said

    def ask(self, before: str) -> None:
        """Vetoed, on all ranks, if one of them has objected. `before`: what all are about to do. Collective."""
        numbers = [float(self._mine is not None), self._mine or 0.0]
        for objects, said in agree_on_numbers(numbers, self._group, f"{self._name} before {before}"):
            if objects:
                raise Vetoed(said)


def _different(mine: Sequence[tuple[str, object]], group: AxisGroup) -> DesyncError:
    """Return the error for ranks whose values differ: it names the first of them, with every rank's. Collective."""
    everyone = exchange_values({name: repr(value) for name, value in mine}, group, "exchange of what differs")
    names = dict.fromkeys(name for row in everyone for name in row)
    name = next(name for name in names if len({row.get(name) for row in everyone}) > 1)
    place = group.watchdog.channels.place if group.watchdog is not None else str
    lines = "\n".join(
        f"  rank {place(rank)}: {row.get(name, 'none')}"
        for rank, row in zip(group.members, everyone[:_SHOWN_MAX], strict=False)
    )
    return DesyncError(
        f"the ranks have different numbers for this step, so it is not taken; the first that differs is {name}:\n"
        f"{lines}\nSet it alike on every rank, and call engine.zero_grad()"
    )


def on_any_rank(mine: Sequence[bool], group: AxisGroup, name: str) -> list[bool]:
    """Return for each flag whether it is true on any rank. The list has one length on every rank. Collective."""
    rows = exchange([float(flag) for flag in mine], group, name)
    return [any(row[index] for row in rows) for index in range(len(mine))]


def _agree_on_stages(plan: Plan, group: AxisGroup) -> None:
    """Raise DesyncError on every rank unless the ranks of all stages have one cut and one schedule. Collective."""
    if plan.topology.pp == 1 or plan.pipeline is None:
        return
    split = plan.pipeline.split
    said = f"{split.schedule}, {split.micro_batches} micro-batches, blocks of each stage {list(split.cut.counts)}"
    detail = hashlib.sha256(repr(split).encode()).hexdigest()[:16]
    heard = exchange_texts(f"{said} ({detail})", group, "exchange of stages")
    if len(set(heard)) > 1:
        place = group.watchdog.channels.place if group.watchdog is not None else str
        lines = "\n".join(
            f"  rank {place(rank)}: {text}" for rank, text in zip(group.members, heard[:_SHOWN_MAX], strict=False)
        )
        raise DesyncError(
            f"the ranks have cut the model into different stages:\n{lines}\nGive initialize() the same model and the "
            "same configuration on every rank."
        )


def _agree_on_history(rows: Sequence[Sequence[float]], group: AxisGroup) -> None:
    """Raise DesyncError on every rank unless ranks that share a channel have equal digests of it (`rows`, by rank).
    Collective.
    """
    watchdog, index_of = group.watchdog, {rank: index for index, rank in enumerate(group.members)}
    if watchdog is None:
        return
    shared = [
        [[rank for rank in members if rank in index_of] for members in watchdog.channels.groups(channel)]
        for channel in range(len(watchdog.channels.axes))
    ]
    if all(
        len({rows[index_of[rank]][channel] for rank in members}) < 2
        for channel, groups in enumerate(shared) for members in groups
    ):  # fmt: skip
        return
    told = []
    for done, groups in zip(watchdog.log.histories(), shared, strict=True):
        everyone = [
            {int(number): name for number, name in row.items()}
            for row in exchange_values(done, group, "exchange of what was done")
        ]
        for members in groups:
            found = first_difference([everyone[index_of[rank]] for rank in members])
            if found is not None:
                number, names = found
                told += [
                    f"  rank {watchdog.channels.place(rank)}: {name} (number {number})"
                    for rank, name in zip(members, names[:_SHOWN_MAX], strict=False)
                ]
    lines = "\n".join(told)
    raise DesyncError(
        f"the ranks did different things since the last step, so this one is not taken:\n{lines}\n"
        f"{advice_for(watchdog.channels)}"
    )


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


# Bytes of a tensor that are compared.
_COMPARED_NBYTES = 1 << 20


def check_same_batch(args: Sequence[Any], kwargs: Mapping[str, Any], group: AxisGroup) -> None:
    """Raise ConfigError on every rank unless all ranks of the group have the same tensors among the arguments of a
    forward. Collective. Compares shapes, dtypes and the first MiB of each.
    """
    named = {**{f"argument {index}": value for index, value in enumerate(args)}, **kwargs}
    mine = {name: _digest(value) for name, value in named.items() if isinstance(value, Tensor)}
    everyone = exchange_values(mine, group, "exchange of digests of a batch")
    names = {name: None for each in everyone for name in each}
    apart = [name for name in names if len({each.get(name) for each in everyone}) > 1]
    if apart:
        raise ConfigError(
            f"the {group.size} ranks of a {group.axis} group were given different batches ({', '.join(apart)}): "
            f"{', '.join(group.places)}. They compute one batch together. Divide the data set over the data axis: rank "
            "engine.data_rank of engine.data_size (a DistributedSampler takes both), or let "
            "initialize(training_data=...) do it"
        )


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().reshape(-1)
    head = flat[: max(_COMPARED_NBYTES // flat.dtype.itemsize, 1)].cpu().contiguous()
    return f"{tuple(tensor.shape)} {tensor.dtype} {zlib.crc32(head.view(torch.uint8).numpy().data)}"
