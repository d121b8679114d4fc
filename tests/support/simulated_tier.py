"""A storage tier that is as awkward as a drive may be, and reports callers that use it wrongly.

`SimulatedTier` is a back end like that of NVMe, in memory. A request is complete after a seeded number of polls, in any
order; its bytes move at that moment, so that a buffer that is read too early still holds garbage. Latency is counted in
polls (every `done` of any request is one), not in seconds. `Misuse` is raised for what a real drive would answer with
silent corruption: two requests on one extent of which one writes, a buffer in two requests of which one fills it, a
buffer that changes while it is being written, a request outside the file.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from infinity.errors import TransferError
from infinity.memory.tiers.base import Folders, QueueOptions, TierBackend
from infinity.plan.types import EXTENT_ALIGNMENT, Extent

# The content of a buffer while it is being filled.
GARBAGE = 0xA5


class Misuse(AssertionError):
    """Report a use of the tier that loses data."""


@dataclass(frozen=True)
class Asked:
    """One request, for faults that choose by its properties. `count` is its number among all, from 0."""

    count: int
    is_write: bool
    extent: Extent


class SimulatedTransfer:
    """A request in flight."""

    def __init__(self, tier: SimulatedTier, asked: Asked, buffer: Tensor, polls: int, fails: bool) -> None:
        self.asked = asked
        self.buffer = buffer
        self.polls = polls
        self.late = 0
        self._fails = fails
        self._tier = tier
        self._snapshot = buffer.clone() if asked.is_write else None
        self.over = False

    def done(self) -> bool:
        """Return whether it is complete, with or without an error; counts as a poll."""
        with self._tier.lock:
            self._tier.poll()
            return self.over

    def wait(self) -> None:
        """Complete it; raise TransferError if it is set to fail, and for the first `late` times."""
        with self._tier.lock:
            if self.late:
                self.late -= 1
                raise self._error(errno.ETIMEDOUT, "late")
            self.finish()
        if self._fails:
            raise self._error(errno.EIO, "simulated")

    def finish(self) -> None:
        """Move the bytes. A request that fails moves half of them."""
        if self.over:
            return
        self.over = True
        self._tier.forget(self)
        extent = self.asked.extent
        nbytes = extent.nbytes // 2 if self._fails else extent.nbytes
        stored = self._tier.content[extent.offset : extent.offset + nbytes]
        if self._snapshot is None:
            self.buffer[:nbytes] = stored
        else:
            if not torch.equal(self._snapshot, self.buffer):
                raise Misuse(f"the buffer of the write to {extent} changed before it was written")
            stored.copy_(self.buffer[:nbytes])

    def _error(self, code: int, reason: str) -> TransferError:
        extent, operation = self.asked.extent, "write" if self.asked.is_write else "read"
        return TransferError(
            operation, path="simulated", offset=extent.offset, nbytes=extent.nbytes, errno=code, reason=reason
        )


class SimulatedTier(TierBackend):
    """See the module's text. `faults` says which requests fail; `polls_max` bounds the latency."""

    def __init__(
        self, nbytes: int, *, seed: int = 0, polls_max: int = 4, faults: Callable[[Asked], bool] = lambda asked: False
    ) -> None:
        self.content = torch.full((nbytes,), GARBAGE, dtype=torch.uint8)
        self.flying: list[SimulatedTransfer] = []
        self.requests: list[Asked] = []
        self.faults = faults
        # Number of waits of later requests that end too early.
        self.late = 0
        self.closed = False
        # The store waits for transfers without its own lock.
        self.lock = threading.RLock()
        self._random = random.Random(seed)
        self._polls_max = polls_max

    @classmethod
    def open(cls, directory: Folders, *, nbytes: int, rank: int, options: QueueOptions) -> SimulatedTier:
        """A tier without faults; the folder is not used."""
        return cls(nbytes, seed=rank)

    @property
    def nbytes(self) -> int:
        return self.content.numel()

    def read(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> SimulatedTransfer:
        """Fill `buffer` from an extent later; the order is random and ignores the priority."""
        with self.lock:
            return self._submit(extent, buffer, is_write=False)

    def write(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> SimulatedTransfer:
        """Write `buffer` to an extent, later."""
        with self.lock:
            return self._submit(extent, buffer, is_write=True)

    def close(self) -> None:
        """Complete the requests in flight; no request may follow."""
        with self.lock:
            for transfer in self.flying[:]:
                transfer.finish()
            self.closed = True

    def poll(self) -> None:
        """Let time pass: requests whose time has come are completed, the latest submitted among them first."""
        for transfer in reversed(self.flying[:]):
            transfer.polls -= 1
            if transfer.polls <= 0 and not transfer.late:
                transfer.finish()

    def forget(self, transfer: SimulatedTransfer) -> None:
        """Note that a request is over."""
        self.flying.remove(transfer)

    def _submit(self, extent: Extent, buffer: Tensor, *, is_write: bool) -> SimulatedTransfer:
        asked = Asked(len(self.requests), is_write, extent)
        self._check(asked, buffer)
        self.requests.append(asked)
        transfer = SimulatedTransfer(self, asked, buffer, self._random.randint(0, self._polls_max), self.faults(asked))
        transfer.late = self.late
        if not is_write:
            buffer.fill_(GARBAGE)
        self.flying.append(transfer)
        return transfer

    def _check(self, asked: Asked, buffer: Tensor) -> None:
        extent = asked.extent
        if self.closed:
            raise Misuse("a request after close")
        if buffer.numel() != extent.nbytes or not buffer.is_contiguous():
            raise Misuse(f"a buffer of {buffer.numel()} bytes for {extent}")
        if extent.offset % EXTENT_ALIGNMENT or extent.nbytes % EXTENT_ALIGNMENT or buffer.data_ptr() % EXTENT_ALIGNMENT:
            raise Misuse(f"{extent} or its buffer is not aligned")
        if extent.offset + extent.nbytes > self.nbytes:
            raise Misuse(f"{extent} ends outside the file of {self.nbytes} bytes")
        for other in self.flying:
            both_read = not asked.is_write and not other.asked.is_write
            if not both_read and _meet(
                extent.offset, extent.nbytes, other.asked.extent.offset, other.asked.extent.nbytes
            ):
                raise Misuse(f"{extent} while {other.asked} is in flight")
            both_write = asked.is_write and other.asked.is_write
            if not both_write and _meet(
                buffer.data_ptr(), buffer.numel(), other.buffer.data_ptr(), other.buffer.numel()
            ):
                raise Misuse(f"the buffer of {other.asked}, which is in flight, was reused for {asked}")


def _meet(start: int, nbytes: int, other_start: int, other_nbytes: int) -> bool:
    return start < other_start + other_nbytes and other_start < start + nbytes
