"""Slices of a parameter's values that ranks keep before an engine has the model, exchanged a piece at a time.

Rank r of n keeps elements r * ceil(numel / n) and following of the flat values; the last ranks may keep fewer, or none.
All values are in CPU memory, and travel as bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from infinity.distributed import collectives
from infinity.distributed.axis_group import AxisGroup

# Bytes that are exchanged at a time.
PIECE_NBYTES = 16 << 20


def kept_range(numel: int, group: AxisGroup) -> tuple[int, int]:
    """Return the elements, from and to, that this rank keeps of `numel`."""
    rows = -(-numel // group.size)
    return min(group.index * rows, numel), min((group.index + 1) * rows, numel)


def broadcast_values(values: Tensor, group: AxisGroup, source: int, name: str) -> None:
    """Copy the values ([numel], contiguous) of rank `source` into those of every rank. Collective."""
    if values.numel() and group.size > 1:
        collectives.broadcast(values.view(torch.uint8), group, source, f"broadcast of {name}")


def keep_broadcast(values: Tensor, group: AxisGroup, source: int, name: str) -> Tensor:
    """Return this rank's slice (a new tensor) of the values ([numel], contiguous) of rank `source`. Collective.

    The other ranks' values are neither read nor changed; what arrives takes `PIECE_NBYTES` at a time.
    """
    start, stop = kept_range(values.numel(), group)
    kept = torch.empty(stop - start, dtype=values.dtype, device="cpu")
    step = PIECE_NBYTES // values.dtype.itemsize
    room = None if group.index == source else torch.empty(min(step, values.numel()), dtype=values.dtype, device="cpu")
    for begin in range(0, values.numel(), step):
        end = min(begin + step, values.numel())
        piece = values[begin:end].cpu() if room is None else room[: end - begin]
        broadcast_values(piece, group, source, name)
        first, last = max(begin, start), min(end, stop)
        if first < last:
            kept[first - start : last - start].copy_(piece[first - begin : last - begin])
    return kept


def gather_range(
    kept: Tensor, numel: int, group: AxisGroup, name: str, wanted: tuple[int, int] | None = None
) -> Tensor:
    """Return elements `wanted` (from, to; None: all) of `numel` values of which every rank keeps its slice. Collective.

    Ranks may want different elements.
    """
    start, stop = wanted or (0, numel)
    found = torch.empty(stop - start, dtype=kept.dtype, device="cpu")
    rows = -(-numel // group.size)
    step = max(PIECE_NBYTES // (kept.dtype.itemsize * group.size), 1)
    mine = torch.zeros(min(step, rows), dtype=kept.dtype, device="cpu")
    full = torch.empty(group.size * mine.numel(), dtype=kept.dtype, device="cpu")
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        own = kept[begin : begin + count]
        mine[: own.numel()].copy_(own)
        everyone = full[: group.size * count]
        moving = collectives.all_gather(
            everyone.view(torch.uint8), mine[:count].view(torch.uint8), group, f"gather of {name}"
        )
        moving.wait()
        for index, row in enumerate(everyone.view(group.size, count)):
            base = index * rows + begin
            first, last = max(base, start), min(base + count, (index + 1) * rows, numel, stop)
            if first < last:
                found[first - start : last - start].copy_(row[first - base : last - base])
    return found
