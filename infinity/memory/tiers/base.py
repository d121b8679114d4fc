"""The back ends of tiers: what allocates an addressable one, and what moves the bytes of any other."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from infinity.base.transfer import Transfer
from infinity.ops.aio import BLOCK_NBYTES
from infinity.plan.types import Extent

# The part of the written bytes whose checksum is kept.
Checked = bool | Literal["sampled"]
Folders = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How drives are used.

    depth: blocks in flight. threads: I/O threads. timeout_seconds: limit of one request. block_nbytes: of one block.
    checksum: the part of the written bytes whose checksum is kept and compared at each read (all, a sample, none).
    weights: the share of the bytes that each of several drives takes; empty: by measured bandwidth.
    """

    depth: int = 32
    threads: int = 4
    timeout_seconds: float = 300.0
    block_nbytes: int = BLOCK_NBYTES
    checksum: Checked = "sampled"
    weights: tuple[float, ...] = ()


class MemoryBackend(Protocol):
    """Memory of an addressable tier."""

    def allocate(self, nbytes: int) -> Tensor:
        """A buffer (uint8, [nbytes]); MemoryError or RuntimeError where the system refuses it."""
        ...

    def release(self, buffer: Tensor) -> None:
        """Prepare a buffer for the end of its last reference, which gives it back."""
        ...

    def close(self) -> None:
        """Prepare all buffers."""
        ...


class TierBackend(ABC):
    """This rank's bytes on one tier that is not addressable, and what moves them.

    A further tier is a subclass and a `Tier` value, given to `infinity.memory.tiers.registry.add_tier`.
    """

    @classmethod
    @abstractmethod
    def open(cls, directory: Folders, *, nbytes: int, rank: int, options: QueueOptions) -> TierBackend:
        """Reserve `nbytes` bytes in the folders that the configuration names.

        Raises CapacityError or TransferError where there is no room; then nothing was written.
        """

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes reserved."""

    @property
    def backend(self) -> str:
        """What moves the bytes, by name."""
        return type(self).__name__

    @property
    def ahead_nbytes(self) -> int:
        """Bytes that may have begun to move before a request whose turn is next."""
        return 0

    def register(self, buffer: Tensor) -> bool:
        """Announce a long-lived buffer, so that transfers in it cost less until `close`; False: nothing is gained."""
        return False

    @abstractmethod
    def read(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        """Submit a read of one extent into `buffer` (uint8, [extent.nbytes]). Greater priorities go first.

        The transfer's `wait` raises TransferError where the bytes cannot be read or are not those that were written.
        """

    @abstractmethod
    def write(self, extent: Extent, buffer: Tensor, *, priority: int = 0) -> Transfer:
        """Submit a write of `buffer` (uint8, [extent.nbytes]) to one extent; the buffer must not change meanwhile."""

    @abstractmethod
    def close(self) -> None:
        """End what is in flight and give the bytes back; raise the first failure that no caller has seen."""
