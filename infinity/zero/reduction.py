"""The sum of a unit's gradients over ranks, and the memory on the device that sums work in, one after the other.

With several ranks the reductions of one backward run in one fixed order, so that every rank starts the same collective
whatever its own graph looked like. It is the plan's order reversed at first; after the first backward it is the order
in which rank 0's units really finished.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from infinity.base import trace
from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import Reduction, exchange
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.tiers.device import Device
from infinity.plan.plan import Plan
from infinity.plan.pools import MINE_COUNT, travels_alone
from infinity.plan.types import Kind, Tier
from infinity.zero.unit import Unit


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Flat memory; what the plan has no bytes for is empty."""

    full: Tensor
    workspace: Tensor
    # Used by turns, so that one is copied away while the next sum comes into the other.
    mine: tuple[Tensor, ...]


class Reducer:
    """Reduces units, of which at most one at a time is in flight. Its memory is made at the first reduction: as many
    bytes as the plan has.
    """

    def __init__(self, plan: Plan, *, device: Device, group: AxisGroup, ledger: Ledger) -> None:
        self._travelling = plan.request.communication_dtype
        # In which gradients travel.
        self.dtype = DTYPES[self._travelling]
        self._planned = plan.pools.scratch
        self._device = device
        self._group = group
        self._ledger = ledger
        self._made: _Scratch | None = None
        self._turn = 0
        self._in_flight: tuple[Unit, Reduction] | None = None
        # Its sum is not wanted here any more.
        self._abandoned: Reduction | None = None

    def submit(self, unit: Unit) -> None:
        """Begin to sum the gradients on a unit's parameters over ranks. No other reduction is in flight. Collective."""
        assert self._in_flight is None
        full = self._flat(unit)
        trace.begin_async("reductions", unit.grad_key, full.nbytes)
        self._in_flight = unit, self._start(unit, full)

    def wait(self) -> tuple[Unit, Reduction] | None:
        """Wait for the reduction in flight. Returns its unit and its result; None without one."""
        finished, self._in_flight = self._in_flight, None
        if finished is None:
            return None
        unit, reduction = finished
        with trace.span(trace.WAIT, "reduction", unit.grad_key, unit.layout.numel * self.dtype.itemsize):
            reduction.wait()
        trace.end_async("reductions", unit.grad_key)
        return finished

    def reduce(self, unit: Unit, whole: Tensor, target: Tensor) -> None:
        """Sum a unit's whole gradients [numel] over ranks, and wait for it. `target` gets this rank's slice, or all of
        the sum where nothing is partitioned. Collective.
        """
        self._settle()
        # In the dtype that travels: themselves, where they are kept in it.
        full, key = self._scratch().full, unit.grad_key
        full = full[: whole.numel()].copy_(whole) if full.numel() else whole
        trace.begin_async("reductions", key, full.nbytes)
        with trace.span(trace.WAIT, "reduction", key, full.nbytes):
            if unit.placed.parts == 1:
                collectives.all_reduce(full, self._group, f"reduction of {unit.layout.name}").wait()
                target.copy_(full)
            else:
                # Into the partition itself where it can take the sum as it is.
                reduction = self._start(unit, full, target)
                reduction.wait()
                reduction.leave_in(target)
        trace.end_async("reductions", key)

    def abandon(self) -> None:
        """Give up the sum in flight. Other ranks may want it, and it uses the memory until it is over, so the next
        reduction waits for it. Dropped before that, it would take from another rank what that sends next.
        """
        if self._in_flight is not None:
            (_, self._abandoned), self._in_flight = self._in_flight, None

    def drop_memory(self) -> None:
        """Give the memory up until the next reduction; none is in flight."""
        self._settle()
        if self._made is not None:
            self._ledger.add(Tier.GPU, Kind.FULL_GRAD, -self._planned.nbytes)
        self._made = None

    def close(self) -> None:
        """Drop the memory. A reduction that is still in flight keeps what it needs."""
        self._in_flight = self._abandoned = None
        self.drop_memory()

    def _flat(self, unit: Unit) -> Tensor:
        """A unit's gradients [numel] as its layout has them, zero where there are none: autograd's own where that is
        one tensor of the dtype that travels.
        """
        self._settle()
        layout, grads = unit.layout, [param.grad for param in unit.params]
        if travels_alone(layout, self._travelling):
            (grad,) = grads
            if grad is None:
                return self._device.empty(layout.numel, self.dtype).zero_()
            return grad.reshape(-1).to(self.dtype)
        full, end = self._scratch().full[: layout.numel], 0
        for slot, grad in zip(layout.slots, grads, strict=True):
            if grad is not None:
                full[end : slot.offset].zero_()
                end = slot.offset + slot.numel
                full[slot.offset : end].copy_(grad.reshape(-1))
        full[end:].zero_()
        return full

    def _start(self, unit: Unit, full: Tensor, target: Tensor | None = None) -> Reduction:
        """Begin to sum `full` [numel] over ranks. target: this rank's slice of the sum may be left there."""
        scratch, own = self._scratch(), unit.layout.partition_numel(unit.placed.parts)
        mine = target
        if scratch.mine:
            self._turn = (self._turn + 1) % len(scratch.mine)
            mine = scratch.mine[self._turn][:own]
            self._device.before_overwrite(mine)
        return collectives.reduce_scatter(
            full, group=self._group, name=f"reduction of {unit.layout.name}",
            mine=mine,
            workspace=scratch.workspace[: full.numel() - own] if scratch.workspace.numel() else None,
        )  # fmt: skip

    def _settle(self) -> None:
        abandoned, self._abandoned = self._abandoned, None
        if abandoned is not None:
            abandoned.wait()

    def _scratch(self) -> _Scratch:
        if self._made is None:
            planned, width = self._planned, self.dtype.itemsize
            kinds = {Kind.FULL_GRAD: planned.nbytes}
            with self._ledger.taking(Tier.GPU, kinds, "gradients on their way into a reduction"):
                self._made = _Scratch(
                    full=self._device.empty(planned.full_nbytes // width, self.dtype),
                    workspace=self._device.empty(planned.workspace_nbytes // width, self.dtype),
                    mine=tuple(
                        self._device.empty(planned.mine_nbytes // MINE_COUNT // width, self.dtype)
                        for _ in range(MINE_COUNT if planned.mine_nbytes else 0)
                    ),
                )
        return self._made


class ReductionOrders:
    """The orders of the stages that this rank runs, whose backwards are apart; one without a pipeline."""

    def __init__(self, units: Sequence[Unit], chunks: Sequence[Sequence[Unit]]) -> None:
        """units: all of them. chunks: those of each stage."""
        self._orders = [ReductionOrder(chunk) for chunk in chunks] or [ReductionOrder(units)]
        # That of the backward at hand.
        self.current = self._orders[0]
        # Whether it leaves gradients on the parameters, because those of weights come later.
        self.leaves = False

    @property
    def units(self) -> list[Unit]:
        """All units, each once."""
        return [*dict.fromkeys(unit for order in self._orders for unit in order.units)]

    def begin_backward(self, chunk: int, *, leaves: bool) -> None:
        """A backward begins through a stage of this rank."""
        self.current, self.leaves = self._orders[chunk], leaves

    def agree(self, group: AxisGroup) -> None:
        """As `ReductionOrder.agree`, for each."""
        for order in self._orders:
            order.agree(group)


class ReductionOrder:
    """Hands out units in turn, and records the order in which a backward finishes with them."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = list(reversed(units))
        # How many units of this backward have had their turn.
        self._turn = 0
        # Units that this backward is done with, in the order in which it was.
        self._finished: dict[Unit, None] = {}
        # Whether the ranks have agreed on the order.
        self._agreed = False
        # Unit indices in the order of the latest backward.
        self._seen = [unit.layout.index for unit in self.units]

    def ready(self, unit: Unit) -> Iterator[Unit]:
        """Backward is done with a unit. Yields the units whose turn has come."""
        self._finished[unit] = None
        while self._turn < len(self.units) and self.units[self._turn] in self._finished:
            self._turn += 1
            yield self.units[self._turn - 1]

    def rest(self) -> list[Unit]:
        """The units that have not had their turn in this backward."""
        return self.units[self._turn :]

    def end_backward(self) -> None:
        """All units have had their turn."""
        rest = [unit for unit in self.units if unit not in self._finished]
        self._seen = [unit.layout.index for unit in [*self._finished, *rest]]
        self.abandon_backward()

    def abandon_backward(self) -> None:
        """Begin anew with the next backward."""
        self._turn = 0
        self._finished.clear()

    def agree(self, group: AxisGroup) -> None:
        """Take over the order of rank 0's latest backward. Collective, once."""
        if self._agreed:
            return
        self._agreed = True
        everyone = exchange([float(index) for index in self._seen], group, "agreement on the order of reductions")
        by_index = {unit.layout.index: unit for unit in self.units}
        self.units = [by_index[int(index)] for index in everyone[0]]
