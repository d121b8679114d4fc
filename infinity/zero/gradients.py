"""Gradients on their way from autograd into partitions.

A unit's gradients are collected when the last module call that used it has run backward, are summed over ranks into
this rank's GRAD partition, and accumulate there until the step. Where one rank has no gradient and another has, it
counts as zero. At stages 0 and 1, or where one sum a step is asked for, gradients accumulate whole on the device and
are reduced before the step.

Each arrival is told to the step (`OptimizerStep.landed`), which may begin with it. Gradients that autograd leaves on
parameters which are not trained are dropped, or refused.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from infinity.base import trace
from infinity.base.transfer import Transfer
from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import Reduction, exchange, exchange_texts
from infinity.distributed.consistency import on_any_rank
from infinity.distributed.groups import ProcessGroups
from infinity.errors import StateError
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES, Partition
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.plan import Plan
from infinity.plan.shards import Replica
from infinity.plan.types import Kind, Tier
from infinity.step.optimizer_step import OptimizerStep
from infinity.zero.reduction import Reducer, ReductionOrders
from infinity.zero.unit import Unit

# What is said where every gradient is finite.
_NOWHERE = "of no parameter"


class _Arrival(NamedTuple):
    """Copies from the device into a unit's partition, and the lease of the partition that they need."""

    unit: Unit
    partition: Partition
    lease: ExitStack
    copies: list[Transfer]

    @property
    def ends_now(self) -> bool:
        """Whether its copies are over, or are waited for, because the lease is of a pool's room."""
        return self.partition.on_drive or all(copy.done() for copy in self.copies)


class GradientPartitions:
    """Replaces or adds to partitions. Copies from the device run beside the computation; they arrive in their order.

    What has its home on a drive passes through a pool: its copies are waited for and its lease ends at once, so that
    the program never holds more than one unit's room; it is written while the program goes on.
    """

    def __init__(self, store: TieredStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._arriving: deque[_Arrival] = deque()
        # The unit whose gradients came after each one's, the last time; and the latest of this backward.
        self._following: dict[Unit, Unit] = {}
        self._latest: Unit | None = None

    @contextmanager
    def read(self, unit: Unit) -> Iterator[Tensor]:
        """A unit's partition [numel / parts] in the gradients' dtype, for reading."""
        with self._store.read(unit.grad_key) as (partition,):
            yield partition.view(Kind.GRAD)

    @contextmanager
    def write(self, unit: Unit, *, fresh: bool) -> Iterator[Tensor]:
        """The same for writing. fresh: all of it is replaced."""
        with self._store.write(unit.grad_key, fresh=fresh) as (partition,):
            yield partition.view(Kind.GRAD)
        self._store.flush(unit.grad_key)

    def put_sums(self, unit: Unit, reduced: Reduction, *, first: bool) -> None:
        """Replace (`first`) or add this rank's slice of a sum over ranks."""
        with self._beginning(unit, first=first) as (target, copies, before), trace.span(trace.COPY, "sum"):
            if first and not self._device.is_accelerator:
                reduced.leave_in(target)
                return
            for begin, piece in reduced.sums():
                copies.append(self._put(target[begin:][: piece.numel()], piece, first, before))

    def put_own(self, unit: Unit, *, first: bool) -> None:
        """Replace or add the gradients on the unit's parameters, of a rank that is alone. Without one it is zero."""
        with self._beginning(unit, first=first) as (target, copies, before):
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                piece = target[slot.offset : slot.offset + slot.numel]
                if param.grad is not None:
                    copies.append(self._put(piece, param.grad.reshape(-1), first, before))
                elif first:
                    piece.zero_()

    def put_zero(self, unit: Unit) -> None:
        """Replace a unit's gradients by zero, which a drive is not told: see [Note: zero tails] of the partitions."""
        key = unit.grad_key
        if self._store[key].on_drive:
            self._store.discard(key)
        with self._store.write(key, fresh=True, prefix_nbytes=0) as (partition,):
            if not partition.on_drive:
                partition.view(Kind.GRAD).zero_()
        self._store.flush(key)

    def arrive(self, *, wait: bool = False) -> list[Unit]:
        """End copies, in their order: those that are over, or all of them to `wait`. Returns the units whose gradients
        have arrived with them.
        """
        arrived: list[Unit] = []
        while self._arriving and (wait or self._arriving[0].ends_now):
            each = self._arriving.popleft()
            with each.lease, trace.span(trace.WAIT, "copy from the device", each.unit.grad_key):
                for copy in each.copies:
                    self._device.arrived(copy)
            if each.partition.on_drive:
                self._store.flush(each.unit.grad_key)
            arrived.append(each.unit)
        if wait:
            self._latest = None
        return arrived

    @contextmanager
    def _beginning(self, unit: Unit, *, first: bool) -> Iterator[tuple[Tensor, list[Transfer], list[Transfer]]]:
        """(the partition to write, the copies that the block adds, the unit's copies that are still arriving). All of
        them hold the lease until `arrive`.
        """
        earlier = next((each for each in self._arriving if each.unit is unit), None)
        copies: list[Transfer] = []
        before: list[Transfer] = []
        with ExitStack() as lease:
            if earlier is None:
                (partition,) = lease.enter_context(self._store.write(unit.grad_key, fresh=first))
            else:
                self._arriving.remove(earlier)
                lease.push(earlier.lease)
                partition, before = earlier.partition, earlier.copies
            yield partition.view(Kind.GRAD), copies, before
            if self._latest is not None:
                self._following[self._latest] = unit
            self._latest = unit
            if not first and (following := self._following.get(unit)) is not None:
                # What is on a drive is read before the gradients that are added to it come.
                self._store.prefetch(following.grad_key)
            self._arriving.append(_Arrival(unit, partition, lease.pop_all(), copies + before))

    def _put(self, target: Tensor, source: Tensor, first: bool, before: Sequence[Transfer]) -> Transfer:
        """Replace or add, in the target's dtype, across devices."""
        return self._device.copy(target, source) if first else self._device.add(target, source, before)


class WholeGradients:
    """One buffer [numel] for each unit, booked in the ledger."""

    def __init__(self, units: Sequence[Unit], dtype: torch.dtype, *, device: Device, ledger: Ledger) -> None:
        self._ledger = ledger
        self._device = device
        self._dtype = dtype
        self._buffers: dict[Unit, Tensor] = {}
        for unit in units:
            self._make(unit)

    def __getitem__(self, unit: Unit) -> Tensor:
        if unit not in self._buffers:
            self._make(unit)
        return self._buffers[unit]

    def _make(self, unit: Unit) -> None:
        nbytes = unit.layout.numel * self._dtype.itemsize
        with self._ledger.taking(Tier.GPU, {Kind.FULL_GRAD: nbytes}, f"whole gradients of {unit.layout.name}"):
            self._buffers[unit] = self._device.empty(unit.layout.numel, self._dtype)

    def add(self, unit: Unit, *, first: bool) -> None:
        """Add the gradients on a unit's parameters. The first ones of a step replace what was there."""
        buffer = self[unit]
        if first:
            buffer.zero_()
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            if param.grad is not None:
                piece = buffer[slot.offset : slot.offset + slot.numel]
                grad = param.grad.reshape(-1)
                if first:
                    piece.copy_(grad)
                else:
                    self._device.add(piece, grad)

    def close(self) -> None:
        """Return the buffers. One that is asked for again is made anew."""
        for buffer in self._buffers.values():
            self._ledger.add(Tier.GPU, Kind.FULL_GRAD, -buffer.numel() * buffer.element_size())
        self._buffers.clear()


class FrozenGradients:
    """Drops the gradients of parameters that no parameter group has, and refuses those of thawed ones, and all of them
    in an engine without an optimizer: they would be dropped where a program expects to train with them.
    """

    def __init__(self, units: Sequence[Unit], *, trains: bool) -> None:
        slots = [
            (slot.name, param)
            for unit in units
            if not unit.layout.trainable
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
        ]
        self._trains = trains
        # Frozen by the choice of parameter groups; autograd fills their gradients all the same.
        self._unwanted = [param for _, param in slots if param.requires_grad and trains]
        # These required no gradient when the plan was made, which has no place for one and no optimizer states.
        self._frozen = [
            (name, param) for name, param in slots
            if not (param.requires_grad and trains) and param.is_floating_point()
        ]  # fmt: skip

    def drop(self) -> None:
        """Drop what the latest backward has left. StateError if a frozen parameter has got a gradient."""
        for param in self._unwanted:
            param.grad = None
        refused = [name for name, param in self._frozen if param.grad is not None]
        if not refused:
            return
        for _, param in self._frozen:
            param.grad = None
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        if not self._trains:
            raise StateError(
                f"{refused[0]}{more} has a gradient, and this engine was made without an optimizer: it keeps no "
                "gradients. Run the model under torch.no_grad(), freeze it with model.requires_grad_(False) where "
                "gradients are to flow through it, or name an optimizer in the configuration to train it"
            )
        raise StateError(
            f"{refused[0]}{more} did not require a gradient when the engine was made and has no "
            "optimizer states, but has a gradient now: set requires_grad back to False, or "
            "call infinity.initialize() with it trainable and freeze it until you want it, which is always possible"
        )


class Gradients:
    """Collects, reduces and accumulates the gradients of all trainable units of a rank."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, device: Device, groups: ProcessGroups,
        ledger: Ledger, step: OptimizerStep, trains: bool = True,
    ) -> None:  # fmt: skip
        """trains: whether there is an optimizer at all."""
        self._units = [unit for unit in units if unit.layout.trainable]
        self._frozen = FrozenGradients(units, trains=trains)
        self._groups = groups
        self._reducer = Reducer(plan, device=device, group=groups.reduction, ledger=ledger)
        self._partitions = GradientPartitions(store, device)
        device.let_hold(plan.pools.scratch.mine_nbytes + plan.pools.scratch.down_nbytes)
        self._whole: WholeGradients | None = None
        if plan.placement.grad_whole:
            self._whole = WholeGradients(self._units, DTYPES[plan.request.grad_dtype], device=device, ledger=ledger)
        self._orders = ReductionOrders(self._units, _chunks(self._units, plan))
        # What ranks of other stages have, too, and which of these share its gradients.
        self._shared = _shared(self._units, plan, groups)
        self._step = step
        # Whether the micro-step is the last before the step, as far as is known.
        self._last = True
        # Which parameters of a unit have had a gradient since the last step, on this rank.
        self.arrived = {unit: [False] * len(unit.params) for unit in self._units}
        # Units whose accumulation has begun since the last step.
        self._begun: set[Unit] = set()
        # Those whose last gradients before the step are in the partition or on their way to it.
        self._final: set[Unit] = set()
        # Whether the engine runs the backward under way, and has scaled its loss; whether a gradient has come otherwise
        # since the last `reset`.
        self._scaled = self.unscaled = False

    @property
    def order(self) -> list[Unit]:
        """All trainable units in the order of reductions, the same on every rank."""
        return self._orders.units

    @property
    def whole(self) -> bool:
        """Whether this rank has its own gradients, before any sum over ranks, until the step and beyond."""
        return self._whole is not None

    @property
    def begun(self) -> bool:
        """Whether anything has been accumulated since the last `reset`."""
        return bool(self._begun)

    @property
    def _alone(self) -> bool:
        return self._groups.data.size == 1

    @property
    def _in_turn(self) -> bool:
        """Whether units are reduced during backward, in the order that all ranks keep."""
        return not self._alone and self._whole is None

    # In a micro-step.

    def begin_micro_step(self, *, last: bool) -> None:
        """A training forward begins, or the program says since which micro-step its is. last: a step is due after its
        backward, so that these gradients are final.
        """
        self._last = last

    def begin_backward(self, *, scaled: bool, chunk: int = 0, collects: bool = True) -> None:
        """A backward begins. scaled: the engine runs it, and has scaled the loss. chunk: which of this rank's stages it
        runs through. collects: False where it only computes the gradients of inputs, and leaves others where they are.
        """
        self._scaled = scaled
        self._orders.begin_backward(chunk, leaves=not collects)

    def ready(self, unit: Unit) -> None:
        """The last outstanding backward through `unit` has run: collect its gradients, in turn."""
        if unit not in self.arrived or self._orders.leaves:
            return
        for each in self._orders.current.ready(unit) if self._in_turn else (unit,):
            self._collect(each)

    def end_backward(self) -> None:
        """Collect what no module call announced, and begin a new round."""
        self._frozen.drop()
        if self._orders.leaves:
            return
        for unit in self._orders.current.rest():
            self._collect(unit)
        if self._in_turn:
            self._end_reduction()
            self._orders.current.end_backward()
        self._end_copies()

    def abandon_backward(self) -> None:
        """Backward raised: forget its round. Gradients that have arrived stay until `reset`."""
        self._reducer.abandon()
        self._orders.current.abandon_backward()

    # Before the step.

    def settle(self) -> tuple[dict[int, list[bool]], frozenset[str]]:
        """Complete the partitions for the step. Collective. Returns which parameters have a gradient on some rank: of
        this rank's units, by index, and the names of those that only other stages have.
        """
        # Gradients that arrived after their unit's turn.
        late = [any(param.grad is not None for param in unit.params) for unit in self._units]
        stage, world = self._groups.stage, self._groups.world
        if stage.size > 1:
            late = on_any_rank(late, stage, "agreement on late gradients")
        for unit, is_late in zip(self._units, late, strict=True):
            if is_late:
                self._collect(unit)
        self._end_reduction()
        if self._whole is not None:
            for unit in self.order:
                self._reduce_whole(unit, self._whole[unit])
        for unit in self._units:
            if unit not in self._begun:
                self._accumulate(unit)
        self._end_copies(wait=True)
        for unit in self._shared:
            if unit.layout.numel:
                self.sum_shared(unit)
        for places in _parts(self._units):
            # Torch gives a parameter one gradient, or none.
            if any(self.arrived[unit][at] for unit, at in places):
                for unit, at in places:
                    self.arrived[unit][at] = True
        arrived = {unit.layout.index: [*flags] for unit, flags in self.arrived.items()}
        elsewhere: frozenset[str] = frozenset()
        if world.size > 1:
            numbers = self._step.numbers
            anyone = on_any_rank(numbers.flags(arrived), world, "agreement on gradients")
            arrived = {index: numbers.of_unit(anyone, index) for index in arrived}
            elsewhere = numbers.names_elsewhere(anyone)
            # After the first backward, reduce in the order in which rank 0's units really finish.
            self._orders.agree(stage)
        return arrived, elsewhere

    def sum_shared(self, unit: Unit) -> None:
        """Add up what each rank of the pipeline axis has of the gradients of a unit that all of them hold, or the first
        and the last. Collective over these, once their own sums are there.
        """
        group = self._shared[unit]
        with self._partitions.write(unit, fresh=False) as target:
            values = target.to("cpu", copy=True)
            collectives.sum_in_order(values, group, f"sum of gradients of {unit.layout.name} over stages")
            target.copy_(values)
        self._tell(unit)

    def reset(self) -> None:
        """Forget all gradients: the step is over, or they are not wanted."""
        self._settle()
        self._begun.clear()
        self._final.clear()
        self.unscaled = False
        for unit in self._units:
            self.arrived[unit] = [False] * len(unit.params)
        self._drop_autograds()

    def drop_memory(self) -> None:
        """Give up what holds no gradient between two steps, until gradients come: see `Reducer`, `WholeGradients`."""
        self._settle()
        self._reducer.drop_memory()
        if self._whole is not None:
            self._whole.close()

    def close(self) -> None:
        """Return the buffers of whole gradients and drop what autograd left."""
        self._reducer.close()
        # No step begins any more with what still arrives.
        for unit in self._partitions.arrive(wait=True):
            unit.release_lease(wait=True)
        if self._whole is not None:
            self._whole.close()
        self._drop_autograds()

    # Values.

    def own_sum(self, unit: Unit) -> Tensor:
        """This rank's partition of the gradients accumulated so far, summed over ranks; zeros when there are none."""
        self._settle()
        if self._whole is not None:
            buffer = self._whole[unit] if unit in self._begun else self._whole[unit].new_zeros(unit.layout.numel)
            full = buffer.to(self._reducer.dtype, copy=True)
            collectives.all_reduce(full, self._groups.reduction, f"reduction of {unit.layout.name}").wait()
            numel = unit.layout.partition_numel(unit.placed.parts)
            return full[unit.rank_in_parts * numel :][:numel]
        with self._partitions.read(unit) as held:
            return held.clone() if unit in self._begun else held.new_zeros(held.numel())

    def replace(self, unit: Unit, param: Parameter, own: Tensor) -> None:
        """Put other sums into this rank's partition ([numel / parts], fp32), because `param`'s were changed."""
        self._settle()
        self.arrived[unit] = [old or other is param for old, other in zip(self.arrived[unit], unit.params, strict=True)]
        self._begun.add(unit)
        if self._whole is not None:
            # Summed over ranks before the step: each puts its slice, or one of them everything.
            buffer = self._whole[unit].zero_()
            if unit.placed.parts > 1 or self._groups.data.index == 0:
                buffer[unit.rank_in_parts * own.numel() :][: own.numel()].copy_(own)
            return
        with self._partitions.write(unit, fresh=True) as target:
            target.copy_(own)
        self._tell(unit)

    def nonfinite_slot(self, unit: Unit) -> int | None:
        """The last parameter of a unit, by its place in the layout, whose gradient is not finite as far as this rank
        has it: its own whole one, or its partition of the sum over ranks. After `settle`, before `reset`.
        """
        if unit not in self._begun or not unit.layout.numel:
            return None
        if self._whole is not None:
            return _nonfinite_in(unit, self._whole[unit], 0)
        with self._partitions.read(unit) as held:
            return _nonfinite_in(unit, held, unit.rank_in_parts * held.numel())

    def first_nonfinite(self, *, loss_is_finite: bool) -> str:
        """Return, in words, the first parameter in the order of backward whose gradient is not finite, and its rank.
        Collective. The rank is known if gradients are whole until the step, and otherwise by its loss.
        """
        found = self._first_in_stage(loss_is_finite=loss_is_finite)
        if self._groups.pipeline.size > 1:
            # The last stage's backward comes first.
            told = exchange_texts(found, self._groups.pipeline, "search for what is not finite")
            found = next((each for each in reversed(told) if each != _NOWHERE), found)
        return found

    def _first_in_stage(self, *, loss_is_finite: bool) -> str:
        group, at, slot_at = self._groups.stage, math.inf, -1
        for index, unit in enumerate(self.order):
            found = self.nonfinite_slot(unit)
            if found is not None:
                at, slot_at = index, found
                break
        rows = exchange(
            [float(at), float(slot_at), float(not loss_is_finite)], group,
            "search for what is not finite",
        )  # fmt: skip
        place = min(row[0] for row in rows)
        if place == math.inf:
            return _NOWHERE
        slot_at = int(max(row[1] for row in rows if row[0] == place))
        name = self.order[int(place)].layout.slots[slot_at].name
        if group.size == 1:
            return name
        losses = [rank for rank, row in zip(group.members, rows, strict=True) if row[2]]
        if losses:
            return f"{name}, on rank {_listed(losses)}, where the loss is not finite"
        if self.whole:
            there = [rank for rank, row in zip(group.members, rows, strict=True) if row[0] == place]
            return f"{name}, on rank {_listed(there)}"
        return f"{name}, in the sum over ranks (every loss is finite)"

    # Steps on the way.

    def _collect(self, unit: Unit) -> None:
        """Take the gradients that autograd has left on the unit's parameters."""
        if not self._in_turn and unit.layout.numel and all(param.grad is None for param in unit.params):
            return
        with trace.span(trace.ENGINE, "collect gradients", unit.grad_key):
            self._take(unit)

    def _take(self, unit: Unit) -> None:
        present = [param.grad is not None for param in unit.params]
        for param in unit.params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                # Of an embedding with sparse=True: partitions are dense, and every element is stepped.
                param.grad = param.grad.to_dense()
        if unit.layout.replica is Replica.PARTIAL and any(present):
            self._sum_partial(unit)
        self.unscaled |= any(present) and not self._scaled
        self.arrived[unit] = [old or new for old, new in zip(self.arrived[unit], present, strict=True)]
        if not unit.layout.numel:
            self._begun.add(unit)
        elif self._in_turn:
            # The reduction before this one ends first, so that at most one is in flight.
            self._end_reduction()
            # All ranks know alike that nobody has chosen an expert.
            if any(present) or not unit.layout.routed:
                self._reducer.submit(unit)
        elif any(present):
            if self._alone:
                self._accumulate(unit)
            elif self._whole is not None:
                self._whole.add(unit, first=unit not in self._begun)
                self._begun.add(unit)
        for param in unit.params:
            param.grad = None

    def _sum_partial(self, unit: Unit) -> None:
        """Add up what each rank of the tensor axis has of the gradients on a unit's parameters. Collective over that
        axis: its ranks have run the same graph, so all of them have gradients of the same parameters.
        """
        grads = [param.grad for param in unit.params if param.grad is not None]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        with trace.span(trace.WAIT, "sum of partial gradients", unit.grad_key, flat.nbytes):
            collectives.sum_in_order(flat, self._groups.tensor, f"sum of partial gradients of {unit.layout.name}")
        for grad, summed in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(summed.view(grad.shape))

    def _accumulate(self, unit: Unit, reduced: collectives.Reduction | None = None) -> None:
        """Put into the GRAD partition this rank's slice of the sum, or, without one, the gradients on the parameters
        where this rank is alone and zero elsewhere. The first arrival of a step replaces what was there.
        """
        first = unit not in self._begun
        self._begun.add(unit)
        # Before this unit's new gradients: what arrives now is from before.
        self._end_copies()
        if unit in self._final:
            self._step.changes(unit.layout.index)
        if self._last and unit not in self._shared:
            self._final.add(unit)
        if reduced is not None:
            self._partitions.put_sums(unit, reduced, first=first)
        elif self._alone and (not first or any(param.grad is not None for param in unit.params)):
            self._partitions.put_own(unit, first=first)
        else:
            self._partitions.put_zero(unit)
            self._tell(unit)
        self._end_copies()

    def _reduce_whole(self, unit: Unit, buffer: Tensor) -> None:
        """Before the step: sum over ranks what is whole; keep this rank's slice, or everything at stage 0."""
        if not unit.layout.numel:
            return
        if unit not in self._begun:
            buffer.zero_()
        self._begun.add(unit)
        with self._partitions.write(unit, fresh=True) as target:
            self._reducer.reduce(unit, buffer, target)
        self._tell(unit)

    def _settle(self) -> None:
        """Have everything that is in flight in the partitions."""
        self._end_reduction()
        self._end_copies(wait=True)

    def _end_reduction(self) -> None:
        """Wait for the reduction in flight and add its result to the partition."""
        if (finished := self._reducer.wait()) is not None:
            self._accumulate(*finished)

    def _end_copies(self, *, wait: bool = False) -> None:
        """End copies from the device: those that are over, or all of them to `wait`."""
        for unit in self._partitions.arrive(wait=wait):
            self._tell(unit)

    def _tell(self, unit: Unit) -> None:
        # The unit's weights were copied out of their partition before its gradients came: a step may write it now.
        unit.release_lease(wait=True)
        self._step.landed(unit.layout.index, self.arrived[unit], final=unit in self._final)

    def _drop_autograds(self) -> None:
        for unit in self._units:
            for param in unit.params:
                param.grad = None


def _chunks(units: Sequence[Unit], plan: Plan) -> list[list[Unit]]:
    """The units that each of this rank's stages needs; nothing without a pipeline."""
    if plan.pipeline is None:
        return []
    needed = [set(plan.pipeline.units_of(stage)) for stage in plan.pipeline.stages]
    return [[unit for unit in units if unit.layout.index in each] for each in needed]


def _parts(units: Sequence[Unit]) -> list[list[tuple[Unit, int]]]:
    """By parameter that lies in tiles, (unit, place in its layout) of each."""
    found: dict[str, list[tuple[Unit, int]]] = {}
    for unit in units:
        for at, slot in enumerate(unit.layout.slots):
            if slot.is_tile:
                found.setdefault(slot.name, []).append((unit, at))
    return [*found.values()]


def _shared(units: Sequence[Unit], plan: Plan, groups: ProcessGroups) -> dict[Unit, AxisGroup]:
    """The units that ranks of other stages have, too, with the group of these."""
    ends = plan.pipeline.at_ends if plan.pipeline is not None else ()
    return {
        unit: groups.pipeline_ends if unit.layout.index in ends else groups.pipeline
        for unit in units
        if unit.layout.index in plan.shared
    }


def _nonfinite_in(unit: Unit, values: Tensor, first: int) -> int | None:
    """The last slot with a non-finite element among the unit's elements from `first` on."""
    for overlap in reversed(list(unit.layout.overlaps(first, first + values.numel()))):
        piece = values[overlap.range_start : overlap.range_start + overlap.numel]
        # In fp64 no sum of finite numbers of a shorter type overflows; several times faster than asking each.
        if not math.isfinite(piece.sum(dtype=torch.float64).item()):
            return unit.layout.slots.index(overlap.slot)
    return None


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))
