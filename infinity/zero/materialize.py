"""Fills partitions with initial values, unit by unit: of an ordinary model, of one built under `Init`, or from files.

Master weights have the full precision of the model: a model in fp32 that is trained in bf16 starts from its fp32
values. All ranks start from rank 0's values; from files each rank reads its own slices. A parameter's own memory is
freed as soon as its unit has its partitions.

The model comes in with whole parameters. Where the tensor axis cuts one, the partition takes the elements of this
rank's shard, in the shard's order, and the parameter has the shard's shape from then on.

A model's units, made of its plan and its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.consistency import on_any_rank
from infinity.distributed.groups import ProcessGroups
from infinity.log import PhaseProgress
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES, Partition
from infinity.memory.shard_copy import gather_shard, read_shard, store_masters
from infinity.memory.store import Left, Place, TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.tiers.pinned import trim
from infinity.plan.filling import FILL_NUMEL
from infinity.plan.layout import Overlap, Slice, Slot, SubGroup
from infinity.plan.plan import Plan
from infinity.plan.shards import Range, whole_range
from infinity.plan.spec import ModelSpec, ParamSpec
from infinity.plan.types import Key, Kind
from infinity.zero import parameter, tiles
from infinity.zero.coordinator import Coordinator
from infinity.zero.deferred_init import DeferredInit
from infinity.zero.experts import ExpertsDoor
from infinity.zero.parameter import leave_to_others
from infinity.zero.unit import Unit

# How often the C library is asked to return the parameters' memory to the system.
_TRIM_COUNT = 64


class Materializer:
    """Fills the store from the model's parameters. `init` holds the values of a model that was built under `Init`."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, groups: ProcessGroups,
        init: DeferredInit | None, every: Sequence[tuple[nn.Parameter, ParamSpec, int]], moments_start: float = 0.0,
    ) -> None:  # fmt: skip
        """`moments_start`: the first value of what the optimizer keeps of an element. every: all parameters of the
        model, also those of other stages, in one order on all ranks: see `model_units.taken_in_order`.
        """
        self._units = list(units)
        self._plan = plan
        self._store = store
        self._groups = groups
        self._moments_start = moments_start
        # Where the model was built otherwise an empty one is asked.
        self._init = init or DeferredInit(None, groups=groups, timeout_seconds=1.0)
        # All parameters in the order in which the ranks agree on their values, and how many they have agreed on.
        self._every = list(every)
        self._agreed = 0
        self._place = {id(param): place for place, (param, _, _) in enumerate(self._every)}
        # Bytes of parameters freed since the latest trim, and the number after which the next one is due.
        self._let_go_nbytes = 0
        self._trim_nbytes = sum(param.nbytes for unit in self._units for param in unit.params) // _TRIM_COUNT
        # Parameters that every rank reads from the same files.
        self._alike: set[int] = set()
        # In the order in which they are taken in, with what follows each.
        wholes = {id(whole): whole for unit in self._units for whole in map(parameter.whole_of, unit.params)}
        self._following = {id(one): other for one, other in pairwise(wholes.values())}
        self._holders: dict[int, list[Unit]] = {}
        for unit in self._units:
            for whole in map(parameter.whole_of, unit.params):
                self._holders.setdefault(id(whole), []).append(unit)
        own = sum(unit.layout.nbytes // unit.placed.parts for unit in self._units)
        self._progress = PhaseProgress("taking the model in", own)

    def run(self, left: Left | None = None) -> None:
        """Give every partition its value: the model's, or what was left of it."""
        if left is not None:
            self._take_over(left.places)
            return
        self._find_alike()
        for unit in self._units:
            if not unit.layout.trainable:
                self._fill_frozen(unit)
                self._taken(unit)
        last = {piece.unit: group.index for group in self._plan.sub_groups for piece in group.slices}
        for group in self._plan.sub_groups:
            units = self._fill_group(group)
            # A unit has several sub-groups, and is written once.
            whole = [unit for unit in units if last[unit.layout.index] == group.index]
            self._store.flush(Key(Kind.STATES, group.index), *(unit.key for unit in whole))
            for unit in whole:
                self._taken(unit)
        for unit in self._units:
            # Units without elements belong to no sub-group.
            self._taken(unit)
        self._agree_up_to(len(self._every))
        self._store.settle()

    def _take_over(self, places: Sequence[Place]) -> None:
        """Give every partition the value that a record names (see `TieredStore.restore`), and none of the model's."""
        self._store.restore(places)
        self._alike = {id(param) for param, _, _ in self._every}
        for unit in self._units:
            self._taken(unit)
        self._agree_up_to(len(self._every))

    def _fill_frozen(self, unit: Unit) -> None:
        numel = unit.layout.partition_numel(unit.placed.parts)
        with self._store.write(unit.key, fresh=True) as (partition,):
            self._read(unit, 0, partition.view(Kind.PARAM)[:numel])
        self._store.flush(unit.key)

    def _fill_group(self, group: SubGroup) -> list[Unit]:
        units = [self._units[piece.unit] for piece in group.slices]
        states_key = Key(Kind.STATES, group.index)
        with (
            self._store.write(states_key, fresh=True, prefix_nbytes=self._prefix_nbytes(group, units)) as (states,),
            self._store.write(*(u.key for u in units)) as params,
        ):
            for (piece, at), unit, partition in zip(group.placed(), units, params, strict=True):
                self._fill_slice(unit, piece, partition, states, at)
            if self._moments_start:
                for kind in self._plan.rule_of(group).moments:
                    states.view(kind).fill_(self._moments_start)
        return units

    def _prefix_nbytes(self, group: SubGroup, units: Sequence[Unit]) -> int | None:
        """Return how many bytes at the beginning of a sub-group's states are not zero at first; None for all of them.
        Those complete PARAM to the fp32 master; there are none if the model has PARAM's own precision.
        """
        if self._moments_start:
            return None
        sections, kept = self._plan.partition(Key(Kind.STATES, group.index)).sections, self._plan.rule_of(group).moments
        moments = min((section.offset for section in sections if section.kind in kept), default=0)
        exact = all(DTYPES[unit.layout.dtype] is torch.bfloat16 and self._is_exact(unit) for unit in units)
        return 0 if exact else moments

    def _is_exact(self, unit: Unit) -> bool:
        """Return whether the unit's values are in bf16, so that REMAINDER is zero."""
        return all(
            (self._init.dtype(param) if self._init.holds(param) else param.dtype) is torch.bfloat16
            for param in map(parameter.whole_of, unit.params)
        )

    def _fill_slice(self, unit: Unit, piece: Slice, partition: Partition, states: Partition, at: int) -> None:
        """Fill one slice of a trainable partition: PARAM, and the rest of the fp32 master in the states."""
        target = partition.view(Kind.PARAM)[piece.start : piece.stop]
        if target.dtype is torch.float32 or (target.dtype is torch.bfloat16 and self._is_exact(unit)):
            # The rest of the master is zero, and the states are zero already.
            self._read(unit, piece.start, target)
            return
        # Padding between parameters is zero as it comes.
        for overlap, param in self._parameters(unit, piece.start, piece.numel):
            for begin in range(0, overlap.numel, FILL_NUMEL):
                numel = min(FILL_NUMEL, overlap.numel - begin)
                first = overlap.range_start + begin
                values = self._values(param, overlap.slot, overlap.tensor_start + begin, numel)
                store_masters(values, target[first : first + numel], states, at + first)
            self._advance(unit, param, overlap.numel)

    def _read(self, unit: Unit, start: int, target: Tensor) -> None:
        """Copy the elements of this rank's partition from `start` on into `target`, whose padding is zero already."""
        for overlap, param in self._parameters(unit, start, target.numel()):
            piece = target[overlap.range_start : overlap.range_start + overlap.numel]
            self._copy(param, overlap.slot, overlap.tensor_start, piece)
            self._advance(unit, param, overlap.numel)

    def _parameters(self, unit: Unit, start: int, numel: int) -> Iterator[tuple[Overlap, nn.Parameter]]:
        """Yield the parameters in a range of this rank's partition, each with its overlap."""
        # Every rank starts from rank 0's values.
        self._agree_up_to(max((self._place[id(parameter.whole_of(param))] for param in unit.params), default=-1) + 1)
        first = unit.rank_in_parts * unit.layout.partition_numel(unit.placed.parts) + start
        wholes = map(parameter.whole_of, unit.params)
        by_name = dict(zip((slot.name for slot in unit.layout.slots), wholes, strict=True))
        for overlap in unit.layout.overlaps(first, first + numel):
            yield overlap, by_name[overlap.slot.name]

    def _copy(self, param: nn.Parameter, slot: Slot, start: int, target: Tensor) -> None:
        """Copy elements from `start` on of what this rank has of a parameter into `target` ([n])."""
        held, shard = self._init.holds(param), slot.shard
        if shard is not None:
            ranges = shard.ranges(self._groups.tensor.index)
            if held:
                read_shard(partial(self._init.read, param), slot.whole_shape, shard.dim, ranges, start, target)
            else:
                flat = param.detach().reshape(-1)
                gather_shard(flat, 0, slot.whole_shape, shard.dim, ranges, start, target)
        elif held:
            self._init.read(param, start, target)
        else:
            target.copy_(param.detach().reshape(-1)[start : start + target.numel()])

    def _values(self, param: nn.Parameter, slot: Slot, start: int, numel: int) -> Tensor:
        """Return elements of what this rank has of a parameter, in fp32 in CPU memory: a view if they lie there, a copy
        otherwise.
        """
        if slot.shard is not None or self._init.at_origin(param):
            values = torch.empty(numel, dtype=torch.float32, device="cpu")
            self._copy(param, slot, start, values)
        elif not self._init.holds(param):
            values = param.detach().reshape(-1)[start : start + numel]
        else:
            values = self._init.elements(param, start, numel)
        return values.to("cpu", torch.float32)

    def _advance(self, unit: Unit, param: nn.Parameter, numel: int) -> None:
        if (following := self._following.get(id(param))) is not None:
            self._init.prefetch(following)
        self._progress.advance(numel * DTYPES[unit.layout.dtype].itemsize)

    def _find_alike(self) -> None:
        """Find the parameters that need no broadcast: every rank reads them unchanged from the same files."""
        params = [param for param, _, _ in self._every]
        touched = [not self._init.at_origin(param) for param in params]
        if self._groups.world.size > 1:
            touched = on_any_rank(touched, self._groups.world, "files of the weights")
        self._alike = {id(param) for param, flag in zip(params, touched, strict=True) if not flag}

    def _agree_up_to(self, count: int) -> None:
        """Agree on the values of so many parameters: every rank on all of them, in one order, whoever keeps them."""
        for param, spec, number in self._every[self._agreed : count]:
            if self._groups.world.size > 1:
                self._agree_on(param, spec.name)
            if id(param) not in self._holders:
                self._leave(param, spec, number)
        self._agreed = max(self._agreed, count)

    def _agree_on(self, param: nn.Parameter, name: str) -> None:
        if not param.numel() or id(param) in self._alike:
            return
        name = f"broadcast of {name}"
        if self._init.is_sliced(param):
            self._init.settle(param, self._wanted(param))
        elif self._init.holds(param):
            collectives.broadcast(self._init.values(param), self._groups.world, name=name)
        else:
            values = param.detach().contiguous().cpu()
            collectives.broadcast(values, self._groups.world, name=name)
            parameter.set_data(param, values)

    def _leave(self, param: nn.Parameter, spec: ParamSpec, number: int) -> None:
        """Free the memory of a parameter that other stages have."""
        assert self._plan.pipeline is not None
        self._init.forget(param)
        self._let_go_nbytes += param.nbytes
        device = next((unit.full.device for unit in self._units), torch.device("cpu"))
        stand_in = parameter.placeholder(spec.shape, DTYPES[spec.dtype], device)
        leave_to_others(param, spec.name, self._plan.pipeline.split.holders(number), stand_in)

    def _wanted(self, param: nn.Parameter) -> Range:
        """Return the elements of a whole parameter, from and to, among which those of this rank's partitions are; tiles
        have several.
        """
        found: list[Range] = []
        for unit in self._holders.get(id(param), ()):
            numel = unit.layout.partition_numel(unit.placed.parts)
            first = unit.rank_in_parts * numel
            names = [
                slot.name for slot, one in zip(unit.layout.slots, unit.params, strict=True)
                if parameter.whole_of(one) is param
            ]  # fmt: skip
            found += [
                self._range_of(overlap)
                for overlap in unit.layout.overlaps(first, first + numel)
                if overlap.slot.name in names
            ]
        return min((start for start, _ in found), default=0), max((stop for _, stop in found), default=0)

    def _range_of(self, overlap: Overlap) -> Range:
        """Return the range of the whole parameter that has what this rank's partition has of it."""
        slot, start = overlap.slot, overlap.tensor_start
        if slot.shard is None:
            return start, start + overlap.numel
        ranges = slot.shard.ranges(self._groups.tensor.index)
        return whole_range(slot.whole_shape, slot.shard.dim, ranges, start, overlap.numel)

    def _taken(self, unit: Unit) -> None:
        """Free the parameters' own memory: the unit's values are in its partitions."""
        dtype = DTYPES[unit.layout.dtype]
        for param, slot in zip(map(parameter.whole_of, unit.params), unit.layout.slots, strict=True):
            if not slot.ends:
                # Its other tiles are still to be read.
                continue
            self._init.forget(param)
            if not parameter.is_released(param) or param.dtype is not dtype or param.shape != slot.shape:
                self._let_go_nbytes += param.nbytes
                _detach_data(param, slot.shape, dtype, unit.full.device)
        if self._let_go_nbytes and self._let_go_nbytes >= self._trim_nbytes:
            trim()
            self._let_go_nbytes = 0


def _detach_data(param: nn.Parameter, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    stand_in = parameter.placeholder(shape, dtype, device)
    if parameter.is_released(param):
        parameter.restore(param, stand_in)
    parameter.release(param, stand_in)


def make_units(
    model: nn.Module, plan: Plan, *, store: TieredStore, device: Device, group: AxisGroup, ledger: Ledger
) -> list[Unit]:
    """Return the units of a model in the plan's order. group: the ranks that share the partitions of a unit."""
    by_name = dict(model.named_parameters())
    return [
        Unit(
            layout, placed, tiles.params_of(layout, by_name), store=store, device=device, group=group,
            ledger=ledger,
        )  # fmt: skip
        for layout, placed in zip(plan.layouts, plan.placement.units, strict=True)
    ]


def taken_in_order(model: nn.Module, units: ModelSpec) -> list[tuple[nn.Parameter, ParamSpec, int]]:
    """Return each parameter of a whole model once, with its specification and the number of its (first) unit, in the
    order in which all ranks take them in, whatever they have of the model.
    """
    by_name = dict(model.named_parameters())
    found: dict[str, tuple[nn.Parameter, ParamSpec, int]] = {}
    numbered = sorted(enumerate(units.units), key=lambda each: each[1].trainable)
    for number, unit in numbered:
        for spec in unit.params:
            found.setdefault(spec.name, (by_name[spec.name], spec, number))
    return [*found.values()]


def attach_units(model: nn.Module, units: Sequence[Unit], coordinator: Coordinator) -> ExpertsDoor:
    """Let the coordinator bring each parameter that a program uses. Returns what runs experts meanwhile."""
    for unit in units:
        for param, slot in zip(unit.params, unit.layout.slots, strict=True):
            parameter.attach(param, coordinator, slot.name)
    tiles.adopt_tiles(units, coordinator)
    return ExpertsDoor(model)
