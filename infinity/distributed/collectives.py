"""The collectives that ZeRO needs, under one name for every supported torch, on flat tensors of the group's device.

Each call has a name that errors show, such as "gather of layers.1". The n-th collective of a group must have the same
name and size on every rank. If it has not, gloo's ranks wait until the watchdog raises: [Note: tags] in `axis_group`.

[Note: staged collectives] gloo moves bytes of CPU memory. Where an accelerator has no collectives of its own, its
tensors are copied to CPU memory, sent from there, and copied back in `wait`, in the stream that is then the current
one. The host stops for the first copy. A sum over ranks stays in CPU memory, where its pieces are asked for.

torch 2.13 renamed the two single-tensor collectives and warns about the old names; 2.11 has the old names only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from infinity.base import trace
from infinity.base.transfer import Transfer
from infinity.distributed.axis_group import DATA, MEETING, PLACE, TAKEN, AxisGroup, CollectiveTransfer

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Elements that are summed at a time, so that two or more rows of them stay in a core's cache.
_SUM_NUMEL = 1 << 16
# Up to here a sum over more than two ranks is exchanged whole, because rounds take longer than bytes.
_WHOLE_NBYTES = 1 << 16


class _Works:
    """Several works, waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def all_gather(full: Tensor, partition: Tensor, group: AxisGroup, name: str = "gather") -> Transfer:
    """Gather every member's partition [numel / size] into `full` [numel]; returns at once.

    `partition` may be the view of its place in `full`. With gloo every rank sends its partition to each other rank,
    instead of round a ring on one thread as gloo's own does; that took a third of the time. Ranks of one host read it
    from each other's memory (see `cma_transport`).
    """
    members = group.process_group
    if _needs_staging(full, members):
        arrived = torch.empty(full.shape, dtype=full.dtype, device="cpu")
        return _Staged(all_gather(arrived, partition.cpu(), group, name), full, arrived)
    if not _is_gloo(members) or not partition.numel():
        return group.start(
            name,
            lambda tag: _all_gather(full, partition, group=members, async_op=True),
            keep=(full, partition),
            nbytes=full.nbytes,
        )
    return group.start(
        name, lambda tag: _send_to_all(full, partition, group, tag), keep=(full, partition), nbytes=full.nbytes
    )


class _Staged:
    """A collective that gloo made in CPU memory for tensors of an accelerator. See [Note: staged collectives]."""

    def __init__(self, moving: Transfer, target: Tensor, arrived: Tensor) -> None:
        self._moving = moving
        self._copy: tuple[Tensor, Tensor] | None = target, arrived

    def done(self) -> bool:
        return self._moving.done()

    def wait(self) -> None:
        self._moving.wait()
        if self._copy is not None:
            (target, arrived), self._copy = self._copy, None
            target.copy_(arrived)


def _needs_staging(tensor: Tensor, members: Any) -> bool:
    return _is_gloo(members) and not tensor.is_cpu


def _send_to_all(full: Tensor, partition: Tensor, group: AxisGroup, tag: int) -> _Works:
    rows = full.view(group.size, -1)
    if rows[group.index].data_ptr() != partition.data_ptr():
        rows[group.index].copy_(partition)
    return _swap(rows, [partition] * len(rows), group, tag)


def _swap(rows: Sequence[Tensor] | Tensor, parts: Sequence[Tensor] | Tensor, group: AxisGroup, tag: int) -> _Works:
    """Receive a row from each other rank and send it its part.

    Each rank begins with its next neighbour, so that not all send to the same rank at once.
    """
    members, reader = group.process_group, group.reader
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    near = [other for other in others if reader is not None and reader.reads(other, rows[other])]
    far = [other for other in others if other not in near]
    works: list[Any] = [dist.irecv(rows[other], group=members, group_src=other, tag=DATA | tag) for other in far]
    works += [dist.isend(parts[other], group=members, group_dst=other, tag=DATA | tag) for other in far]
    if reader is not None and near:
        works.append(reader.swap(rows, parts, near, place_tag=PLACE | tag, taken_tag=TAKEN | tag))
    return _Works(works)


def _is_gloo(members: Any) -> bool:
    return bool(dist.get_backend(members) == "gloo")


class Reduction(Protocol):
    """A sum over ranks in flight; this rank gets its slice of it."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...

    def sums(self) -> Iterator[tuple[int, Tensor]]:
        """Yield this rank's slice of the sum in pieces, each with the index of its first element in the slice.

        Call it once, after `wait`. A piece is valid until the next one is asked for.
        """

    def leave_in(self, target: Tensor) -> None:
        """Write this rank's slice of the sum into `target`, in its dtype. Call it after `wait`, instead of `sums`."""


class _Moving:
    """The transfer that every reduction waits for."""

    def __init__(self, moving: CollectiveTransfer) -> None:
        self._moving = moving

    def done(self) -> bool:
        return self._moving.done()

    def wait(self) -> None:
        self._moving.wait()


class _Summed(_Moving):
    """A reduction whose sum the backend leaves in one tensor."""

    def __init__(self, moving: CollectiveTransfer, mine: Tensor) -> None:
        super().__init__(moving)
        self._mine = mine

    def sums(self) -> Iterator[tuple[int, Tensor]]:
        yield 0, self._mine

    def leave_in(self, target: Tensor) -> None:
        if target is not self._mine:
            target.copy_(self._mine)


class _Exchanged(_Moving):
    """A reduction for which ranks exchange slices; `rows` are those for this rank, its own included, by rank."""

    def __init__(self, moving: CollectiveTransfer, rows: Sequence[Tensor]) -> None:
        super().__init__(moving)
        self._rows = rows

    def sums(self) -> Iterator[tuple[int, Tensor]]:
        rows, self._rows = self._rows, ()
        for begin in range(0, rows[0].numel(), _SUM_NUMEL):
            yield begin, _add_up([row[begin : begin + _SUM_NUMEL] for row in rows])

    def leave_in(self, target: Tensor) -> None:
        if len(self._rows) == 2 and target.dtype == self._rows[0].dtype and target.is_cpu:
            # One pass over the memory instead of two.
            rows, self._rows = self._rows, ()
            torch.add(*rows, out=target)
            return
        for begin, piece in self.sums():
            target[begin:][: piece.numel()].copy_(piece)


def _add_up(rows: Sequence[Tensor]) -> Tensor:
    """Return the sum of two or more rows, in their order; shorter types are summed in fp32 and rounded once."""
    first, second, *others = rows
    if not others:
        return first + second
    total = first.to(torch.promote_types(first.dtype, torch.float32)) + second
    for row in others:
        total += row
    return total.to(first.dtype)


def reduce_scatter(
    full: Tensor, *, group: AxisGroup, mine: Tensor | None = None, workspace: Tensor | None = None,
    name: str = "reduction",
) -> Reduction:  # fmt: skip
    """Sum `full` [numel] over the group; this rank gets its slice [numel / size]. Returns at once.

    `full` is not changed. The caller must not change any of the tensors until it has taken the sums.

    mine: [numel / size]; a backend with a reduction of its own (NCCL) leaves the slice there.
    workspace: [numel - numel / size]; gloo receives the slices of other ranks there.
    Each is allocated if it is needed and absent.

    gloo's own reduce-scatter runs an all-reduce of everything: twice the bytes, and a copy. Here ranks exchange slices,
    and each sums those that it has received, in the order of ranks, in pieces that fit a cache.
    """
    members = group.process_group
    ranks = group.size
    if _needs_staging(full, members):
        return reduce_scatter(full.cpu(), group=group, name=name)
    if not _is_gloo(members):
        own = full.new_empty(full.numel() // ranks) if mine is None else mine
        return _Summed(
            group.start(
                name,
                lambda tag: _reduce_scatter(own, full, op=dist.ReduceOp.SUM, group=members, async_op=True),
                keep=(full, own),
                nbytes=full.nbytes,
            ),
            own,
        )
    received = full.new_empty(full.numel() - full.numel() // ranks) if workspace is None else workspace
    slices, arriving = full.view(ranks, -1), iter(received.view(ranks - 1, -1))
    rows = [row if index == group.index else next(arriving) for index, row in enumerate(slices)]
    moving = group.start(name, lambda tag: _swap(rows, slices, group, tag), keep=(full, received), nbytes=full.nbytes)
    return _Exchanged(moving, rows)


def all_to_all(rows: Tensor, parts: Tensor, group: AxisGroup, name: str = "exchange of parts") -> Transfer:
    """Send row r of `parts` [size, numel] to member r, and receive its row for this rank in row r of `rows`; returns at
    once.
    """
    members = group.process_group
    if _needs_staging(rows, members):
        arrived = torch.empty(rows.shape, dtype=rows.dtype, device="cpu")
        return _Staged(all_to_all(arrived, parts.cpu(), group, name), rows, arrived)
    if not _is_gloo(members):
        return group.start(
            name, lambda tag: dist.all_to_all_single(rows, parts, group=members, async_op=True), keep=(rows, parts),
            nbytes=rows.nbytes,
        )  # fmt: skip
    rows[group.index].copy_(parts[group.index])
    return group.start(name, lambda tag: _swap(rows, parts, group, tag), keep=(rows, parts), nbytes=rows.nbytes)


class _AfterMeeting:
    """A collective of gloo's own. It begins in `wait`, once all ranks have met: see [Note: tags] in `axis_group`."""

    def __init__(self, submit: Callable[[], Any], group: AxisGroup, tag: int) -> None:
        self._submit = submit
        self._group, self._tag = group, tag

    def wait(self) -> None:
        _meet(self._group, MEETING | self._tag)
        self._submit().wait()

    def is_completed(self) -> bool:
        return False


def _meet(group: AxisGroup, tag: int) -> None:
    """Return once every rank has called this with the same tag: a barrier.

    Dissemination barrier (Hensgen, Finkel and Manber, 1988): in each of log2(size) rounds a rank hears from one that is
    twice as far away as in the round before, and so of all ranks that this one has heard of.
    """
    members, index, size = group.process_group, group.index, group.size
    distance, nothing = 1, torch.zeros(1, dtype=torch.uint8, device="cpu")
    while distance < size:
        works: list[Any] = [dist.irecv(nothing.clone(), group=members, group_src=(index - distance) % size, tag=tag)]
        works.append(dist.isend(nothing, group=members, group_dst=(index + distance) % size, tag=tag))
        _Works(works).wait()
        distance *= 2


def _whole(tensor: Tensor, submit: Callable[[Tensor], Any], group: AxisGroup, name: str) -> Transfer:
    """Submit a collective of the backend's own on one tensor."""
    members = group.process_group
    if _needs_staging(tensor, members):
        arrived = tensor.cpu()
        return _Staged(_whole(arrived, submit, group, name), tensor, arrived)
    gloo = _is_gloo(members)
    return group.start(
        name, lambda tag: _AfterMeeting(partial(submit, tensor), group, tag) if gloo else submit(tensor),
        keep=(tensor,), nbytes=tensor.nbytes,
    )  # fmt: skip


def all_reduce(tensor: Tensor, group: AxisGroup, name: str = "sum") -> Transfer:
    """Sum `tensor` over the group, in place. gloo sums in `wait`, so wait for one before you start the next."""
    members = group.process_group
    return _whole(
        tensor, lambda values: dist.all_reduce(values, op=dist.ReduceOp.SUM, group=members, async_op=True), group, name
    )


def sum_in_order(tensor: Tensor, group: AxisGroup, name: str = "sum") -> Tensor:
    """Sum `tensor` (contiguous) over the group, in place; every member gets the same bits. Blocks. Returns `tensor`.

    Types of 16 bits are summed in fp32 and rounded once. gloo's members, and those of another back end that are three
    or more with 16 bits, are added in the order of their indices: two members, or small tensors, are exchanged whole,
    in one round; of others each member sums a slice, and slices are gathered.
    """
    members, flat = group.process_group, tensor.view(-1)
    if members is None or not flat.numel():
        return tensor
    if _needs_staging(tensor, members):
        return tensor.copy_(sum_in_order(tensor.cpu(), group, name))
    if not _is_gloo(members) and (group.size == 2 or flat.dtype.itemsize > 2):
        all_reduce(flat, group, name).wait()
    elif group.size == 2 or flat.nbytes <= _WHOLE_NBYTES:
        _sum_whole(flat, group, name)
    else:
        _sum_by_slices(flat, group, name)
    return tensor


def _sum_whole(flat: Tensor, group: AxisGroup, name: str) -> None:
    """Sum `flat` in place from every member's copy."""
    received = flat.new_empty((group.size, flat.numel()))
    if _is_gloo(group.process_group):
        rows = [flat if index == group.index else row for index, row in enumerate(received)]
        parts = [flat] * group.size
        group.start(
            name, lambda tag: _swap(rows, parts, group, tag), keep=(flat, received), nbytes=flat.nbytes
        ).wait()
    else:
        all_gather(received.view(-1), flat, group, name).wait()
        rows = list(received)
    _add_into(flat, rows)


def _sum_by_slices(flat: Tensor, group: AxisGroup, name: str) -> None:
    """Sum `flat` in place: every member sums a slice of all copies, and slices are gathered."""
    padded = flat
    if flat.numel() % group.size:
        padded = flat.new_zeros(flat.numel() + -flat.numel() % group.size)
        padded[: flat.numel()] = flat
    all_gather(padded, sum_slices(padded, group, name), group, name).wait()
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def sum_slices(full: Tensor, group: AxisGroup, name: str = "sum") -> Tensor:
    """Sum `full` [numel] over the group; return this member's slice [numel / size]. Blocks.

    `full` is not changed. Types of 16 bits are summed in fp32, in the order of members, and rounded once.
    """
    mine = full.new_empty(full.numel() // group.size)
    if _is_gloo(group.process_group) or group.size == 2 or full.dtype.itemsize > 2:
        reduction = reduce_scatter(full, group=group, mine=mine, name=name)
        reduction.wait()
        reduction.leave_in(mine)
        return mine
    received = torch.empty_like(full)
    group.start(
        name,
        lambda tag: dist.all_to_all_single(received, full, group=group.process_group, async_op=True),
        keep=(full, received), nbytes=full.nbytes,
    ).wait()  # fmt: skip
    _add_into(mine, list(received.view(group.size, -1)))
    return mine


def _add_into(target: Tensor, rows: Sequence[Tensor]) -> None:
    """Write the sum of two or more rows, one of which may be `target`, in their order."""
    if len(rows) == 2:
        torch.add(*rows, out=target)
        return
    for begin in range(0, target.numel(), _SUM_NUMEL):
        target[begin:][:_SUM_NUMEL] = _add_up([row[begin:][:_SUM_NUMEL] for row in rows])


def broadcast(tensor: Tensor, group: AxisGroup, source: int = 0, name: str = "broadcast") -> None:
    """Copy the `tensor` of the group's member `source` (an index in the group) to every member. Blocks."""
    members = group.process_group
    _whole(
        tensor, lambda values: dist.broadcast(values, group_src=source, group=members, async_op=True), group, name
    ).wait()


def broadcast_to_all(tensor: Tensor, source: int) -> None:
    """Copy the `tensor` (on any device) of rank `source` to every rank, in torch's own group of all ranks, if that is
    open. Blocks.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A group of NCCL's alone moves no CPU memory.
    device = tensor.device
    if device.type == "cpu" and "gloo" not in dist.get_backend_config():
        device = torch.accelerator.current_accelerator() or device
    values = tensor.to(device).contiguous()
    dist.broadcast(values, src=source)
    if values.data_ptr() != tensor.data_ptr():
        tensor.copy_(values)


def _small_place(group: AxisGroup) -> torch.device:
    """Where numbers lie that a group sends: on the CPU, or on the device where its back end knows that alone (NCCL)."""
    device = torch.accelerator.current_accelerator() if group.process_group is not None else None
    return torch.device("cpu") if device is None or _is_gloo(group.process_group) else device


def exchange(
    values: list[float], group: AxisGroup, name: str = "exchange of numbers"
) -> list[list[float]]:
    """Return every member's list of numbers (float64, of one length), by index. Blocks; meant for small decisions."""
    if group.process_group is None:
        return [values]
    place = _small_place(group)
    mine = torch.tensor(values, dtype=torch.float64, device=place)
    everyone = torch.empty(group.size * len(values), dtype=torch.float64, device=place)
    with trace.span(trace.WAIT, "other ranks", nbytes=everyone.nbytes):
        all_gather(everyone, mine, group, name).wait()
    return everyone.view(group.size, len(values)).tolist()


def exchange_texts(text: str, group: AxisGroup, name: str = "exchange of texts") -> list[str]:
    """Return every member's text, of any length, by index. Blocks."""
    place = _small_place(group)
    mine = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(place)
    sizes = [int(row[0]) for row in exchange([float(mine.numel())], group, name)]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device=place)
    padded[: mine.numel()] = mine
    everyone = torch.empty(group.size * max(sizes), dtype=torch.uint8, device=place)
    all_gather(everyone, padded, group, name).wait()
    rows = everyone.view(group.size, -1)
    return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]


def exchange_values(value: Any, group: AxisGroup, name: str = "exchange of values") -> list[Any]:
    """Return every member's value, by index. Blocks. As JSON: tuples come back as lists, keys as strings."""
    return [json.loads(text) for text in exchange_texts(json.dumps(value), group, name)]
