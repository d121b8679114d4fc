"""Which units are never released: all below stage 3; at stage 3 those that are too small to be worth a gather.

The bounds are DeepSpeed's `stage3_param_persistence_threshold` and `stage3_model_persistence_threshold`.
"""

from __future__ import annotations

from collections.abc import Sequence

from infinity.plan.layout import UnitLayout
from infinity.plan.request import PlanRequest
from infinity.plan.types import Tier


def always_whole(layouts: Sequence[UnitLayout], request: PlanRequest) -> frozenset[int]:
    """Return the indices of the units that stay gathered wherever their partitions live."""
    if request.stage < 3:
        return frozenset(layout.index for layout in layouts)
    persistent_numel = 0
    small = []
    for layout in layouts:
        fits = persistent_numel + layout.numel <= request.persistent_total_numel
        # Tiles are small because the whole is not.
        if fits and not layout.is_tile and layout.numel < max(request.persistence_numel, 1):
            persistent_numel += layout.numel
            small.append(layout.index)
    return frozenset(small)


def whole_units(
    layouts: Sequence[UnitLayout], request: PlanRequest, dp: int, params: Sequence[Tier]
) -> frozenset[int]:
    """Return the indices of `always_whole` and of the units whose only partition lies on the device."""
    lucky = (layout.index for layout in layouts if dp == 1 and params[layout.index].on_device)
    return always_whole(layouts, request).union(lucky)
