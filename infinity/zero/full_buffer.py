"""The flat device memory that a unit is gathered into, and its parameters' places in it."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack

from torch import Tensor

from infinity.memory.ledger import Ledger
from infinity.memory.partition import DTYPES
from infinity.memory.resizable_buffer import occupy, vacate
from infinity.memory.tiers.device import Device
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import UnitPlacement
from infinity.plan.types import Kind, Tier


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
