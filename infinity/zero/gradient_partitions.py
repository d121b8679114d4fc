"""This rank's GRAD partitions: gradients are put there as they arrive, and read there by the optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from torch import Tensor

from infinity.distributed.collectives import Reduction
from infinity.memory.partition import Partition
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.ops.transfer import Transfer
from infinity.plan.types import Kind
from infinity.zero.unit import Unit


class _Arrival(NamedTuple):
    """Copies from the device into a unit's partition, and the lease of the partition that they need."""

    unit: Unit
    partition: Partition
    lease: ExitStack
    copies: list[Transfer]


class GradientPartitions:
    """Replaces or adds to partitions. Copies from the device run beside the computation; they arrive in their order."""

    def __init__(self, store: TieredStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._arriving: deque[_Arrival] = deque()

    @contextmanager
    def read(self, unit: Unit) -> Iterator[Tensor]:
        """A unit's partition [numel / parts] in the gradients' dtype, for reading."""
        with self._store.read(unit.grad_key) as (partition,):
            yield partition.view(Kind.GRAD)

    @contextmanager
    def write(self, unit: Unit) -> Iterator[Tensor]:
        """The same for writing."""
        with self._store.write(unit.grad_key) as (partition,):
            yield partition.view(Kind.GRAD)

    def put_sums(self, unit: Unit, reduced: Reduction, *, first: bool) -> None:
        """Replace (`first`) or add this rank's slice of a sum over ranks."""
        with self._beginning(unit) as (target, copies, before), trace.span(trace.COPY, "sum"):
            if first and not self._device.is_accelerator:
                reduced.leave_in(target)
                return
            for begin, piece in reduced.sums():
                copies.append(self._put(target[begin:][: piece.numel()], piece, first, before))

    def put_own(self, unit: Unit, *, first: bool) -> None:
        """Replace or add the gradients on the unit's parameters, of a rank that is alone. Without one it is zero."""
        with self._beginning(unit) as (target, copies, before):
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                piece = target[slot.offset : slot.offset + slot.numel]
                if param.grad is not None:
                    copies.append(self._put(piece, param.grad.reshape(-1), first, before))
                elif first:
                    piece.zero_()

    def put_zero(self, unit: Unit) -> None:
        """Replace a unit's gradients by zero."""
        with self._beginning(unit) as (target, *_):
            target.zero_()

    def arrive(self, *, wait: bool = False) -> list[Unit]:
        """End copies, in their order: those that are over, or all of them to `wait`. Returns the units whose gradients
        have arrived with them.
        """
        arrived: list[Unit] = []
        while self._arriving and (wait or all(copy.done() for copy in self._arriving[0].copies)):
            each = self._arriving.popleft()
            with each.lease, trace.span(trace.WAIT, "copy from the device", each.unit.grad_key):
                for copy in each.copies:
                    self._device.arrived(copy)
            arrived.append(each.unit)
        return arrived

    @contextmanager
    def _beginning(self, unit: Unit) -> Iterator[tuple[Tensor, list[Transfer], list[Transfer]]]:
        """(the partition to write, the copies that the block adds, the unit's copies that are still arriving). All of
        them hold the lease until `arrive`.
        """
        earlier = next((each for each in self._arriving if each.unit is unit), None)
        copies: list[Transfer] = []
        before: list[Transfer] = []
        with ExitStack() as lease:
            if earlier is None:
                (partition,) = lease.enter_context(self._store.write(unit.grad_key))
            else:
                self._arriving.remove(earlier)
                lease.push(earlier.lease)
                partition, before = earlier.partition, earlier.copies
            yield partition.view(Kind.GRAD), copies, before
            self._arriving.append(_Arrival(unit, partition, lease.pop_all(), copies + before))

    def _put(self, target: Tensor, source: Tensor, first: bool, before: Sequence[Transfer]) -> Transfer:
        """Replace or add, in the target's dtype, across devices."""
        return self._device.copy(target, source) if first else self._device.add(target, source, before)
