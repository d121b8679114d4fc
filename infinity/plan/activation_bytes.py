"""What a pass over a model needs beside parameters and their gradients: one type for estimates and measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from infinity.plan.types import Tier


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes on the device of one micro-batch's forward and backward, gradients of parameters left out.

    nbytes: at the busiest moment; saved_nbytes: what lies between forward and backward. parts: what the busiest moment
    is made of, by name. source: where the numbers are from, with a reason where it is not the first choice.
    inputs: how many tensors of these are kept by blocks that are computed again, and may lie on another tier;
    input_nbytes: bytes of one. gaps_nbytes: what the process's allocator takes beyond them, if they lie in the
    process's memory. blocks: the same by block, of which stages have
    their part; None where it is not known.
    """

    nbytes: int
    parts: Mapping[str, int]
    source: str
    saved_nbytes: int = 0
    inputs: int = 0
    input_nbytes: int = 0
    gaps_nbytes: int = 0
    blocks: BlockActivations | None = None


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """A micro-batch's activations by block, for a model in stages.

    saved: bytes that each block's forward saves. deferred: of each block's linear layers, their inputs and the
    gradients of their outputs, from which a split backward computes weight gradients later. saves_input: whether what a
    block saves contains the tensor that enters it. recomputed: whether it saves that alone, and is computed again.
    head_nbytes: saved behind the last block; loss_nbytes: the same at the loss's busiest moment; head_deferred: of the
    head, as of a block. working: what each block's backward has beside what all forwards have saved. boundary_nbytes:
    of the tensor that goes from block to block.
    """

    saved: tuple[int, ...]
    deferred: tuple[int, ...]
    saves_input: tuple[bool, ...]
    recomputed: tuple[bool, ...]
    working: tuple[int, ...]
    boundary_nbytes: int
    head_nbytes: int = 0
    loss_nbytes: int = 0
    head_deferred: int = 0

    def with_inputs_elsewhere(self) -> BlockActivations:
        """The same where inputs of recomputed blocks lie on another tier between forward and backward."""
        each = [*zip(self.saved, self.working, self.recomputed, strict=True)]
        return replace(
            self, saved=tuple(0 if again else saved for saved, _, again in each),
            working=tuple(working + (saved if again else 0) for saved, working, again in each),
        )  # fmt: skip


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
