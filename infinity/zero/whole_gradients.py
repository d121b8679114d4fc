"""Whole gradients on the device, where they accumulate until the step: see `placement.sums_at_boundary`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from infinity.memory.ledger import Ledger
from infinity.memory.tiers.device import Device
from infinity.plan.types import Kind, Tier
from infinity.zero.unit import Unit


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
