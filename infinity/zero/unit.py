"""A unit: parameters gathered by one collective into one flat buffer whose views *are* the parameters.

PARTITIONED -> `start_gather` -> GATHERING -> `finish_gather` -> GATHERED -> `release` -> PARTITIONED. The full buffer
is one tensor for life: release frees its bytes, and gather takes and refills them. So the views of a weight that
autograd has saved are valid again when backward runs. A unit that is whole for good is gathered once, and again after
each step: then it has its old values until it is GATHERED.

The flat device memory that a unit is gathered into, and its parameters' places in it.

The copy of this rank's partition into its unit's full buffer, and the lease that the copy needs.

Which values a unit's parameters have, and whether a program has changed them where the change would be lost.

[Note: changes in place] A value changes in its partition, by a step or by `infinity.modify()`. A change that a module
writes into a whole parameter while it runs is lost with the release, sooner or later as placement has it. So a unit's
version counters are compared when its use ends, on every tier alike. The counters of units that are whole for good are
also compared before a step, which would undo what the program has written between two passes.

A counter that has moved says that the parameter was written, not that its values are others: torch's parametrizations
set a parameter to itself, and a program may put back what it has replaced for one call. So the values decide:
- A parameter that is written in its first use, where it is its own partition, or that was written in an earlier use, is
  watched: its fingerprint is taken when a use begins, and again if its counter has moved.
- Any other one is compared with its partition, of which this rank has a part.
- Where it is its own partition, a change is kept by it, unless a master has more digits than the parameter.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum

import torch
from torch import Tensor, nn

from infinity.base import trace
from infinity.base.transfer import Completed, Transfer
from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather
from infinity.errors import StateError, of_another_process
from infinity.log import warn_once
from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.resizable_buffer import let_inherit, occupy, vacate
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import UnitPlacement
from infinity.plan.types import Key, Kind, Tier
from infinity.zero import parameter
from infinity.zero.parameter import name_of


class FullBuffer:
    """One tensor for life, `tensor` [numel], whose bytes come and go; a unit that is whole for good keeps them.

    The ledger has its bytes while it has them. `views`: each parameter's part of it, in the parameter's shape.
    """

    def __init__(self, layout: UnitLayout, placed: UnitPlacement, *, device: Device, ledger: Ledger) -> None:
        dtype = DTYPES[layout.dtype]
        self._ledger = ledger
        self._name = f"the whole of {layout.name}"
        # Whether a unit that is whole for good has given its bytes up for a while.
        self._vacant = False
        # Bytes by kind: this rank's slice is the partition's home where the partition is aliased.
        own = layout.partition_numel(placed.parts) * dtype.itemsize if placed.aliased else 0
        self.kinds = {Kind.FULL: layout.nbytes - own, **({Kind.PARAM: own} if own else {})}
        self._resizable = None if placed.whole else device.resizable(layout.numel, dtype)
        if self._resizable is None:
            with self._booked():
                self.tensor = device.empty(layout.numel, dtype)
        else:
            self.tensor = self._resizable.tensor
        self.views = self._cut(layout)

    @property
    def has_bytes(self) -> bool:
        """Whether the buffer takes memory, for values or for the next gather."""
        return not self._vacant if self._resizable is None else self._resizable.has_bytes

    def take(self) -> None:
        """Give the buffer bytes of undefined content, unless it has some."""
        if self._vacant:
            with self._booked():
                occupy(self.tensor)
            self._vacant = False
        if self._resizable is not None and not self._resizable.has_bytes:
            with self._booked():
                self._resizable.take()

    def vacate(self) -> None:
        """Give up the bytes of a unit that is whole for good, until `take`. Views of it stay views."""
        if self._resizable is None and not self._vacant:
            vacate(self.tensor)
            self._unbook()
            self._vacant = True

    def free(self, *, to_spare: bool = False) -> None:
        """Give the bytes back, or make their pages spare for other buffers."""
        if self._resizable is not None and self._resizable.has_bytes:
            self._resizable.free(to_spare=to_spare)
            self._unbook()

    def close(self) -> None:
        """Book the bytes out, and let go of them where parameters may keep them alive."""
        if self.has_bytes:
            self._unbook()
        if self._resizable is None:
            self.tensor, self.views = self.tensor[:0].clone(), []

    def _cut(self, layout: UnitLayout) -> list[Tensor]:
        """The parameters' views. A buffer whose storage is resized needs its bytes to be cut."""
        with ExitStack() as stack:
            if self._resizable is not None and not self._resizable.mapped:
                self.take()
                stack.callback(self.free)
            return [self.tensor[slot.offset : slot.offset + slot.numel].view(slot.own_shape) for slot in layout.slots]

    def _booked(self) -> AbstractContextManager[None]:
        return self._ledger.taking(Tier.GPU, self.kinds, self._name)

    def _unbook(self) -> None:
        for kind, nbytes in self.kinds.items():
            self._ledger.add(Tier.GPU, kind, -nbytes)


class PartitionCopy:
    """Copies the partition `key`. Until the lease is released the partition must not be written,
    nor its buffer go back to its pool.
    """

    def __init__(self, key: Key, *, store: TieredStore, device: Device) -> None:
        self._key = key
        self._store = store
        self._device = device
        self._transfer: Transfer = Completed()
        self._lease = ExitStack()
        self.leasing = False

    def start(self, target: Tensor, *, wait: bool) -> Transfer:
        """Lease the partition, waiting for it, and submit its copy into `target` [numel / parts]. wait: as in
        `TieredStore.read`.

        Copies end in the order in which they begin, so the lease of one that still runs ends with this one's.
        """
        self.release_lease(wait=False)
        (partition,) = self._lease.enter_context(self._store.read(self._key, wait=wait))
        self.leasing = True
        self._transfer = self._device.copy(target, partition.view(Kind.PARAM))
        self.release_lease(wait=False)
        return self._transfer

    def await_step(self) -> Transfer:
        """Wait for an optimizer step of the partition, which lies in its place already."""
        with self._store.read(self._key):
            return Completed()

    def release_lease(self, *, wait: bool) -> bool:
        """Release the read lease once the copy to the device completes; block if wait=True. False if still leased."""
        if not self.leasing:
            return True
        if not wait and not self._transfer.done():
            return False
        with trace.span(trace.WAIT, "copy to the device", self._key):
            self._device.arrived(self._transfer)
        self._transfer = Completed()
        self.close()
        return True

    def forget_transfer(self) -> None:
        """Do not wait for the copy any more: what it is a part of has ended."""
        self._transfer = Completed()

    def close(self) -> None:
        """Release the lease without waiting for the copy."""
        self.leasing = False
        self._lease.close()


# Words (8 bytes) in a row of what `fingerprint` adds up.
_ROW = 1024


class ValueVersions:
    """The versions of one unit's values: torch's counters (`param._version`), and how often values have changed.

    alone: the parameters are their own partition, so nothing else tells what they were before a use. as_before: asked
    about a parameter that is not watched and was written: whether its values are those of the partitions. None: that
    cannot be told.
    """

    def __init__(self, params: Sequence[nn.Parameter], *, alone: bool, as_before: Callable[[], bool | None]) -> None:
        self._params = params
        self._as_before = as_before
        # How often the values have changed: backward needs the generation that its forward has seen.
        self.generation = 0
        # The counters when the use under way began (None without values), and when the partitions were last copied in.
        self._used: list[int] | None = None
        self._filled: list[int] = []
        # Positions of parameters that were written in some use, and of those that are watched in the next one.
        self._written: set[int] = set()
        self._watched: Collection[int] = range(len(params)) if alone else self._written
        # Fingerprints of watched parameters when the use under way began.
        self._prints: dict[int, Tensor] = {}

    def advance(self) -> None:
        """The partitions are about to get other values."""
        self.generation += 1

    def fill(self) -> None:
        """The parameters have the values of the partitions."""
        self._filled = self._now()

    def begin_use(self, *, visible: bool) -> None:
        """A module begins to use the parameters. visible: they have values (in an embedding's backward they do not)."""
        self._used = self._now() if visible else None
        self._prints = {at: fingerprint(self._params[at]) for at in self._watched} if visible else {}

    def accept(self, *, visible: bool) -> None:
        """The partitions have the changed values now, or the changes are given up."""
        self.advance()
        if visible:
            self._used = self._filled = self._now()

    def changed_in_use(self) -> StateError | None:
        """What to raise at the end of a use in which a parameter was changed in place."""
        found = self._changed_since(
            self._used,
            "was changed in place while the model ran, and the change would be lost when the parameter is released: "
            "change it after engine.step(), inside infinity.modify()",
        )
        self._watched, self._prints = self._written, {}
        return found

    def changed_beside(self) -> StateError | None:
        """What to raise before a step if a parameter was changed in place, and its partition was not."""
        return self._changed_since(
            self._filled,
            "was changed in place, which its partition does not follow, so that a step or a checkpoint would undo the "
            "change: change it inside infinity.modify()",
        )

    def _now(self) -> list[int]:
        return [param._version for param in self._params]

    def _changed_since(self, versions: list[int] | None, why: str) -> StateError | None:
        if versions is None or versions == (now := self._now()):
            return None
        # An error is raised once: what the program does about it needs the unit.
        self._used = self._filled = now
        for at, pair in enumerate(zip(versions, now, strict=True)):
            if pair[0] == pair[1]:
                continue
            self._written.add(at)
            before = self._prints.get(at)
            same = self._as_before() if before is None else torch.equal(before, fingerprint(self._params[at]))
            if not same:
                again = "; if it has its old values again, call once more" if same is None else ""
                return StateError(f"{name_of(self._params[at])} {why}{again}")
        return None


def fingerprint(values: Tensor) -> Tensor:
    """Return sums of the bytes of `values` (contiguous), by row and by column of a table of them: they tell almost
    every change, moved and exchanged values too, and take one or two passes over the memory.
    """
    raw = values.detach().reshape(-1).view(torch.uint8)
    whole = raw.numel() // (8 * _ROW) * 8 * _ROW
    table = raw[:whole].view(torch.int64).view(-1, _ROW)
    return torch.cat([table.sum(0), table.sum(1), raw[whole:].long()])


class GatherState(Enum):
    """What the device holds of a unit; see the module's text."""

    PARTITIONED = "partitioned"
    GATHERING = "gathering"
    GATHERED = "gathered"


class Unit:
    """Gathers and releases one unit's parameters. Reads no configuration and decides nothing."""

    def __init__(
        self, layout: UnitLayout, placed: UnitPlacement, params: Sequence[nn.Parameter], *, store: TieredStore,
        device: Device, group: AxisGroup, ledger: Ledger,
    ) -> None:  # fmt: skip
        self.layout = layout
        self.placed = placed
        self.params = tuple(params)
        self.key, self.grad_key = Key(Kind.PARAM, layout.index), Key(Kind.GRAD, layout.index)
        self.state = GatherState.PARTITIONED
        # Whether the parameters look partitioned while the unit is gathered.
        self._hidden = False
        self.versions = ValueVersions(self.params, alone=placed.aliased, as_before=self._as_before)
        self.buffer = FullBuffer(layout, placed, device=device, ledger=ledger)
        self._store = store
        self._copy = PartitionCopy(self.key, store=store, device=device)
        self._group = group
        self._device = device
        self._transfer: Transfer = Completed()
        dtype = DTYPES[layout.dtype]
        self._placeholders = [parameter.placeholder(slot.own_shape, dtype, device.torch) for slot in layout.slots]
        _open[self] = os.getpid()
        if placed.whole:
            self.full.zero_()
            if placed.aliased:
                store.adopt(self.key, self.local_partition.view(torch.uint8))

    @property
    def full(self) -> Tensor:
        """The full buffer [numel]: all ranks' partitions, one after the other. Valid while it has bytes."""
        return self.buffer.tensor

    @property
    def local_partition(self) -> Tensor:
        """This rank's partition inside the full buffer: [numel / parts]. Valid while the buffer has bytes."""
        numel = self.layout.partition_numel(self.placed.parts)
        start = self.rank_in_parts * numel
        return self.full[start : start + numel]

    @property
    def rank_in_parts(self) -> int:
        """Which of the unit's partitions is this rank's."""
        return self._group.index if self.placed.parts > 1 else 0

    def start_gather(self, *, wait: bool = True) -> None:
        """Submit the copy and the collective that fill the full buffer. Waits only for this rank's own partition; with
        `wait` also for room for it, else TierMemoryError where there is none.
        """
        if self.state is not GatherState.PARTITIONED:
            return
        self.buffer.take()
        self.state = GatherState.GATHERING
        try:
            if self.placed.aliased and self._store[self.key].absent:
                # It was vacated.
                self._store.adopt(self.key, self.local_partition.view(torch.uint8))
            self._transfer = self._fill(wait)
        except BaseException:
            if self.placed.whole:
                self.state = GatherState.PARTITIONED
            self.release()
            raise

    def finish_gather(self) -> None:
        """Wait for the bytes and make the parameters whole."""
        if self.state is GatherState.GATHERED:
            self._show()
            return
        self.start_gather()
        with trace.span(trace.WAIT, "gather", self.key, self.layout.nbytes):
            self._transfer.wait()
        trace.end_async("gathers", self.key)
        self.release_lease(wait=False)
        self._hidden = True
        self.state = GatherState.GATHERED
        self._show()
        self.versions.fill()

    def _show(self) -> None:
        if self._hidden:
            for param, view in zip(self.params, self.buffer.views, strict=True):
                parameter.restore(param, view)
            self._hidden = False

    def begin_use(self) -> None:
        """A module begins to use the whole values. See [Note: changes in place]."""
        self.versions.begin_use(visible=self.visible)

    def end_use(self) -> StateError | None:
        """The module is done. Returns what to raise if it has changed a parameter in place."""
        return self.versions.changed_in_use() if self.visible else None

    def changed_beside(self) -> StateError | None:
        """What to raise if a parameter that is whole for good was changed, and its partition was not."""
        if not self.placed.whole or not self.visible:
            return None
        for param, view in zip(self.params, self.buffer.views, strict=True):
            if param.data_ptr() != view.data_ptr():
                self.reassigned_data(param)
                return StateError(
                    f"{parameter.name_of(param)}.data was assigned, which its partition does not follow, and what was "
                    "assigned is dropped: assign it inside infinity.modify()"
                )
        return None if self._follows else self.versions.changed_beside()

    def accept_changes(self) -> None:
        """The partition has the changed values now, or the changes are given up."""
        self.versions.accept(visible=self.visible)

    def reassigned_data(self, param: nn.Parameter) -> Tensor | None:
        """Data that was assigned to a whole parameter (`param.data = ...`), which gets its place in the unit back."""
        index = next(index for index, other in enumerate(self.params) if other is param)
        view = self.buffer.views[index]
        assigned = param.data
        if assigned.shape == view.shape and assigned.data_ptr() == view.data_ptr():
            return None
        parameter.restore(param, view)
        return assigned

    def release_lease(self, *, wait: bool) -> bool:
        """Release the partition's lease once its copy out completes; block if wait=True. False if still leased."""
        return self._copy.release_lease(wait=wait)

    @property
    def leasing(self) -> bool:
        """Whether the copy to the device still holds the partition's lease."""
        return self._copy.leasing

    @property
    def visible(self) -> bool:
        """Whether the parameters are whole."""
        return self.state is GatherState.GATHERED and not self._hidden

    def release(self, *, keep_bytes: bool = False) -> None:
        """Let go of the whole values; the parameters keep their logical shapes. A unit that is whole for good stays.

        keep_bytes: leave the full buffer's memory to the next gather, until `free`.
        """
        if self.placed.whole or self.state is GatherState.PARTITIONED:
            if self.state is GatherState.GATHERING:
                self.state = GatherState.PARTITIONED
                if not self.placed.aliased:
                    # The partition has the values; where it lies in this buffer, only the buffer has.
                    self.buffer.vacate()
            return
        if self.state is GatherState.GATHERING:
            self._transfer.wait()
            trace.end_async("gathers", self.key)
        self.set_placeholders()
        # The host does not wait: the device has been told to, before it may use the bytes for something else.
        self.release_lease(wait=False)
        self.state = GatherState.PARTITIONED
        if not keep_bytes:
            self.free()

    def free(self, *, to_spare: bool = False) -> None:
        """Give the memory of a released unit's full buffer back, or leave its pages to other units' buffers."""
        if self.state is GatherState.PARTITIONED:
            self.buffer.free(to_spare=to_spare)

    def vacate(self) -> None:
        """Give up the whole values of a unit that is whole for good, until the next gather; its partition, if that is
        a view of them, has been offloaded.
        """
        if self.placed.whole and self.state is not GatherState.GATHERING:
            self.set_placeholders()
            self.state = GatherState.PARTITIONED
            self.buffer.vacate()

    @property
    def vacant(self) -> bool:
        """Whether a unit that is whole for good has given up its values: its next gather needs all ranks."""
        return self.placed.whole and not self.buffer.has_bytes

    def abandon(self) -> None:
        """Release after an error. A gather that still runs keeps its buffer: waiting for it might fail the same way."""
        if self.state is GatherState.GATHERING:
            if not self._transfer.done():
                return
            self._transfer = Completed()
            self._copy.forget_transfer()
        self.release()

    def set_placeholders(self) -> None:
        """Make every parameter of the unit look partitioned, also where its bytes are kept for a later use: another
        module that uses one meanwhile must ask for it, so that its backward has it too.
        """
        self._hidden = True
        for param, view, stand_in in zip(self.params, self.buffer.views, self._placeholders, strict=True):
            if parameter.is_released(param):
                continue
            if param.data_ptr() != view.data_ptr():
                warn_once(
                    "data-assigned",
                    f"{parameter.name_of(param)}.data was assigned while the parameter was whole: what was assigned is "
                    "gone with its release; use infinity.modify() to change a parameter",
                )
            parameter.release(param, stand_in)

    def disown(self, owner: int) -> None:
        """In a forked child of process `owner`: the parameters say so where their data is used. See [Note: forks]."""
        elsewhere = _Elsewhere(owner)
        for param, stand_in in zip(self.params, self._placeholders, strict=True):
            for each in {id(each): each for each in (param, parameter.whole_of(param))}.values():
                parameter.attach(each, elsewhere)
            if not parameter.is_released(param):
                parameter.release(param, stand_in)

    def stepped(self) -> None:
        """The optimizer has changed the partition: a backward of what was computed with older values is refused."""
        self.versions.advance()

    def outdate(self, *, hide: bool) -> None:
        """The partitions of a unit that is whole for good get other values: it is to be gathered again. hide: the
        parameters look partitioned until then.
        """
        self.state = GatherState.PARTITIONED
        if hide:
            self.set_placeholders()

    def close(self) -> None:
        """Drop the partition's lease and stop booking; parameters that are whole keep their values."""
        self._copy.close()
        _open.pop(self, None)
        if self.placed.whole and self.state is GatherState.GATHERED:
            # From now on the parameters are the program's, in its children too.
            let_inherit(self.full)
            if self._hidden:
                # Its step has failed.
                return
            for param in map(parameter.whole_of, self.params):
                parameter.forget(param)
        self.buffer.close()

    @property
    def _follows(self) -> bool:
        """Whether a change of a whole parameter is one of its partition, and of all that a step begins with."""
        return self.placed.aliased and (self.layout.dtype == "fp32" or not self.layout.trainable)

    def _as_before(self) -> bool | None:
        """Whether the whole values are those of the partition, of which this rank has a part; None: that is not known,
        because they are the partition, and a master has further digits.
        """
        if self.placed.aliased:
            return True if self._follows else None
        self.release_lease(wait=True)
        with self._store.read(self.key) as (partition,):
            kept = partition.view(Kind.PARAM)[: self.local_partition.numel()]
            return torch.equal(kept.view(torch.uint8).to(self.full.device), self.local_partition.view(torch.uint8))

    def _fill(self, wait: bool) -> Transfer:
        """Put this rank's partition into its place in the full buffer and gather the others'."""
        trace.begin_async("gathers", self.key, self.layout.nbytes)
        copied = self._copy.await_step() if self.placed.aliased else self._copy.start(self.local_partition, wait=wait)
        if self.placed.parts == 1 or not self.layout.numel:
            return copied
        with trace.span(trace.WAIT, "copy to the device", self.key):
            after_copy = self._device.following(copied)
        with after_copy:
            return all_gather(self.full, self.local_partition, self._group, f"gather of {self.layout.name}")


class _Elsewhere:
    """The owner of parameters whose engine is another process's: this one is a forked child."""

    def __init__(self, owner: int) -> None:
        self._owner = owner
        self.gathers_on_use = False

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        raise of_another_process(f"use {parameter.name_of(params[0])} ({use})", self._owner)


# Units that are not closed, and the process that made each. See [Note: forks] in `infinity.memory.resizable_buffer`.
_open: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    for unit, owner in list(_open.items()):
        unit.disown(owner)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
