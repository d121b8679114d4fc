"""What tiles mean for a plan: what stays gathered around them, and words for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from infinity.config.units import format_bytes
from infinity.plan.layout import UnitLayout
from infinity.plan.placement import Placement


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
