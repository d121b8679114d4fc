"""What an allocator takes beyond the tensors that live in its memory: the bounds that a plan counts on.

Who allocates keeps to them: `infinity.memory.tiers.pinned` for the process's memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allocator:
    """The bounds of one allocator.

    pooled_nbytes_max: pieces below it stay with the allocator when they are freed, for pieces of the same shapes;
    others go back to the system. pooled_gaps: what pieces below so many bytes take beyond their own, as a share of
    them. free_gaps: what is lost between blocks, as a share of the memory that is free at the start.
    """

    pooled_nbytes_max: int = 0
    pooled_gaps: tuple[tuple[int, float], ...] = ()
    free_gaps: float = 0.0

    def pooled_nbytes(self, pieces: Iterable[int]) -> int:
        """Bytes of those of the pieces that stay with the allocator when they are freed."""
        return sum(nbytes for nbytes in pieces if nbytes < self.pooled_nbytes_max)

    def parts(self, piece: int) -> tuple[int, int]:
        """Bytes that a piece takes, its gap included: of what goes back to the system, and of what stays."""
        share = next((share for below, share in self.pooled_gaps if piece < below), 0.0)
        taken = int((1.0 + share) * piece)
        return (taken, 0) if piece >= self.pooled_nbytes_max else (0, taken)


# The process's memory. Tensors are aligned, and a gap that one left is too small for the next of its size with its
# alignment: gaps of up to 1.3 were seen among small pieces alone. In whole models less is left: 0.3 is a fit to the 46
# cells of benchmarks/results/first_batch_xeon.json, nine models in two precisions; first_batch.json checks it. What is
# freed stays, so that small pieces count at their own busiest moment, and large ones at theirs.
PROCESS = Allocator(pooled_nbytes_max=8 << 20, pooled_gaps=((5 << 18, 0.5), (8 << 20, 0.3)))
ACCELERATOR = Allocator(free_gaps=0.04)
