"""Whole gradients on the device: how many bytes of them backward leaves behind, and what their reduction works in.

Autograd leaves a gradient on each parameter; a unit's are taken when the last module call that used it has run
backward. Until then they are nobody's but torch's, and as large as the unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement
from infinity.plan.types import DTYPE_NBYTES, Tier

# glibc takes larger pieces from the system one by one and gives them back when they are freed (its
# DEFAULT_MMAP_THRESHOLD_MAX on 64 bits); smaller ones stay in its heap.
_HEAP_PIECE_NBYTES_MAX = 32 << 20


def left_nbytes(trace: Sequence[int], layouts: Sequence[UnitLayout], *, accelerator: bool) -> tuple[int, ...]:
    """Bytes of gradients on parameters at most, at each position of a backward trace.

    A unit that several modules need (tied weights) has its gradients from the first to the last of them, and at each
    but the first two more: the one that has just come, and the sum, which autograd puts into memory of its own.

    In the process's own memory, what a unit of other shapes left before stays in the C library's heap, where it serves
    gradients of the same shapes again, but not larger ones.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, unit in enumerate(trace):
        first.setdefault(unit, position)
        last[unit] = position
    left = []
    # By shapes of a unit's gradients: what they leave in the heap.
    heap: dict[tuple[int, ...], int] = {}
    for position, unit in enumerate(trace):
        waiting = sum(_nbytes(layouts[other]) for other in first if first[other] <= position <= last[other])
        again = 2 * _nbytes(layouts[unit]) if first[unit] < position else 0
        pieces = _pieces(layouts[unit])
        before = max((nbytes for shapes, nbytes in heap.items() if shapes != pieces), default=0)
        left.append(waiting + again + (0 if accelerator else before))
        heap[pieces] = sum(piece for piece in pieces if piece < _HEAP_PIECE_NBYTES_MAX)
    return tuple(left)


def _pieces(layout: UnitLayout) -> tuple[int, ...]:
    """Bytes of each parameter's gradient."""
    if not layout.trainable:
        return ()
    return tuple(slot.numel * DTYPE_NBYTES[layout.dtype] for slot in layout.slots)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes on the device that reductions of whole gradients work in, one unit after the other."""

    # What is summed, unless gradients are kept whole in the dtype that travels.
    full_nbytes: int = 0
    # What the other ranks send, where the collective has no memory of its own for it.
    workspace_nbytes: int = 0
    # This rank's sum, unless it can go into its partition as it is.
    mine_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.full_nbytes + self.workspace_nbytes + self.mine_nbytes


def make_scratch(
    layouts: Sequence[UnitLayout], placement: Placement, *, dp: int, wire: str, grad_dtype: str, accelerator: bool
) -> Scratch:
    """What reductions over `dp` ranks need. `wire` is the dtype that travels."""
    nbytes = max((layout.numel for layout in layouts if layout.trainable), default=0) * DTYPE_NBYTES[wire]
    parts = max((placed.parts for placed in placement.units), default=1)
    if dp == 1:
        return Scratch()
    kept = placement.grad_whole and wire == grad_dtype
    at_home = kept and not (accelerator and any(placed.grad is not Tier.GPU for placed in placement.units))
    return Scratch(
        full_nbytes=0 if kept else nbytes,
        workspace_nbytes=nbytes if parts > 1 and not accelerator else 0,
        mine_nbytes=nbytes // parts if parts > 1 and not at_home else 0,
    )


def _nbytes(layout: UnitLayout) -> int:
    return layout.numel * DTYPE_NBYTES[layout.dtype] if layout.trainable else 0
