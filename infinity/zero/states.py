"""A parameter's states as whole tensors, from whatever tiers and ranks hold them: `infinity.state`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from infinity.errors import StateError
from infinity.memory.shard_copy import load_masters, store_masters
from infinity.ops.codes import decoded
from infinity.plan.layout import Slice, Slot, states_of
from infinity.plan.types import ADAM_MOMENTS, BLOCK_NUMEL, CODED_MOMENTS, Key, Kind
from infinity.zero.access import ParamAccess, pass_along, put_together, rows_of_ranks, take_own, units_of
from infinity.zero.parameter import is_elsewhere, name_of, whole_of
from infinity.zero.unit import Unit


def _property(kind: str, what: str) -> property:
    """Return a property that gathers a kind of state on read and scatters it on assignment."""

    def get(self: ParameterState) -> Tensor:
        return self.full(kind)

    def replace(self: ParameterState, value: Tensor) -> None:
        self.set_full(kind, value)

    return property(get, replace, doc=what)


class ParameterState:
    """One parameter's full states, wherever tiers and ranks hold them.

    `master`, `grad` and the optimizer's states, by torch's names (`exp_avg`, `momentum_buffer`, ...), gather on read
    (fp32 CPU tensors of the whole parameter's shape, the same on every rank) and scatter on assignment. Collective. A
    frozen parameter has only `master`. `local` and `set_local` access this rank's elements only and are not collective.
    Of moments in 8 bits, `state1` and `state2` are codes (uint8), `absmax1` and `absmax2` ([blocks] fp32) their scales;
    `exp_avg` and `exp_avg_sq` are computed from them, and are read only.

    The whole parameter is the model's: where the tensor axis leaves this rank a shard, all shards are put together, and
    where ranks of other stages of a pipeline have it, they send it.
    """

    def __init__(self, param: nn.Parameter) -> None:
        owner = param.__dict__.get("_infinity_access")
        if owner is None:
            raise StateError(
                "infinity.state: this parameter belongs to no engine; pass it to infinity.initialize() first"
            )
        self._owner: ParamAccess = owner
        # One part, or one for each tile of the parameter, in the order of its elements; none where others have it.
        self._parts = [] if is_elsewhere(param) else [
            _Part(owner, unit, each, slot)
            for unit in units_of(owner, [param])
            for each, slot in zip(unit.params, unit.layout.slots, strict=True)
            if whole_of(each) is param
        ]
        self._param = owner.params[self._parts[0].slot.name if self._parts else name_of(param)]

    @property
    def trainable(self) -> bool:
        """Whether it has gradients and moments."""
        return self._param.trainable

    @property
    def name(self) -> str:
        """The parameter's name in the model."""
        return self._param.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self._param.shape

    master = _property("master", "The fp32 master weight.")
    grad = _property("grad", "The accumulated gradient, averaged and unscaled, before clipping; zeros after a step.")
    exp_avg = _property("exp_avg", "The first moment of Adam, NAdam, Adamax and Lion.")
    exp_avg_sq = _property("exp_avg_sq", "The second moment of Adam and NAdam.")
    exp_inf = _property("exp_inf", "The infinity norm that Adamax keeps.")
    momentum_buffer = _property("momentum_buffer", "The momentum of SGD, RMSprop and Muon.")
    sum = _property("sum", "The sum of squares that Adagrad keeps.")
    square_avg = _property("square_avg", "The second moment of RMSprop.")
    grad_avg = _property("grad_avg", "The first moment of centred RMSprop.")
    state1 = _property("state1", "The codes of the first moment of AdamW8bit.")
    state2 = _property("state2", "The codes of the second moment of AdamW8bit.")
    absmax1 = _property("absmax1", "The scales of the first moment of AdamW8bit.")
    absmax2 = _property("absmax2", "The scales of the second moment of AdamW8bit.")

    def full(self, kind: str) -> Tensor:
        """Gather one kind by its name; ValueError if the optimizer does not keep it. Collective."""
        self._check(kind)
        group, found = self._owner.groups.pipeline, list[Tensor]()
        # Of a gradient each of several stages has a part until the step; of all else they have the same.
        for holder in self._param.holders[: None if kind == "grad" else 1]:
            found.append(torch.empty(self._param.shape, dtype=torch.float32, device="cpu"))
            for part in self._parts if group.index == holder else ():
                part.gather(kind, found[-1].view(-1))
            pass_along(found[-1].view(-1), group, holder, f"state of {self._param.name}")
        first, *others = found
        for other in others:
            first += other
        return _as_kept(first, kind)

    def set_full(self, kind: str, value: Tensor) -> None:
        """Replace one kind with a full value, in the whole parameter's shape. Collective."""
        self._check(kind, writes=True)
        name, shape = self._param.name, self.shape_of(kind)
        if tuple(value.shape) != shape:
            raise ValueError(f"{kind} of {name} has shape {shape}, the new value {tuple(value.shape)}")
        flat = _by_element(value, kind)[: math.prod(self._param.shape)]
        if kind == "grad" and self._owner.groups.pipeline.index != self._param.holders[0]:
            # The stages' parts are added up in the step.
            flat = torch.zeros_like(flat)
        for part in self._parts:
            part.replace(kind, flat)

    def local(self, kind: str) -> Tensor:
        """Return this rank's elements of a kind ("master", "grad", "exp_avg", ...): [n] fp32 on the CPU; n may be 0."""
        self._check(kind)
        owns = [(part, part.own(kind)) for part in self._parts]
        pieces = [_as_kept(piece, kind) for part, own in owns for piece in part.pieces_of(own)]
        return torch.cat(pieces) if pieces else torch.zeros(0, device="cpu")

    def set_local(self, kind: str, value: Tensor) -> None:
        """Set this rank's elements of one kind. If every rank holds the whole, all ranks must set the same values."""
        self._check(kind, writes=True)
        owns = [(part, part.own(kind)) for part in self._parts]
        pieces = [piece for part, own in owns for piece in part.pieces_of(own)]
        sizes = [_as_kept(piece, kind).numel() for piece in pieces]
        flat = value.detach().reshape(-1)
        if flat.numel() != sum(sizes):
            raise ValueError(f"{self._param.name}: this rank has {sum(sizes)} elements, the new value {flat.numel()}")
        for piece, given in zip(pieces, flat.split(sizes), strict=True):
            piece.copy_(_by_element(given, kind)[: piece.numel()])
        for part, own in owns:
            part.set_own(kind, own)

    def shape_of(self, kind: str) -> tuple[int, ...]:
        """The shape of a kind: the whole parameter's, or [blocks]."""
        blocks = -(-math.prod(self._param.shape) // BLOCK_NUMEL)
        return (blocks,) if kind in _SCALES else self._param.shape

    def _check(self, kind: str, *, writes: bool = False) -> None:
        """Raise what stands against a kind, on every rank alike."""
        self._owner.health.check(f"access the {kind} of {self._param.name}")
        if kind == "master":
            return
        if not self.trainable:
            raise StateError(f"{self._param.name} is frozen and has no {kind}")
        rule = self._owner.plan.request.rules[self._param.rule]
        kept = [moment.value for moment in rule.moments]
        if rule.block > 1 and kind in _MOMENTS:
            if writes:
                raise StateError(
                    f"{kind} of {self._param.name} is computed from {', '.join(kept)}, which are kept: assign those"
                )
            return
        if kind not in ("grad", *kept):
            held = ", ".join(kept) or "nothing"
            raise ValueError(f"{self._param.name} has no {kind!r}: beside the master its optimizer keeps {held}")


_MOMENTS = {kind.value: which for which, kind in enumerate(ADAM_MOMENTS)}
_SCALES = [kind.value for kind in CODED_MOMENTS if kind.block > 1]


def _as_kept(flat: Tensor, kind: str) -> Tensor:
    """Values of a kind, one for each element of a parameter from the first of a block on, as they are kept."""
    if kind in _SCALES:
        return flat.flatten()[::BLOCK_NUMEL].clone()
    return flat.to(torch.uint8) if kind in (Kind.CODES_1.value, Kind.CODES_2.value) else flat


def _by_element(value: Tensor, kind: str) -> Tensor:
    """The inverse: [n] fp32 on the CPU, with whole blocks of scales."""
    flat = value.detach().cpu().float().reshape(-1)
    return flat.repeat_interleave(BLOCK_NUMEL) if kind in _SCALES else flat


class _Part:
    """The states of what lies in one slot of one unit: a parameter, or a tile of one."""

    def __init__(self, owner: ParamAccess, unit: Unit, param: nn.Parameter, slot: Slot) -> None:
        self._owner = owner
        self._unit = unit
        self._param = param
        self.slot = slot

    @property
    def trainable(self) -> bool:
        return self._unit.layout.trainable

    def own(self, kind: str) -> Tensor:
        """Return a copy on the CPU of this rank's partition of one kind, of the whole unit: a value for each element.
        """
        if kind == "master":
            return self._read_master()
        if kind == "grad":
            return self._owner.gradients.own_sum(self._unit).float().cpu() * self._owner.step.grad_factor
        return self._read_states(Kind(kind))

    def set_own(self, kind: str, own: Tensor) -> None:
        """Write back what `own` returned, with changes."""
        if kind == "master":
            self._write_master(own)
        elif kind == "grad":
            self._owner.gradients.replace(self._unit, self._param, own / self._owner.step.grad_factor)
        else:
            self._write_states(Kind(kind), own)

    def replace(self, kind: str, flat: Tensor) -> None:
        """Write this rank's part of a whole parameter's value (flat, fp32) into its partition."""
        own = self.own(kind)
        for start, at, numel in self._pieces(own):
            take_own(flat, self.slot, self._owner.groups.tensor.index, start, own[at : at + numel])
        self.set_own(kind, own)

    def gather(self, kind: str, flat: Tensor) -> None:
        """Gather the slot's elements from all ranks' partitions into the whole parameter's (flat, fp32). Collective."""
        groups, device, name = self._owner.groups, self._unit.full.device, f"state of {self.slot.name}"
        own = self.own(kind)
        values = own.new_empty(self.slot.numel)
        first = self.slot.offset
        alone = self._unit.placed.parts == 1
        partitions = [(0, own.view(1, -1))] if alone else rows_of_ranks(own, groups.data, device, name)
        for begin, rows in partitions:
            for index, row in enumerate(rows):
                at = index * own.numel() + begin
                low, high = max(at, first), min(at + row.numel(), first + self.slot.numel)
                if low < high:
                    values[low - first : high - first] = row[low - at : high - at]
        put_together(values, self.slot, groups.tensor, device, name, flat)

    def pieces_of(self, own: Tensor) -> list[Tensor]:
        """Return views of this rank's elements of the parameter in what `own` returned, in order."""
        return [own[at : at + numel] for _, at, numel in self._pieces(own)]

    def _pieces(self, own: Tensor) -> Iterator[tuple[int, int, int]]:
        """Yield the slot's ranges in this rank's partition: (start in the slot, start in the partition, numel)."""
        first = self._unit.rank_in_parts * own.numel()
        for overlap in self._unit.layout.overlaps(first, first + own.numel()):
            if overlap.slot is self.slot:
                yield overlap.slot_start, overlap.range_start, overlap.numel

    def _places(self) -> Iterator[tuple[Key, Slice, int]]:
        """Yield where the states of the unit's partition are stored: see `infinity.plan.layout.states_of`."""
        return states_of(self._owner.plan.sub_groups, self._unit.layout.index)

    def _read_master(self) -> Tensor:
        store, key = self._owner.store, self._unit.key
        self._owner.coordinator.memory.return_partitions()
        if not self.trainable:
            with store.read(key) as (partition,):
                return load_masters(partition.view(Kind.PARAM), None, 0)
        pieces = []
        for states_key, piece, at in self._places():
            with store.read(key, states_key) as (partition, states):
                params = partition.view(Kind.PARAM)[piece.start : piece.stop]
                pieces.append(load_masters(params, states, at))
        return torch.cat(pieces) if pieces else torch.zeros(0, device="cpu")

    def _write_master(self, own: Tensor) -> None:
        store, key = self._owner.store, self._unit.key
        self._owner.coordinator.memory.return_partitions()
        self._unit.release_lease(wait=True)
        if not self.trainable:
            with store.write(key) as (partition,):
                store_masters(own, partition.view(Kind.PARAM), None, 0)
        for states_key, piece, at in self._places():
            with store.write(key, states_key) as (partition, states):
                target = partition.view(Kind.PARAM)[piece.start : piece.stop]
                store_masters(own[piece.start : piece.stop], target, states, at)
            store.flush(states_key)
        store.flush(key)
        self._owner.coordinator.memory.refresh([self._unit])

    def _read_states(self, kind: Kind) -> Tensor:
        """Return a copy of one kind, joined from the sub-groups that hold it."""
        pieces = []
        coded = self._owner.plan.request.rules[self._unit.layout.rule].block > 1
        for key, piece, at in self._places():
            with self._owner.store.read(key) as (states,):
                if coded and kind.value in _MOMENTS:
                    which = _MOMENTS[kind.value]
                    parts = (states.view(each)[each.span(at, piece.numel)] for each in CODED_MOMENTS[2 * which :][:2])
                    codes, scales = (part.cpu() for part in parts)
                    pieces.append(decoded(codes, scales, which))
                    continue
                values = states.view(kind)[kind.span(at, piece.numel)].to("cpu", torch.float32, copy=True)
                pieces.append(values.repeat_interleave(kind.block))
        return torch.cat(pieces) if pieces else torch.zeros(0, device="cpu")

    def _write_states(self, kind: Kind, own: Tensor) -> None:
        for key, piece, at in self._places():
            with self._owner.store.write(key) as (states,):
                states.view(kind)[kind.span(at, piece.numel)].copy_(own[piece.start : piece.stop : kind.block])
            self._owner.store.flush(key)
