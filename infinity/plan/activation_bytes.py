"""What a pass over a model needs beside parameters and their gradients: one type for estimates and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from infinity.plan.types import Tier


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device of one micro-batch's forward and backward, gradients of parameters left out.

    nbytes: at the busiest moment; saved_nbytes: what lies between forward and backward. parts: what the busiest moment
    is made of, by name. source: where the numbers are from, with a reason where it is not the first choice.
    inputs: how many tensors of these are kept by blocks that are computed again, and may lie on another tier;
    input_nbytes: bytes of one. pooled_nbytes: at their own busiest moment, of pieces so small that the process's
    allocator keeps them when they are freed; None: not told apart.
    """

    nbytes: int
    parts: Mapping[str, int]
    source: str
    saved_nbytes: int = 0
    inputs: int = 0
    input_nbytes: int = 0
    pooled_nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class OffloadedCheckpoints:
    """Checkpoints that lie on a tier between forward and backward: how many, bytes of each, and how many buffers in CPU
    memory they pass through (none on their way to CPU memory).
    """

    tier: Tier
    count: int
    each_nbytes: int
    buffers: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes on the tier."""
        return self.count * self.each_nbytes

    @property
    def freed_nbytes(self) -> int:
        """Bytes that the device is spared: of all but the one that backward works on."""
        return max(self.count - 1, 0) * self.each_nbytes
