"""The step of sub-groups. `SubGroupUpdater` does one: lease its partitions, cut them where hyper-parameters change,
apply the update rule. `StepPass` goes over all: step those that are ready, fetch the next, flush what no later one
needs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from infinity.base import trace
from infinity.base.transfer import Transfer
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.memory.transaction import Reservation
from infinity.optim.muon import MuonRule
from infinity.optim.update_rules import Rules, Segment, StepContext, StepSlice, UpdateRule
from infinity.plan.layout import SubGroup
from infinity.plan.orders import ReadyQueue
from infinity.plan.partitions import STEP_READS, changed_by, read_by
from infinity.plan.plan import Plan
from infinity.plan.types import CACHE_LINE, Key, Kind, align_up


def touched_by(groups: Sequence[SubGroup]) -> list[Key]:
    """Every partition that a step of these sub-groups reads or writes, once for each sub-group that does."""
    return [key for group in groups for key in (*changed_by(group), *read_by(group))]


class SubGroupUpdater:
    """Steps sub-groups in place, each with its update rule.

    index: this rank's place among the ranks that share a unit.
    grad_bound: each gradient element is clamped to this magnitude, once scaled; infinity for no clamp.

    [Note: stepped elsewhere] Values are stepped where the states lie. Those with another home are copied there first;
    into CPU memory through the plan's staging. On the way back the device orders the copies with the program's stream,
    and the host waits only before it uses the staging again. What is staged was last used before the step began, so its
    copies, in both directions, do not wait for what the program has queued since.
    """

    def __init__(
        self, plan: Plan, store: TieredStore, rules: Rules, *, device: Device, index: int, grad_bound: float
    ) -> None:
        self._plan = plan
        self._store = store
        self._rules = rules
        self._device = device
        self._index = index
        self._grad_bound = grad_bound
        # Copies out of the staging that may still run, and the bytes of it that the sub-group in work uses.
        self._leaving: list[Transfer] = []
        self._staged_nbytes = 0

    def meets(self, group: SubGroup) -> bool:
        """Whether all ranks step a sub-group together."""
        return self._plan.meets(group)

    def mark(self) -> Any:
        """Return the device's mark of a step's begin, for what is copied in it."""
        return self._device.mark()

    def update(self, group: SubGroup, context: StepContext, by: Reservation | None) -> None:
        """Step one sub-group; its partitions are fetched first if they are not in memory.

        by: the reservation that holds the partitions, if the step runs behind the program.
        """
        with (
            self._store.read(*read_by(group), by=by) as grads,
            self._store.write(*changed_by(group), by=by) as (states, *params),
        ):
            rule = self._rules[self._plan.layouts[group.slices[0].unit].rule]
            # By the group's slices.
            found: list[list[StepSlice]] = []
            # What was copied to where the states lie: the copies, and whole parameters with their homes.
            arriving: list[Transfer] = []
            copies: list[tuple[Tensor, Tensor]] = []
            assert states.buffer is not None
            device = states.buffer.device
            views = {section.kind: states.view(section.kind) for section in states.spec.sections}
            for (piece, at), grad, param in zip(group.placed(), grads, params, strict=True):
                span = slice(piece.start, piece.stop)
                home = param.view(Kind.PARAM)[span]
                local = self._bring(home, device, arriving, context.begun)
                local_grad = self._bring(grad.view(Kind.GRAD)[span], device, arriving, context.begun)
                if local is not home:
                    copies.append((home, local))
                layout = self._plan.layouts[piece.unit]
                parts = self._plan.placement.units[piece.unit].parts
                first = layout.partition_start(parts, self._index) + piece.start
                found.append([
                    _slice(rule, views, at, local, local_grad, segment, context.hyper[segment.group])
                    for segment in context.segments(layout, piece, first, joins=rule.joins)
                ])
            for transfer in arriving:
                self._arrive(transfer, device)
            with trace.span(trace.COMPUTE, "optimizer", states.key, states.spec.nbytes):
                self._apply(rule, group, context, found)
            self._return(copies, context.begun)

    def _apply(
        self, rule: UpdateRule, group: SubGroup, context: StepContext, found: Sequence[list[StepSlice]]
    ) -> None:
        scaled, bound = context.grad_scale, self._grad_bound
        if not (isinstance(rule, MuonRule) and self._plan.meets(group)):
            rule.step([each for slices in found for each in slices], grad_scale=scaled, grad_bound=bound)
            return
        for piece, slices in zip(group.slices, found, strict=True):
            layout, parts = self._plan.layouts[piece.unit], self._plan.placement.units[piece.unit].parts
            rule.step_together(
                layout, piece, parts, context.stepped(layout), slices, grad_scale=scaled, grad_bound=bound
            )

    def _bring(self, tensor: Tensor, device: torch.device, arriving: list[Transfer], begun: Any) -> Tensor:
        """The tensor, if it lies where the states lie; else a copy that is added to `arriving`."""
        if tensor.device == device:
            return tensor
        if device.type != "cpu":
            copy = self._device.empty(tensor.numel(), tensor.dtype)
            arriving.append(self._device.copy(copy, tensor))
        else:
            for transfer in self._leaving:
                self._device.arrived(transfer)
            self._leaving.clear()
            begin, end = self._staged_nbytes, self._staged_nbytes + tensor.nbytes
            self._staged_nbytes = align_up(end, CACHE_LINE)
            copy = self._store.staging[begin:end].view(tensor.dtype)
            arriving.append(self._device.copy_since(copy, tensor, begun))
        return copy

    def _arrive(self, transfer: Transfer, device: torch.device) -> None:
        """Wait for a copy to a device: the host, if that is the CPU; else only the device."""
        if device.type == "cpu":
            self._device.arrived(transfer)
        else:
            transfer.wait()

    def _return(self, copies: Sequence[tuple[Tensor, Tensor]], begun: Any) -> None:
        """Copy stepped parameters to their homes, which the program may use at once."""
        for home, local in copies:
            staged = local.is_cpu
            transfer = self._device.copy_since(home, local, begun) if staged else self._device.copy(home, local)
            self._arrive(transfer, home.device)
            if not home.is_cpu:
                self._leaving.append(transfer)
        self._staged_nbytes = 0


def _slice(
    rule: UpdateRule, states: Mapping[Kind, Tensor], at: int, param: Tensor, grad: Tensor, segment: Segment,
    hyper: object,
) -> StepSlice:  # fmt: skip
    """Return a segment with its states. at: where the states of its slice, `param` and `grad`, begin in the
    sub-group's.
    """
    own = slice(segment.start, segment.start + segment.numel)
    begin, numel = at + segment.start, segment.numel
    remainder, master = states.get(Kind.REMAINDER), states.get(Kind.MASTER)
    return StepSlice(
        segment, hyper, param[own], grad[own], [states[kind][kind.span(begin, numel)] for kind in rule.moments],
        remainder=None if remainder is None else remainder[begin : begin + numel],
        master=None if master is None else master[begin : begin + numel],
    )


def prefetch(store: TieredStore, by: Reservation | None, group: SubGroup, *, complete: bool = True) -> bool:
    """Begin to read what a sub-group's step needs, gradients only if they are complete; False if there is no room."""
    return store.prefetch(*changed_by(group), *(read_by(group) if complete else ()), by=by)


def in_memory(store: TieredStore, group: SubGroup) -> bool:
    """Whether a sub-group with states on NVMe can be stepped without a read.

    Only then is it worth stepping first: a parameter that is fetched for a few of its sub-groups would be written back
    for others, and fetched again for the rest.
    """
    keys = changed_by(group)
    return store[keys[0]].on_drive and all(map(store.in_memory, keys))


class StepPass:
    """The sub-groups of one step, from ready to flushed.

    order: every sub-group of the pass, those that are needed first in front.
    reservation: holds the partitions of a pass behind the program; None if the pass runs in the program's own thread.
    """

    def __init__(
        self, order: Sequence[SubGroup], store: TieredStore, updater: SubGroupUpdater, reservation: Reservation | None
    ) -> None:
        self.reservation = reservation
        # Indices of the sub-groups that were made ready.
        self.begun: set[int] = set()
        self._store = store
        self._updater = updater
        # How many sub-groups are still to use each partition.
        self._uses = Counter(touched_by(order))
        self._ready = ReadyQueue[StepContext](order)

    def reserve(self, groups: Sequence[SubGroup]) -> None:
        """Hold the partitions of these sub-groups until they are stepped."""
        assert self.reservation is not None
        self._store.access.reserve(self.reservation, *touched_by(groups))

    def add(self, groups: Sequence[SubGroup], context: StepContext) -> None:
        """Make these sub-groups ready."""
        self.begun.update(group.index for group in groups)
        # Where ranks meet, they do so in one order.
        alone = not any(map(self._updater.meets, groups))
        self._ready.add(groups, context, partial(in_memory, self._store) if alone else lambda group: False)

    def fetch_ahead(self, count: int = 1) -> None:
        """Begin to fetch the sub-groups that are next, as far as there is room."""
        self._ready.fetch(count, partial(prefetch, self._store, self.reservation))

    def run(self, count: int, stopping: threading.Event) -> None:
        """Step `count` ready sub-groups, one after the other; end early if `stopping` is set or the store refuses."""
        for _ in range(count):
            if stopping.is_set():
                return
            if self.reservation is not None and not self._store.access.begin_work(self.reservation):
                return
            done: list[Key] = []
            try:
                group, context = self._ready.take()
                self.fetch_ahead(STEP_READS)
                keys = touched_by([group])
                self._uses.subtract(keys)
                self._updater.update(group, context, self.reservation)
                last = [key for key in keys if self._uses[key] <= 0]
                self._store.flush(*last)
                done = last
            finally:
                if self.reservation is not None:
                    self._store.access.end_work(self.reservation, *done)
