"""A device whose host learns late that a copy is over, as that of one with copy streams does.

Bytes move at once: what is late is the news. Who asks `done()` once and never again keeps what the copy needs.
"""

from __future__ import annotations

import pytest

from infinity.base.transfer import Transfer
from infinity.memory.tiers.device import Device


class Late:
    """A copy that is over for the device, and for the host once it has stopped for it or asks again."""

    def __init__(self) -> None:
        self.known = False

    def done(self) -> bool:
        known, self.known = self.known, True
        return known

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
