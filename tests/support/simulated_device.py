"""The simulated accelerator as the engine's device. See tests/support/accelerator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from infinity.memory.tiers.device import Accelerator, Device, add_device, remove_device
from tests.support import accelerator
from tests.support.accelerator import collectives


class SimulatedDevice(Accelerator):
    """The back end of any accelerator, with CPU memory pinned by registration."""

    pinning = "registration"

    @classmethod
    def is_available(cls) -> bool:
        return accelerator.is_loaded()

    def register(self, pointer: int, nbytes: int) -> str | None:
        return accelerator.register(pointer, nbytes)

    def unregister(self, pointer: int) -> None:
        assert accelerator.unregister(pointer) is None


class Communicating(SimulatedDevice):
    """The same with collectives of its own, as NCCL's: see tests/support/accelerator/collectives.py."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        collectives.register()
        self.collectives = collectives.NAME


@contextmanager
def engines_use(device: type[Device] = SimulatedDevice) -> Iterator[None]:
    """A block in which engines find this type of device first."""
    add_device(device)
    try:
        yield
    finally:
        remove_device(device)
