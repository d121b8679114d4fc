"""This rank's GRAD partitions: gradients are put there as they arrive, and read there by the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor

from infinity.distributed.collectives import Reduction
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.types import Key, Kind
from infinity.zero.unit import Unit

# Elements that are cast at a time where gradients are added in another dtype than they arrive in.
_CAST_NUMEL = 1 << 20


class GradientPartitions:
    """Replaces or adds to partitions. Copies from the device run beside the computation, one unit's at a time."""

    def __init__(self, store: TieredStore, device: Device) -> None:
        self._store = store
        self._device = device
        # The unit whose gradients are being copied from the device, the lease of its partition, and the copies.
        self._arriving: tuple[Unit, ExitStack, list[Transfer]] | None = None

    @contextmanager
    def read(self, unit: Unit) -> Iterator[Tensor]:
        """A unit's partition [numel / parts] in the gradients' dtype, for reading."""
        with self._store.read(key_of(unit)) as (partition,):
            yield partition.view(Kind.GRAD)

    @contextmanager
    def write(self, unit: Unit) -> Iterator[Tensor]:
        """The same for writing."""
        with self._store.write(key_of(unit)) as (partition,):
            yield partition.view(Kind.GRAD)

    def put_sums(self, unit: Unit, reduced: Reduction, *, first: bool) -> None:
        """Replace (`first`) or add this rank's slice of a sum over ranks. Nothing else is arriving."""
        with self._beginning(unit) as (target, copies), trace.span(trace.COPY, "sum"):
            if first and not self._device.is_accelerator:
                reduced.leave_in(target)
                return
            for begin, piece in reduced.sums():
                copies.append(self._put(target[begin:][: piece.numel()], piece, first))

    def put_own(self, unit: Unit, *, first: bool) -> None:
        """Replace or add the gradients on the unit's parameters, of a rank that is alone. Without one it is zero."""
        with self._beginning(unit) as (target, copies):
            for slot, param in zip(unit.layout.slots, unit.params, strict=True):
                piece = target[slot.offset : slot.offset + slot.numel]
                if param.grad is not None:
                    copies.append(self._put(piece, param.grad.reshape(-1), first))
                elif first:
                    piece.zero_()

    def put_zero(self, unit: Unit) -> None:
        """Replace a unit's gradients by zero."""
        with self._beginning(unit) as (target, _):
            target.zero_()

    def arrive(self, *, wait: bool) -> Unit | None:
        """End the copies in flight. Returns the unit whose gradients have arrived with them; None without copies, or
        if they are still running and `wait` is False.
        """
        if self._arriving is None or (not wait and not all(copy.done() for copy in self._arriving[2])):
            return None
        (unit, lease, copies), self._arriving = self._arriving, None
        with lease, trace.span(trace.WAIT, "copy from the device", key_of(unit)):
            for copy in copies:
                self._device.arrived(copy)
        return unit

    @contextmanager
    def _beginning(self, unit: Unit) -> Iterator[tuple[Tensor, list[Transfer]]]:
        """(the partition to write, the copies that the block adds); they hold the lease until `arrive`."""
        assert self._arriving is None
        copies: list[Transfer] = []
        with ExitStack() as lease:
            (partition,) = lease.enter_context(self._store.write(key_of(unit)))
            yield partition.view(Kind.GRAD), copies
            self._arriving = unit, lease.pop_all(), copies

    def _put(self, target: Tensor, source: Tensor, first: bool) -> Transfer:
        """Replace or add, in the target's dtype, across devices. What is replaced travels beside the computation."""
        if first:
            return self._device.copy(target, source)
        add(target, source.to(target.device))
        return Completed()


def key_of(unit: Unit) -> Key:
    """The key of a unit's GRAD partition."""
    return Key(Kind.GRAD, unit.layout.index)


def add(target: Tensor, source: Tensor) -> None:
    """`target += source`, flat, on one device. Where their dtypes differ torch casts all of the source first, on the
    CPU into memory of its own; there it is given a part at a time.
    """
    step = _CAST_NUMEL if target.dtype is not source.dtype and target.is_cpu else max(target.numel(), 1)
    for begin in range(0, target.numel(), step):
        target[begin : begin + step].add_(source[begin : begin + step])
