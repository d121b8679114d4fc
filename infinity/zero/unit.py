"""A unit: parameters gathered by one collective into one flat buffer whose views *are* the parameters.

PARTITIONED -> `start_gather` -> GATHERING -> `finish_gather` -> GATHERED -> `release` -> PARTITIONED. The full buffer
is one tensor for life: release frees its bytes, gather takes and refills them, so that what autograd
saved (views of a weight) is valid again when backward runs. A unit that is whole for good is gathered once and
refreshed after each step.

[Note: changes in place] A value changes in its partition, by a step or by `infinity.modify()`. What a module writes
into a whole parameter while it runs would be lost with the release, sooner or later as placement has it. So the version
counters of a unit's parameters are compared when its use ends, on every tier alike; and before a step those of units
that are whole for good, where the step would undo what the program has written between two passes.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from enum import Enum

import torch
from torch import Tensor, nn

from infinity.distributed.axis_group import AxisGroup
from infinity.distributed.collectives import all_gather
from infinity.errors import StateError, of_another_process
from infinity.log import warn_once
from infinity.memory.ledger import Ledger
from infinity.memory.pages import let_inherit
from infinity.memory.partition import DTYPES
from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import UnitPlacement
from infinity.plan.types import Key, Kind, Tier
from infinity.zero import parameter


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
        self.state = GatherState.PARTITIONED
        self.key = Key(Kind.PARAM, layout.index)
        # Open scopes (forward or backward) that need the unit, and its place in the trace at the latest of them.
        self.users = 0
        self.position: int | None = None
        # What `param._version` of each parameter was when its use began, and when the values last came from partitions:
        # see [Note: changes in place].
        self._used_versions: list[int] | None = None
        self._filled_versions: list[int] = []
        # How often the values have changed: backward needs those of its forward.
        self.generation = 0
        # Whether the parameters look partitioned while the unit is gathered.
        self.hidden = False
        # Forward calls whose backward has not run.
        self.pending = 0
        self._store = store
        self._device = device
        self._group = group
        self._ledger = ledger
        self._gather_name = f"gather of {layout.name}"
        self._transfer: Transfer = Completed()
        # The copy out of this rank's partition, and the lease that it needs.
        self._copied: Transfer = Completed()
        self._lease = ExitStack()
        self.leasing = False
        self._dtype = DTYPES[layout.dtype]
        # Bytes of the full buffer by kind: of an aliased partition this rank's slice is its home.
        own = layout.partition_numel(placed.parts) * self._dtype.itemsize if placed.aliased else 0
        self.kinds = {Kind.FULL: layout.nbytes - own, **({Kind.PARAM: own} if own else {})}
        self._full_name = f"the whole of {layout.name}"
        self._resizable = None if placed.whole else device.resizable(layout.numel, self._dtype)
        if self._resizable is None:
            with self._taking():
                self.full = device.empty(layout.numel, self._dtype)
        else:
            self.full = self._resizable.tensor
        self._views = self._cut()
        self._placeholders = [parameter.placeholder(slot.own_shape, self._dtype, device.torch) for slot in layout.slots]
        _open[self] = os.getpid()
        if placed.whole:
            self.full.zero_()
            if placed.aliased:
                store.adopt(self.key, self.local_partition.view(torch.uint8))

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

    def start_gather(self) -> None:
        """Submit the copy and the collective that fill the full buffer. Waits only for this rank's own partition."""
        if self.state is not GatherState.PARTITIONED:
            return
        if self._resizable is not None and not self._resizable.has_bytes:
            with self._taking():
                self._resizable.take()
        self.state = GatherState.GATHERING
        try:
            self._transfer = self._fill()
        except BaseException:
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
        self.hidden = True
        self.state = GatherState.GATHERED
        self._show()
        self._filled_versions = self._versions()

    def _show(self) -> None:
        if self.hidden:
            for param, view in zip(self.params, self._views, strict=True):
                parameter.restore(param, view)
            self.hidden = False

    def begin_use(self) -> None:
        """A module begins to use the whole values: remember which versions they have. See [Note: changes in place]."""
        # An embedding's backward has the unit in use without its values.
        self._used_versions = self._versions() if self.visible else None

    def end_use(self) -> StateError | None:
        """The module is done. What to raise where it has changed a parameter in place."""
        return self._changed_since(
            self._used_versions,
            "was changed in place while the model ran, and the change would be lost when the parameter is released: "
            "change it after engine.step(), inside infinity.modify()",
        )

    def changed_beside(self) -> StateError | None:
        """What to raise where a parameter that is whole for good was changed in place, and its partition was not."""
        if not self.placed.whole or (
            self.placed.aliased and (self._dtype is torch.float32 or not self.layout.trainable)
        ):
            return None
        return self._changed_since(
            self._filled_versions,
            "was changed in place, which its partition does not follow, so that a step or a checkpoint would undo the "
            "change: change it inside infinity.modify()",
        )

    def accept_changes(self) -> None:
        """The partition has the changed values now, or they are given up."""
        self.generation += 1
        if self.visible:
            self._used_versions = self._filled_versions = self._versions()

    def _versions(self) -> list[int]:
        return [param._version for param in self.params]

    def _changed_since(self, versions: list[int] | None, why: str) -> StateError | None:
        if versions is None or not self.visible or versions == (now := self._versions()):
            return None
        at = next(at for at, pair in enumerate(zip(versions, now, strict=True)) if pair[0] != pair[1])
        # Said once: what is done about the error needs the unit.
        self._used_versions = self._filled_versions = now
        return StateError(f"{parameter.name_of(self.params[at])} {why}")

    def reassigned_data(self, param: nn.Parameter) -> Tensor | None:
        """Data that was assigned to a whole parameter (`param.data = ...`), which gets its place in the unit back."""
        index = next(index for index, other in enumerate(self.params) if other is param)
        view = self._views[index]
        assigned = param.data
        if assigned.shape == view.shape and assigned.data_ptr() == view.data_ptr():
            return None
        parameter.restore(param, view)
        return assigned

    def release_lease(self, *, wait: bool) -> bool:
        """Return the partition's lease, if the copy out of it is over; with `wait`, stop the host until it is.

        Before that the partition must not be written, nor its buffer go back to the pool. False: it is still needed.
        """
        if not self.leasing:
            return True
        if not wait and not self._copied.done():
            return False
        with trace.span(trace.WAIT, "copy to the device", self.key):
            self._device.arrived(self._copied)
        self._copied = Completed()
        self.leasing = False
        self._lease.close()
        return True

    @property
    def visible(self) -> bool:
        """Whether the parameters are whole."""
        return self.state is GatherState.GATHERED and not self.hidden

    @property
    def has_bytes(self) -> bool:
        """Whether the full buffer takes memory, for values or for the next gather."""
        return self._resizable is None or self._resizable.has_bytes

    def release(self, *, keep_bytes: bool = False) -> None:
        """Let go of the whole values; the parameters keep their logical shapes. A unit that is whole for good stays.

        keep_bytes: leave the full buffer's memory to the next gather, until `free`.
        """
        if self.placed.whole or self.state is GatherState.PARTITIONED:
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
        if self.state is GatherState.PARTITIONED and self._resizable is not None and self._resizable.has_bytes:
            self._resizable.free(to_spare=to_spare)
            self._return()

    def abandon(self) -> None:
        """Release after an error. A gather that still runs keeps its buffer: waiting for it might fail the same way."""
        if self.state is GatherState.GATHERING:
            if not self._transfer.done():
                return
            self._transfer = self._copied = Completed()
        self.release()

    def set_placeholders(self) -> None:
        """Make every parameter of the unit look partitioned, also where its bytes are kept for a later use: another
        module that uses one meanwhile must ask for it, so that its backward has it too.
        """
        self.hidden = True
        for param, view, stand_in in zip(self.params, self._views, self._placeholders, strict=True):
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
        keeper = _Elsewhere(owner)
        for param, stand_in in zip(self.params, self._placeholders, strict=True):
            for each in {id(each): each for each in (param, parameter.whole_of(param))}.values():
                parameter.attach(each, keeper)
            if not parameter.is_released(param):
                parameter.release(param, stand_in)

    def stepped(self) -> None:
        """The optimizer has changed the partition: what was computed with older values is outdated."""
        self.generation += 1
        if self.placed.whole:
            self.refresh()

    def refresh(self) -> None:
        """Bring a whole unit up to date with the partitions that the optimizer has written."""
        self.state = GatherState.GATHERING
        self._transfer = self._fill()
        self.finish_gather()

    def close(self) -> None:
        """Drop the partition's lease and stop booking; parameters that are whole keep their values."""
        self.leasing = False
        self._lease.close()
        _open.pop(self, None)
        if self.has_bytes:
            self._return()
        if self.placed.whole:
            # From now on the parameters are the program's, in its children too.
            let_inherit(self.full)
            for param in map(parameter.whole_of, self.params):
                parameter.forget(param)

    def _cut(self) -> list[Tensor]:
        """The parameters' places in the full buffer. One whose storage is resized needs its bytes for that."""
        with ExitStack() as stack:
            if self._resizable is not None and not self._resizable.mapped:
                with self._taking():
                    self._resizable.take()
                stack.callback(self.free)
            slots = self.layout.slots
            return [self.full[slot.offset : slot.offset + slot.numel].view(slot.own_shape) for slot in slots]

    def _fill(self) -> Transfer:
        """Put this rank's partition into its place in the full buffer and gather the others'."""
        trace.begin_async("gathers", self.key, self.layout.nbytes)
        if not self.placed.aliased:
            self.release_lease(wait=True)
            (partition,) = self._lease.enter_context(self._store.read(self.key))
            self.leasing = True
            self._copied = self._device.copy(self.local_partition, partition.view(Kind.PARAM))
            self.release_lease(wait=False)
        if self.placed.parts == 1 or not self.layout.numel:
            return self._copied
        with trace.span(trace.WAIT, "copy to the device", self.key):
            self._copied.wait()
        return all_gather(self.full, self.local_partition, self._group, self._gather_name)

    def _taking(self) -> AbstractContextManager[None]:
        return self._ledger.taking(Tier.GPU, self.kinds, self._full_name)

    def _return(self) -> None:
        for kind, nbytes in self.kinds.items():
            self._ledger.add(Tier.GPU, kind, -nbytes)


class _Elsewhere:
    """The keeper of parameters whose engine is another process's: this one is a forked child."""

    def __init__(self, owner: int) -> None:
        self._owner = owner

    def materialize(self, params: list[nn.Parameter], use: str) -> None:
        raise of_another_process(f"use {parameter.name_of(params[0])} ({use})", self._owner)


# Units that are not closed, and the process that made each. See [Note: forks] in `infinity.memory.pages`.
_open: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()


def _after_fork() -> None:
    for unit, owner in list(_open.items()):
        unit.disown(owner)
    _open.clear()


os.register_at_fork(after_in_child=_after_fork)
