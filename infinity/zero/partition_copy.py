"""The copy of this rank's partition into its unit's full buffer, and the lease that the copy needs."""

from __future__ import annotations

from contextlib import ExitStack

from torch import Tensor

from infinity.memory.store import TieredStore
from infinity.memory.tiers.device import Device
from infinity.observability import trace
from infinity.ops.transfer import Completed, Transfer
from infinity.plan.types import Key, Kind


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

    def start(self, target: Tensor) -> Transfer:
        """Lease the partition, waiting for it, and submit its copy into `target` [numel / parts].

        Copies end in the order in which they begin, so the lease of one that still runs ends with this one's.
        """
        self.release_lease(wait=False)
        (partition,) = self._lease.enter_context(self._store.read(self._key))
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
