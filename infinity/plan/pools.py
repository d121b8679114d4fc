"""Whole gradients on the device: the bytes that autograd leaves on parameters, and the scratch of their reduction.

Autograd leaves a gradient on each parameter. The engine takes a unit's gradients once the last module call that used
the unit has run backward; until then they are as large as the unit.

Which units hold device memory: gathered ones, and released ones whose memory waits for a later gather.

Where the device's memory is the process's, the system is slow to give freed pages again. So a released unit retains its
memory, and all units together stay within the plan's bound: the unit released longest ago gives its memory up first.
The engine gathers by this class, and the phases follow the schedule with it.

What tiles mean for a plan: what stays gathered around them, and words for people.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from infinity.base.sizes import format_bytes
from infinity.plan.capacity import ACCELERATOR, PROCESS
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement
from infinity.plan.types import DTYPE_NBYTES

# Sums of a rank that lie on an accelerator at once, one arriving and one on its way to its partition.
MINE_COUNT = 2


def travels_alone(layout: UnitLayout, wire: str) -> bool:
    """Whether a unit's whole flat gradient is the one that autograd leaves: its only parameter's, in the dtype that
    travels, without padding. That of a tile is not: the next tile's comes into its memory.
    """
    if len(layout.slots) != 1 or layout.is_tile:
        return False
    return layout.slots[0].numel == layout.numel and layout.dtype == wire


def left_nbytes(
    trace: Sequence[int], layouts: Sequence[UnitLayout], *, accelerator: bool, wire: str | None = None
) -> tuple[int, ...]:
    """Bytes of gradients on parameters at most, at each position of a backward trace.

    wire: see `Plan.wire_in_backward`.

    A unit that several modules need (tied weights) has gradients from its first module to its last. At each module but
    the first it takes twice more: the new gradient, and the sum that autograd allocates. A gradient that is sent from
    where it lies stays until the next unit's gradients have come.

    Freed gradients of other shapes may stay with the allocator, which reuses them only for the same shapes.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, unit in enumerate(trace):
        first.setdefault(unit, position)
        last[unit] = position
    left = []
    # Of units between their first use and their last, and of the one that travels.
    waiting = travelling = 0
    sent: tuple[int, ...] = ()
    allocator = ACCELERATOR if accelerator else PROCESS
    # By shapes of a unit's gradients: what of them stays with the allocator.
    pooled: dict[tuple[int, ...], int] = {}
    for position, unit in enumerate(trace):
        layout = layouts[unit]
        own = layout.numel * DTYPE_NBYTES[layout.dtype] if layout.trainable else 0
        waiting += own if position == first[unit] else 0
        again = 2 * own if first[unit] < position else 0
        # Bytes of each parameter's gradient.
        pieces = tuple(slot.numel * DTYPE_NBYTES[layout.dtype] for slot in layout.slots if layout.trainable)
        # What travels has not come back to the allocator.
        before = max((nbytes for shapes, nbytes in pooled.items() if shapes not in (pieces, sent)), default=0)
        left.append(waiting + again + travelling + before)
        if position == last[unit]:
            waiting -= own
            if layout.trainable:
                travels = wire is not None and travels_alone(layout, wire)
                travelling, sent = (own, pieces) if travels else (0, ())
        pooled[pieces] = allocator.pooled_nbytes(pieces)
    return tuple(left)


@dataclass(frozen=True, slots=True)
class Scratch:
    """Bytes on the device that reductions of whole gradients work in, one unit after the other."""

    # What is summed, unless gradients are kept whole, or travel alone, in the dtype that travels.
    full_nbytes: int = 0
    # What the other ranks send, where the collective has no memory of its own for it.
    workspace_nbytes: int = 0
    # This rank's sums of `MINE_COUNT` units, where the collective has each in one piece that cannot go into its
    # partition as it is.
    mine_nbytes: int = 0
    # Gradients of two units on their way to CPU memory, beside `mine_nbytes`.
    down_nbytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.full_nbytes + self.workspace_nbytes + self.mine_nbytes + self.down_nbytes


def make_scratch(
    layouts: Sequence[UnitLayout], placement: Placement, *, dp: int, wire: str, grad_dtype: str, accelerator: bool,
    accumulates: bool = False,
) -> Scratch:  # fmt: skip
    """What reductions over `dp` ranks need, and copies to CPU memory. `wire` is the dtype that ranks exchange."""
    down = _down_nbytes(layouts, placement, dp, wire, grad_dtype, accumulates) if accelerator else 0
    if dp == 1:
        return Scratch(down_nbytes=down)
    width = DTYPE_NBYTES[wire]
    trainable = [layout for layout in layouts if layout.trainable]
    largest = max((layout.numel for layout in trainable), default=0) * width
    parts = max((placed.parts for placed in placement.units), default=1)
    side_by_side = largest
    if placement.grad_whole:
        side_by_side = 0 if wire == grad_dtype else largest
    else:
        several = [layout.numel for layout in trainable if not travels_alone(layout, wire)]
        side_by_side = max(several, default=0) * width
    at_home = not side_by_side and placement.grad_whole and all(placed.grad.on_device for placed in placement.units)
    return Scratch(
        full_nbytes=side_by_side,
        workspace_nbytes=0 if accelerator else largest - largest // parts,
        mine_nbytes=MINE_COUNT * (largest // parts) if accelerator and parts > 1 and not at_home else 0,
        down_nbytes=down,
    )


def _down_nbytes(
    layouts: Sequence[UnitLayout], placement: Placement, dp: int, wire: str, grad_dtype: str, accumulates: bool
) -> int:
    """Of the two largest units, if gradients of any go to CPU memory: this rank's gradients as autograd leaves them
    (with several ranks the sum has memory of its own), and in the dtype that they are kept in, if they are cast or
    added to what came before.
    """
    largest = 0
    if placement.grad_whole or all(placed.grad.on_device for placed in placement.units):
        # Whole gradients are summed, and copied, at the boundary.
        return 0
    for layout, placed in zip(layouts, placement.units, strict=True):
        if layout.trainable:
            arriving = wire if dp > 1 else layout.dtype
            left = DTYPE_NBYTES[layout.dtype] if dp == 1 else 0
            kept = DTYPE_NBYTES[grad_dtype] if accumulates or arriving != grad_dtype else 0
            largest = max(largest, layout.partition_numel(placed.parts) * (left + kept))
    return 2 * largest


class Room(NamedTuple):
    """What has to happen before a unit takes memory."""

    # Released units that give up theirs, the oldest first.
    freed: tuple[int, ...] = ()
    # Bytes of pages without an owner that may stay, the unit's next ones included; None: the unit has its own memory.
    spare_nbytes_max: int | None = None


class UnitMemory:
    """Bytes of units by index. nbytes_max: what gathered and released units may hold together; a gathered unit is
    always let in. retain: whether released units keep their memory.
    """

    def __init__(self, nbytes_max: int, *, retain: bool) -> None:
        self._nbytes_max = nbytes_max
        self._retain = retain
        # Both from the oldest to the newest.
        self._live: dict[int, int] = {}
        self._retained: dict[int, int] = {}
        self.live_nbytes = self.retained_nbytes = 0

    def __contains__(self, unit: int) -> bool:
        return unit in self._live

    @property
    def nbytes(self) -> int:
        """Bytes of all units that hold memory."""
        return self.live_nbytes + self.retained_nbytes

    @property
    def live(self) -> tuple[int, ...]:
        """Gathered units."""
        return tuple(self._live)

    @property
    def retained(self) -> tuple[int, ...]:
        """Released units that hold memory."""
        return tuple(self._retained)

    def gather(self, unit: int, nbytes: int) -> Room:
        """Count a unit as gathered."""
        if unit in self._live:
            return Room()
        room = Room() if self._forget(unit) else self._make_room(nbytes)
        self._live[unit] = nbytes
        self.live_nbytes += nbytes
        return room

    def release(self, unit: int, *, retain: bool = True) -> bool:
        """Count a gathered unit as released. Returns whether it keeps its memory."""
        nbytes = self._live.pop(unit)
        self.live_nbytes -= nbytes
        if retain and self._retain:
            self._retained[unit] = nbytes
            self.retained_nbytes += nbytes
        return retain and self._retain

    def _make_room(self, nbytes: int) -> Room:
        freed = []
        while self._retained and self.nbytes + nbytes > self._nbytes_max:
            freed.append(next(iter(self._retained)))
            self._forget(freed[-1])
        return Room(tuple(freed), max(self._nbytes_max - self.nbytes, nbytes))

    def _forget(self, unit: int) -> bool:
        nbytes = self._retained.pop(unit, None)
        self.retained_nbytes -= nbytes or 0
        return nbytes is not None


def around_nbytes(layouts: Sequence[UnitLayout], placement: Placement) -> int:
    """Bytes of the units that stay gathered while tiles come and go: those of modules that the tiles' modules are in.
    """
    inside = {module for layout in layouts if layout.is_tile for module in layout.modules}
    around = [
        layout.nbytes
        for layout, placed in zip(layouts, placement.units, strict=True)
        if not layout.is_tile and not placed.whole and any(_encloses(layout.modules[0], module) for module in inside)
    ]
    return sum(around)


def routed_nbytes(layouts: Sequence[UnitLayout], placement: Placement) -> int:
    """Bytes of the largest unit of experts that come and go."""
    units = zip(layouts, placement.units, strict=True)
    return max((layout.nbytes for layout, placed in units if layout.routed and not placed.whole), default=0)


def tiles_in_words(layouts: Sequence[UnitLayout], placement: Placement, live_numel: int) -> Iterator[str]:
    """A line for each weight in tiles, and for each that is beyond the gather budget and still gathered whole."""
    tiles: dict[str, list[int]] = {}
    for layout, placed in zip(layouts, placement.units, strict=True):
        for slot in layout.slots:
            if slot.is_tile:
                tiles.setdefault(slot.name, []).append(layout.nbytes)
            elif not placed.whole and slot.numel > live_numel:
                yield (
                    f"{slot.name} is gathered whole ({format_bytes(layout.nbytes)}), beyond stage3_max_live_parameters:"
                    " tile_parameters is 0, or a module that uses it is no Linear or Embedding, or is one unit"
                )
    for name, sizes in tiles.items():
        yield f"{name} is executed in {len(sizes)} tiles of at most {format_bytes(max(sizes))}"


def _encloses(outer: str, inner: str) -> bool:
    """Whether the module at path `outer` is the one at `inner`, or one around it."""
    return not outer or inner == outer or inner.startswith(outer + ".")
