"""A device whose host does not know that a copy is over until it has stopped for it, as one with copy streams may be.

Bytes move at once: what is late is the news. Who asks `done()` once and never again keeps what the copy needs.
"""

from __future__ import annotations

import pytest

from infinity.memory.tiers.device import Device
from infinity.ops.transfer import Transfer


class Late:
    """A copy that is over for the device but not for the host."""

    def __init__(self) -> None:
        self.known = False

    def done(self) -> bool:
        return self.known

    def wait(self) -> None:
        """Make the device wait, not the host."""


def copies_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every later copy of every device late."""
    copy, arrived = Device.copy, Device.arrived

    def begin(self: Device, *tensors: object) -> Late:
        copy(self, *tensors)  # type: ignore[arg-type]
        return Late()

    def stop(self: Device, transfer: Transfer) -> None:
        if isinstance(transfer, Late):
            transfer.known = True
        arrived(self, transfer)

    monkeypatch.setattr(Device, "copy", begin)
    monkeypatch.setattr(Device, "arrived", stop)
