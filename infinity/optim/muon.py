"""Muon: a matrix is stepped by its momentum, made orthogonal.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; Liu et al., "Muon is Scalable for LLM
Training", 2025. The operations, their order and their precisions are those of `torch.optim.Muon`; elementwise ones run
in chunks, which changes no bit; products on the device that computes, wherever the momentum lives.

[Note: matrices of several ranks] Where ranks share a unit, each has a stretch of its elements, which begins and ends
anywhere in a matrix; a tensor axis leaves each rank a shard. What is elementwise, each rank does for what it has. In
between all gather the momenta of the unit in the precision of the iteration, each matrix is made orthogonal by one
rank, its owner, and each rank gets the part of the updates that belongs to what it has. An update has one owner, so
that the sum that brings it adds zeros. So the bits are those of one rank with the same gradients.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather, sum_slices
from infinity.errors import ConfigError
from infinity.memory.shard_copy import gather_shard, scatter_shard
from infinity.optim.update_rules import StepSlice, masters_of, put_masters
from infinity.plan.layout import Slice, Slot, UnitLayout, matrix_owners
from infinity.plan.types import CACHE_LINE, Kind, align_up

# Elements that are stepped at once; this bounds the fp32 copies.
_CHUNK_NUMEL = 1 << 21
_NS_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_ADJUST = (None, "original", "match_rms_adamw")


class MuonHyper(NamedTuple):
    """Hyper-parameters under torch's names."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    ns_coefficients: tuple[float, float, float]
    eps: float
    ns_steps: int
    adjust_lr_fn: str | None

    def rate(self, shape: Sequence[int]) -> float:
        """The learning rate of a matrix of this shape."""
        rows, columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return self.lr * (0.2 * math.sqrt(max(rows, columns)))
        return self.lr * math.sqrt(max(1, rows / columns))


class MuonRule:
    """An `UpdateRule` for whole matrices.

    Products run where the engine computes, in memory that the plan has set aside: `place` names both.
    """

    moments: tuple[Kind, ...] = (Kind.MOMENTUM_BUFFER,)
    names: tuple[str, ...] = ("momentum_buffer",)
    start = 0.0
    counted = False
    joins = False
    scalars = False
    guarded = False

    def __init__(self, dtype: str = "bf16") -> None:
        """dtype: of the iteration, "bf16" or "fp32"."""
        self._name, self.dtype = dtype, _NS_DTYPES[dtype]
        # Where matrices are made orthogonal, and the ranks that share units or have shards of the same ones.
        self._room: Tensor | None = None
        # The program may step what it sees while a step goes on behind it.
        self._in_use = threading.Lock()
        self._groups: tuple[AxisGroup, AxisGroup] | None = None

    def place(self, room: Tensor, data: AxisGroup, tensor: AxisGroup) -> None:
        """Make matrices orthogonal in `room` (uint8, see `plan.pools.matrix_nbytes`). data: the ranks that share units.
        tensor: those that have shards of the same ones.
        """
        self._room, self._groups = room.view(self.dtype), (data, tensor)

    def hyper(self, group: Mapping[str, Any]) -> MuonHyper:
        """See `UpdateRule.hyper`. ConfigError for a way to adjust the rate that is not known, and for another precision
        than the one that room was made for.
        """
        if (adjust := group["adjust_lr_fn"]) not in _ADJUST:
            raise ConfigError(f'param_groups: adjust_lr_fn is {adjust!r}: take None, "original" or "match_rms_adamw"')
        if (dtype := group.get("ns_dtype", self._name)) != self._name:
            raise ConfigError(f'param_groups: ns_dtype was "{self._name}" when the engine was made, and is {dtype!r}')
        a, b, c = map(float, group["ns_coefficients"])
        return MuonHyper(
            lr=float(group["lr"]), weight_decay=float(group["weight_decay"]), momentum=float(group["momentum"]),
            nesterov=bool(group["nesterov"]), ns_coefficients=(a, b, c), eps=float(group["eps"]),
            ns_steps=int(group["ns_steps"]), adjust_lr_fn=adjust,
        )  # fmt: skip

    def step(self, slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float) -> None:
        """Step whole matrices in place."""
        room = self._room
        assert room is not None
        for each, shape in (found for piece in slices for found in _by_matrix(piece)):
            own, home = room[: each.segment.numel], each.param.device
            found = own if home == room.device else own.new_empty(own.numel(), device=home)
            with self._in_use:
                _direct(each, found, grad_scale, grad_bound)
                if found is not own:
                    own.copy_(found)
                update = orthogonal(room, shape, each.hyper)
                _apply(each, shape, update if found is own else found.copy_(update))

    def step_together(
        self, layout: UnitLayout, piece: Slice, parts: int, stepped: Mapping[str, MuonHyper],
        slices: Sequence[StepSlice], *, grad_scale: float, grad_bound: float,
    ) -> None:  # fmt: skip
        """Step what this rank has of a unit's matrices in place. Collective, also for a rank that has nothing. See
        [Note: matrices of several ranks].

        piece: all of this rank's partition, one of `parts`, or, if that is the unit's only one, whole parameters of it.
        stepped: by name, the parameters of the unit that are stepped, on every rank alike.
        """
        assert self._room is not None and self._groups is not None
        room, (data, tensor) = self._room, self._groups
        if not stepped:
            return
        home = slices[0].param.device if slices else room.device
        own = torch.zeros(piece.numel, dtype=self.dtype, device=home)
        for each in slices:
            at = slice(each.segment.start, each.segment.start + each.segment.numel)
            _direct(each, own[at], grad_scale, grad_bound)
        sharing = [*([data] if parts > 1 else []), *([tensor] if layout.is_cut else [])]
        full, ranks, mine = own.to(room.device), 1, 0
        for group in sharing:
            part, full = full, full.new_empty(group.size * full.numel())
            all_gather(full, part, group, f"momenta of {layout.name}").wait()
            mine, ranks = mine + ranks * group.index, ranks * group.size
        # By index on the tensor axis, if it cuts the unit.
        rows, begin = full.view(tensor.size if layout.is_cut else 1, -1), 0 if parts > 1 else piece.start
        matrices = [(slot, *matrix) for slot in layout.slots for matrix in slot.matrices()]
        for (slot, start, shape), owner in zip(matrices, matrix_owners(layout, ranks), strict=True):
            first = slot.offset + start - begin
            if 0 <= first < rows.shape[1]:
                at = slice(first, first + min(slot.numel, math.prod(shape)))
                hyper = stepped.get(slot.name)
                if hyper is not None and owner == mine:
                    with self._in_use:
                        _put_together(rows[:, at], slot, room)
                        _take_apart(orthogonal(room, shape, hyper), slot, rows[:, at])
                else:
                    rows[:, at].zero_()
        updates = full
        for group in reversed(sharing):
            updates = sum_slices(updates, group, f"updates of {layout.name}")
        updates = updates.to(home)
        for each, shape in (found for piece in slices for found in _by_matrix(piece)):
            _apply(each, shape, updates[each.segment.start : each.segment.start + each.segment.numel])

    def parameter_scalars(self, steps: Mapping[str, int]) -> dict[str, dict[str, Any]]:
        """Return nothing: the momentum is all that is kept."""
        return {}

    def load_parameter_scalars(self, scalars: Mapping[str, Mapping[str, Any]], steps: Mapping[str, int]) -> None:
        """Do nothing."""


def orthogonal(room: Tensor, shape: Sequence[int], hyper: MuonHyper) -> Tensor:
    """Return nearly the orthogonal factor of the matrix of this shape that lies flat at the beginning of `room`, by the
    Newton-Schulz iteration. The result lies in `room`, too, which is as large as `plan.pools.matrix_nbytes` says.

    Each operand begins on a cache line, as torch's do: the bits of a product may depend on that.
    """
    rows, columns = shape
    tall, short, numel = rows > columns, min(shape), rows * columns
    wide, square, at, pieces = (short, max(shape)), (short, short), 0, list[Tensor]()
    for each in (wide, wide, square, square):
        pieces.append(room[at : at + math.prod(each)].view(each))
        at += align_up(math.prod(each), CACHE_LINE // room.itemsize)
    spare, other, gram, polynomial = pieces
    a, b, c = hyper.ns_coefficients
    matrix = room[:numel].view(rows, columns)
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=hyper.eps))
    for _ in range(hyper.ns_steps):
        torch.mm(x, x.T, out=gram)
        torch.addmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        torch.addmm(x, polynomial, x, beta=a, out=other)
        x, other, spare = other, spare, other
    return other.view(rows, columns).copy_(x.T).view(-1) if tall else x.view(-1)


def _put_together(rows: Tensor, slot: Slot, room: Tensor) -> None:
    """Write the matrix of which each row [n] is a shard to the beginning of `room`."""
    if slot.shard is None or len(rows) == 1:
        room[: rows.shape[1]].copy_(rows[0])
        return
    for index, row in enumerate(rows):
        scatter_shard(row, 0, slot.whole_shape, slot.shard.dim, slot.shard.ranges(index), room, 0)


def _take_apart(matrix: Tensor, slot: Slot, rows: Tensor) -> None:
    """Write each shard of a matrix, flat, to its row [n]."""
    if slot.shard is None or len(rows) == 1:
        rows[0].copy_(matrix)
        return
    for index, row in enumerate(rows):
        gather_shard(matrix, 0, slot.whole_shape, slot.shard.dim, slot.shard.ranges(index), 0, row)


def _by_matrix(piece: StepSlice) -> Iterator[tuple[StepSlice, tuple[int, int]]]:
    """What a segment has of each of its parameter's matrices, and the matrix's shape."""
    segment = piece.segment
    assert segment.overlap is not None
    slot, first = segment.overlap.slot, segment.overlap.slot_start
    for start, shape in slot.matrices():
        begin = max(start - first, 0)
        end = min(start - first + min(slot.numel, math.prod(shape)), segment.numel)
        if begin < end:
            at, kept = slice(begin, end), (piece.remainder, piece.master)
            remainder, master = (None if each is None else each[at] for each in kept)
            own = segment._replace(start=segment.start + begin, numel=end - begin)
            moments = [moment[at] for moment in piece.moments]
            yield StepSlice(own, piece.hyper, piece.param[at], piece.grad[at], moments, remainder, master), shape


def _chunks(piece: StepSlice) -> Iterator[slice]:
    for begin in range(0, piece.segment.numel, _CHUNK_NUMEL):
        yield slice(begin, min(begin + _CHUNK_NUMEL, piece.segment.numel))


def _direct(piece: StepSlice, out: Tensor, grad_scale: float, grad_bound: float) -> None:
    """Update the momentum, and write the direction that it gives to `out` [numel], in the iteration's precision."""
    (momentum,), weight = piece.moments, piece.hyper.momentum
    for at in _chunks(piece):
        grad = piece.grad[at].float()
        if grad_scale != 1.0:
            grad = grad * grad_scale
        if math.isfinite(grad_bound):
            grad = grad.clamp(-grad_bound, grad_bound)
        kept = momentum[at].lerp_(grad, 1 - weight)
        out[at] = grad.lerp(kept, weight) if piece.hyper.nesterov else kept


def _apply(piece: StepSlice, shape: Sequence[int], update: Tensor) -> None:
    """Step the masters of a matrix of this shape by an update [numel]."""
    lr, decay = piece.hyper.lr, piece.hyper.weight_decay
    rate = piece.hyper.rate(shape)
    for at in _chunks(piece):
        masters = masters_of(piece, at)
        masters.mul_(1 - lr * decay).add_(update[at], alpha=-rate)
        put_masters(piece, at, masters)
