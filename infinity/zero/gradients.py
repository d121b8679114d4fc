"""Gradients on their way from autograd into partitions.

A unit's gradients are collected when the last module call that used it has run backward, are summed over ranks into
this rank's GRAD partition, and accumulate there until the step. With several ranks the reductions of one backward run
in one fixed order, so that every rank starts the same collective whatever its own graph looked like; what a rank has
no gradient for counts as zero. At stages 0 and 1 gradients accumulate whole on the device and are reduced at the
boundary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor
from torch.nn import Parameter

from infinity.distributed import collectives
from infinity.distributed.collectives import Reduction
from infinity.distributed.process_groups import ProcessGroups
from infinity.errors import StateError
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.plan import Plan
from infinity.plan.types import Key, Kind, Tier
from infinity.zero.reducer import Reducer
from infinity.zero.unit import Unit

# Elements that are cast at a time where gradients add up in another dtype than they arrive in.
_CAST_NUMEL = 1 << 20


class Gradients:
    """Collects, reduces and accumulates the gradients of all trainable units of a rank."""

    def __init__(
        self, units: Sequence[Unit], *, plan: Plan, store: TieredStore, device: Device, groups: ProcessGroups,
        ledger: Ledger,
    ) -> None:
        self._units = [unit for unit in units if unit.layout.trainable]
        # Frozen by the choice of parameter groups, yet autograd fills their gradients: those are dropped.
        self._unwanted = [
            param for unit in units if not unit.layout.trainable for param in unit.params if param.requires_grad
        ]
        self._frozen = [
            (slot.name, param)
            for unit in units
            if not unit.layout.trainable
            for slot, param in zip(unit.layout.slots, unit.params, strict=True)
            if not param.requires_grad and param.is_floating_point()
        ]
        self._store = store
        self._device = device
        self._groups = groups
        self._ledger = ledger
        self._alone = groups.data.size == 1
        self._whole = plan.placement.grad_whole
        self._wire = DTYPES[plan.request.communication_dtype]
        self._reducer = Reducer(plan, device=device, group=groups.reduction, ledger=ledger)
        grad_dtype = DTYPES[plan.request.grad_dtype]
        self._buffers: dict[Unit, Tensor] = {}
        for unit in self._units if self._whole else ():
            nbytes = unit.layout.numel * grad_dtype.itemsize
            with ledger.taking(Tier.GPU, {Kind.FULL_GRAD: nbytes}, f"whole gradients of {unit.layout.name}"):
                self._buffers[unit] = device.empty(unit.layout.numel, grad_dtype)
        # Which parameters of a unit have had a gradient since the last step, on this rank.
        self.arrived = {unit: [False] * len(unit.params) for unit in self._units}
        # Units whose accumulation has begun since the last step.
        self._begun: set[Unit] = set()
        # The order of reductions of one backward, how far it has come, and who is ready out of turn.
        self.order = list(reversed(self._units))
        self._turn = 0
        self._ready: set[Unit] = set()
        self._finished: list[Unit] = []
        # Unit indices in the order in which the latest backward finished with them: what `order` should become.
        self._ordered = False
        self.seen_order: list[int] = [unit.layout.index for unit in self.order]
        # Whether the engine runs the backward under way, and has scaled its loss; whether a gradient has come otherwise
        # since the last `reset`.
        self.scaled = self.unscaled = False
        self._in_flight: tuple[Unit, Reduction] | None = None
        # A unit whose gradients are on their way from the device, with the lease that they need.
        self._arriving: tuple[Unit, ExitStack, list[Transfer]] | None = None
        # Called when something was added to a unit's partition.
        self.on_accumulated: Callable[[Unit], None] = lambda unit: None

    def begin_backward(self, *, scaled: bool) -> None:
        """A backward begins. scaled: the engine runs it, and has scaled the loss."""
        self.scaled = scaled

    def ready(self, unit: Unit) -> None:
        """The last outstanding backward through `unit` has run: collect its gradients, in turn."""
        if unit not in self.arrived:
            return
        if self._alone or self._whole:
            self._collect(unit)
            return
        self._ready.add(unit)
        self._finished.append(unit)
        while self._turn < len(self.order) and self.order[self._turn] in self._ready:
            self._collect(self.order[self._turn])
            self._turn += 1

    def end_backward(self) -> None:
        """Collect what no module call announced, and begin a new round."""
        for param in self._unwanted:
            param.grad = None
        self._refuse_thawed()
        if self._alone or self._whole:
            for unit in self.order:
                self._collect(unit)
            return
        for unit in self.order[self._turn :]:
            self._collect(unit)
        self._wait_reduce()
        rest = [unit for unit in self.order if unit not in self._ready]
        self.seen_order = [unit.layout.index for unit in [*self._finished, *rest]]
        self._turn = 0
        self._ready.clear()
        self._finished.clear()

    def abandon_backward(self) -> None:
        """Backward raised: forget its round. Gradients that have arrived stay until `reset`."""
        flying = self._take_flying()
        if flying is not None:
            self._reducer.abandon(flying[1])
        self._turn = 0
        self._ready.clear()
        self._finished.clear()

    def agree_on_order(self) -> None:
        """After the first backward, reduce in the order in which rank 0's units really finish. Collective, once."""
        if self._ordered:
            return
        self._ordered = True
        seen = [float(index) for index in self.seen_order]
        name = "agreement on the order of reductions"
        everyone = collectives.exchange(seen, self._groups.world, name)
        by_index = {unit.layout.index: unit for unit in self._units}
        self.order = [by_index[int(index)] for index in everyone[0]]

    def leftovers(self) -> list[int]:
        """Indices of units with gradients that arrived after their unit's turn."""
        return [unit.layout.index for unit in self._units if any(param.grad is not None for param in unit.params)]

    def boundary(self, leftovers: Sequence[int] = ()) -> None:
        """Complete the partitions: collect `leftovers` (the same on every rank), reduce what is still whole."""
        for unit in self._units:
            if unit.layout.index in leftovers:
                self._collect(unit)
        self._wait_reduce()
        if self._whole:
            for unit in self.order:
                self._reduce_whole(unit)
        for unit in self._units:
            if unit not in self._begun:
                self._accumulate(unit, None)
        self._wait_copy()

    def partition(self, unit: Unit) -> Key:
        return Key(Kind.GRAD, unit.layout.index)

    def own_sum(self, unit: Unit) -> Tensor:
        """This rank's partition of the gradients accumulated so far, summed over ranks; zeros when there are none."""
        self._wait_reduce()
        if self._whole:
            buffer = self._buffers[unit] if unit in self._begun else self._buffers[unit].new_zeros(unit.layout.numel)
            full = buffer.to(self._wire, copy=True)
            collectives.all_reduce(full, self._groups.reduction, f"reduction of {unit.layout.name}").wait()
            numel = unit.layout.partition_numel(unit.placed.parts)
            return full[unit.rank_in_parts * numel :][:numel]
        with self._store.read(self.partition(unit)) as (partition,):
            held = partition.view(Kind.GRAD)
            return held.clone() if unit in self._begun else held.new_zeros(held.numel())

    def replace(self, unit: Unit, param: Parameter, own: Tensor) -> None:
        """Put other sums into this rank's partition ([numel / parts], fp32), because `param`'s were changed."""
        self._wait_reduce()
        self.arrived[unit] = [old or other is param for old, other in zip(self.arrived[unit], unit.params, strict=True)]
        self._begun.add(unit)
        if self._whole:
            # Summed over ranks at the boundary: each puts its slice, or one of them everything.
            buffer = self._buffers[unit].zero_()
            if unit.placed.parts > 1 or self._groups.data.index == 0:
                buffer[unit.rank_in_parts * own.numel() :][: own.numel()].copy_(own)
            return
        with self._store.write(self.partition(unit)) as (partition,):
            partition.view(Kind.GRAD).copy_(own)
        self.on_accumulated(unit)

    @property
    def whole(self) -> bool:
        """Whether this rank has its own gradients, before any sum over ranks, until the boundary and beyond."""
        return self._whole

    @property
    def begun(self) -> bool:
        """Whether anything has been accumulated since the last `reset`."""
        return bool(self._begun)

    def nonfinite_slot(self, unit: Unit) -> int | None:
        """The last parameter of a unit, by its place in the layout, whose gradient is not finite as far as this rank
        has it: its own whole one, or its partition of the sum over ranks. After `boundary`, before `reset`.
        """
        if unit not in self._begun or not unit.layout.numel:
            return None
        if self._whole:
            return _nonfinite_in(unit, self._buffers[unit], 0)
        with self._store.read(self.partition(unit)) as (partition,):
            held = partition.view(Kind.GRAD)
            return _nonfinite_in(unit, held, unit.rank_in_parts * held.numel())

    def reset(self) -> None:
        """Forget all gradients: the step is over, or they are not wanted."""
        self._wait_reduce()
        self._begun.clear()
        self.unscaled = False
        for unit in self._units:
            self.arrived[unit] = [False] * len(unit.params)
            for param in unit.params:
                param.grad = None

    def close(self) -> None:
        """Return the buffers of whole gradients and drop what autograd left."""
        # No step begins any more with what still arrives.
        self.on_accumulated = lambda unit: None
        self._take_flying()
        self._wait_copy()
        self._reducer.drop()
        for buffer in self._buffers.values():
            self._ledger.add(Tier.GPU, Kind.FULL_GRAD, -buffer.numel() * buffer.element_size())
        self._buffers.clear()
        for unit in self._units:
            for param in unit.params:
                param.grad = None

    def _refuse_thawed(self) -> None:
        """What was frozen when the plan was made has no place for a gradient, nor states to step it with."""
        thawed = [name for name, param in self._frozen if param.grad is not None]
        if not thawed:
            return
        for _, param in self._frozen:
            param.grad = None
        more = f" and {len(thawed) - 1} more" if len(thawed) > 1 else ""
        raise StateError(
            f"{thawed[0]}{more} did not require a gradient when the engine was made and has no "
            "optimizer states, but has a gradient now: set requires_grad back to False, or "
            "call infinity.initialize() with it trainable and freeze it until you want it, which is always possible"
        )

    def _collect(self, unit: Unit) -> None:
        """Take the gradients that autograd has left on the unit's parameters."""
        with trace.span(trace.ENGINE, "collect gradients", self.partition(unit)):
            self._take(unit)

    def _take(self, unit: Unit) -> None:
        present = [param.grad is not None for param in unit.params]
        for param in unit.params:
            if param.grad is not None and param.grad.layout is not torch.strided:
                # Of an embedding with sparse=True: partitions are dense, and every element is stepped.
                param.grad = param.grad.to_dense()
        self.unscaled |= any(present) and not self.scaled
        self.arrived[unit] = [old or new for old, new in zip(self.arrived[unit], present, strict=True)]
        if not unit.layout.numel:
            self._begun.add(unit)
        elif self._alone:
            if any(present):
                self._accumulate(unit, None)
        elif self._whole:
            self._add_whole(unit)
        else:
            self._start_reduce(unit)
        for param in unit.params:
            param.grad = None

    def _accumulate(self, unit: Unit, reduced: Reduction | None) -> None:
        """Add to the GRAD partition: this rank's slice of the sum, or, without one, the gradients on the parameters
        where this rank is alone. The first arrival of a step replaces what was there; what has no gradient becomes
        zero.
        """
        first = unit not in self._begun
        self._begun.add(unit)
        self._wait_copy()
        copies: list[Transfer] = []
        with ExitStack() as lease:
            (partition,) = lease.enter_context(self._store.write(self.partition(unit)))
            target = partition.view(Kind.GRAD)
            if reduced is not None:
                copies += self._put_sums(target, reduced, first)
            elif not self._alone:
                target.zero_()
            else:
                for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                    piece = target[slot.offset : slot.offset + slot.numel]
                    if param.grad is not None:
                        copies.append(self._put(piece, param.grad.reshape(-1), first))
                    elif first:
                        piece.zero_()
            self._arriving = (unit, lease.pop_all(), copies)
        if all(copy.done() for copy in copies):
            self._wait_copy()

    def _put(self, target: Tensor, source: Tensor, first: bool) -> Transfer:
        """Replace or add, in the target's dtype, across devices. What is replaced travels beside the computation."""
        if first:
            return self._device.copy(target, source)
        _add(target, source.to(target.device))
        return Completed()

    def _put_sums(self, target: Tensor, reduced: Reduction, first: bool) -> list[Transfer]:
        """Replace or add what has been reduced, by pieces where it is not left in place at once."""
        with trace.span(trace.COPY, "sum"):
            if first and not self._device.is_accelerator:
                reduced.leave_in(target)
                return []
            return [self._put(target[begin:][: piece.numel()], piece, first) for begin, piece in reduced.sums()]

    def _wait_copy(self) -> None:
        """Wait for the copies from the device that are in flight, of one unit at most, and return their lease."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            unit, lease, copies = arriving
            with lease, trace.span(trace.WAIT, "copy from the device", self.partition(unit)):
                for copy in copies:
                    self._device.arrived(copy)
            self.on_accumulated(unit)

    def _add_whole(self, unit: Unit) -> None:
        """Stages 0 and 1: accumulate whole gradients on the device."""
        first = unit not in self._begun
        if first and not any(param.grad is not None for param in unit.params):
            return
        self._begun.add(unit)
        buffer = self._buffers[unit]
        if first:
            buffer.zero_()
        for slot, param in zip(unit.layout.slots, unit.params, strict=True):
            if param.grad is not None:
                piece = buffer[slot.offset : slot.offset + slot.numel]
                grad = param.grad.reshape(-1)
                if first:
                    piece.copy_(grad)
                else:
                    _add(piece, grad)

    def _reduce_whole(self, unit: Unit) -> None:
        """Stages 0 and 1, at the boundary: sum over ranks; keep this rank's slice, or everything at stage 0."""
        if not unit.layout.numel:
            return
        buffer = self._buffers[unit]
        if unit not in self._begun:
            buffer.zero_()
        self._begun.add(unit)
        full = self._reducer.copy_of(buffer)
        key = self.partition(unit)
        trace.begin_async("reductions", key, full.nbytes)
        with self._store.write(key) as (partition,), trace.span(trace.WAIT, "reduction", key, full.nbytes):
            self._reducer.reduce(unit, full, partition.view(Kind.GRAD))
        trace.end_async("reductions", key)
        self.on_accumulated(unit)

    def _start_reduce(self, unit: Unit) -> None:
        """Submit the sum over ranks of one unit's gradients; the one before it lands first, so at most one is in
        flight.
        """
        self._wait_reduce()
        full = self._reducer.flat(unit)
        trace.begin_async("reductions", self.partition(unit), full.nbytes)
        self._in_flight = (unit, self._reducer.start(unit, full))

    def _wait_reduce(self) -> None:
        """Wait for the reduction in flight and add its result to the partition."""
        flying = self._take_flying()
        if flying is not None:
            unit, reduction = flying
            with trace.span(trace.WAIT, "reduction", self.partition(unit), unit.layout.numel * self._wire.itemsize):
                reduction.wait()
            trace.end_async("reductions", self.partition(unit))
            self._accumulate(unit, reduction)
        self._wait_copy()

    def _take_flying(self) -> tuple[Unit, Reduction] | None:
        """The reduction in flight, which is no longer this object's."""
        flying, self._in_flight = self._in_flight, None
        return flying


def _add(target: Tensor, source: Tensor) -> None:
    """`target += source`, flat, on one device. Where their dtypes differ torch casts all of it first, on the CPU into
    memory of its own: there it is given a part at a time.
    """
    step = _CAST_NUMEL if target.dtype is not source.dtype and target.is_cpu else max(target.numel(), 1)
    for begin in range(0, target.numel(), step):
        target[begin : begin + step].add_(source[begin : begin + step])


def _nonfinite_in(unit: Unit, values: Tensor, first: int) -> int | None:
    """The last slot with a non-finite element among the unit's elements from `first` on."""
    for overlap in reversed(list(unit.layout.overlaps(first, first + values.numel()))):
        piece = values[overlap.range_start : overlap.range_start + overlap.numel]
        # In fp64 no sum of finite numbers of a shorter type overflows; several times faster than asking each.
        if not math.isfinite(piece.sum(dtype=torch.float64).item()):
            return unit.layout.slots.index(overlap.slot)
    return None
